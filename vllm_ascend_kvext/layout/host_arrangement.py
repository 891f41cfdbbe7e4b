# SPDX-License-Identifier: Apache-2.0
"""Decides how rows are arranged in host memory. No other module decides it.

The rows of a section lie plane after plane, and every plane begins at a multiple of 64 bytes; see
``row_map``. A chunk has one section for each group whose rows it keeps. The sections follow each
other without a gap, so the size of a chunk does not depend on which pages are null.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.layout.row_map import StoredRows
from vllm_ascend_kvext.transfer.schema import DTYPE, HOST_ALIGNMENT_BYTES, PlaneColumn, Table

_MAX_REMEMBERED = 1024
"""The number of section sizes whose planes are cached. Prompts end anywhere, so sizes vary."""


class ArrangedSection(NamedTuple):
    """One section that is placed at offset 0, and the planes of its group.

    Attributes:
        planes: shape: ``[num_planes, 9]``. The table is shared and read-only: copy it to change it.
        num_bytes: The size of the section, a multiple of 64.
    """

    planes: Table
    num_bytes: int


class HostArrangement:
    """Arranges the sections of all groups of one layout. Threads may share it."""

    def __init__(self, layout: KVLayout) -> None:
        self._planes = [_plane_table(group, layout.num_pages) for group in layout.groups]
        self.section = lru_cache(_MAX_REMEMBERED)(self._section)

    def place(self, kept: Iterable[tuple[int, range]]) -> tuple[list[StoredRows], int]:
        """Place one full section per pair of a group and its rows, one section after the other.

        Args:
            kept: Pairs of a group's index and its rows; no range is empty.

        Returns:
            The placed sections, and the sum of their bytes.
        """
        placed = []
        num_bytes = 0
        for group, rows in kept:
            placed.append(
                StoredRows(group, rows.start, rows.stop, rows.start, len(rows), num_bytes)
            )
            num_bytes += self.section(group, len(rows)).num_bytes
        return placed, num_bytes

    def _section(self, group: int, num_rows: int) -> ArrangedSection:
        planes = self._planes[group].copy()
        num_bytes = planes[:, PlaneColumn.ROW_BYTES] * num_rows
        num_bytes += -num_bytes % HOST_ALIGNMENT_BYTES
        planes[:, PlaneColumn.HOST_OFFSET_BYTES] = np.cumsum(num_bytes) - num_bytes
        planes.flags.writeable = False
        return ArrangedSection(planes, int(num_bytes.sum()))


def _plane_table(group: LayoutGroup, num_pages: int) -> Table:
    table = np.zeros((len(group.planes), len(PlaneColumn)), DTYPE)
    for row, plane in zip(table, group.planes, strict=True):
        row[PlaneColumn.POOL] = plane.storage
        row[PlaneColumn.BASE_BYTES] = plane.base_bytes
        row[PlaneColumn.PAGE_STRIDE_BYTES] = plane.page_stride_bytes
        row[PlaneColumn.REGION_OFFSET_BYTES] = plane.region_offset_bytes
        row[PlaneColumn.ROW_BYTES] = plane.row_bytes
    table[:, PlaneColumn.ROWS_PER_PAGE] = group.rows_per_page
    table[:, PlaneColumn.NUM_PAGES] = num_pages
    return table
