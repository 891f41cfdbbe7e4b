# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides how rows are arranged in host memory. No other module decides it.

The rows of a section lie plane after plane, and every plane begins at a multiple of 64 bytes; see
``row_map``. A chunk has one section for each group whose rows it keeps. The sections follow each
other without a gap, so the size of a chunk does not depend on which pages are null.

A chunk may be arranged cut by cut. Each cut then has its own sections, and the end of the place can
be given back, cut after cut::

    groups A and B, one cut         A: rows 0 to 15          B: rows 0 to 3
    the same, four cuts             A: 0-3  B: 0  | A: 4-7  B: 1  | A: 8-11  B: 2  | A: 12-15  B: 3

If the workers of a host share their host memory, the copies of a plane lie one behind the other,
see ``sharing``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.layout.row_map import StoredRows
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.transfer.schema import DTYPE, HOST_ALIGNMENT_BYTES, PlaneColumn, Table

_MAX_REMEMBERED = 1024
"""The number of section sizes whose planes are cached. Prompts end anywhere, so sizes vary."""


class ArrangedSection(NamedTuple):
    """One section that is placed at offset 0, and the planes of its group.

    Attributes:
        planes: shape: ``[num_planes, 9]``. The table is shared and read-only: copy it to change it.
        stored_planes: The rows of ``planes`` that this worker stores. Another worker stores the
            others.
        num_bytes: The size of the section, a multiple of 64.
    """

    planes: Table
    stored_planes: Table
    num_bytes: int


class HostArrangement:
    """Arranges the sections of all groups of one layout. Threads may share it.

    Args:
        layout: The layout of one worker.
        sharing: How the worker shares its host memory; None if it has memory of its own.
    """

    def __init__(self, layout: KVLayout, sharing: HostSharing | None = None) -> None:
        self._planes = [_plane_table(group, layout.num_pages) for group in layout.groups]
        self._copies = [_copies_of(sharing, group) for group in range(len(layout.groups))]
        self._tokens_per_row = [group.tokens_per_row for group in layout.groups]
        self.section = lru_cache(_MAX_REMEMBERED)(self._section)

    def place(
        self, kept: Iterable[tuple[int, range]], cut_tokens: int = 0
    ) -> tuple[list[StoredRows], int]:
        """Place full sections for pairs of a group and its rows, one section after the other.

        Args:
            kept: Pairs of a group's index and its rows; no range is empty.
            cut_tokens: If not 0, sections end at multiples of this number of tokens, and follow
                each other cut by cut. Rows must end there, too.

        Returns:
            The rows with their sections, and the sum of the sections' bytes.
        """
        kept = list(kept)
        placed = []
        num_bytes = 0
        for cut, num_cuts in self._cuts(kept, cut_tokens) if cut_tokens else [(kept, 1)]:
            sizes = [self.section(group, len(rows)).num_bytes for group, rows in cut]
            cut_bytes = sum(sizes)
            offset_bytes = num_bytes
            for (group, rows), size in zip(cut, sizes, strict=True):
                end_row = rows.start + num_cuts * len(rows)
                section = rows.start, len(rows), offset_bytes, cut_bytes if cut_tokens else 0
                placed.append(StoredRows(group, rows.start, end_row, *section))
                offset_bytes += size
            num_bytes += num_cuts * cut_bytes
        return placed, num_bytes

    def _cuts(
        self, kept: list[tuple[int, range]], cut_tokens: int
    ) -> list[tuple[list[tuple[int, range]], int]]:
        """The parts of some rows that lie in each cut.

        Returns:
            Pairs of the parts in one cut, and the number of cuts. The cuts that follow the first
            one of a pair have as many rows of the same groups.
        """
        per_row = self._tokens_per_row
        first_tokens = min((rows.start * per_row[group] for group, rows in kept), default=0)
        end_tokens = max((rows.stop * per_row[group] for group, rows in kept), default=0)
        found: list[tuple[list[tuple[int, range]], int]] = []
        before: list[tuple[int, int]] = []
        for cut in range(first_tokens - first_tokens % cut_tokens, end_tokens, cut_tokens):
            parts = []
            for group, rows in kept:
                first_row = max(rows.start, cut // per_row[group])
                end_row = min(rows.stop, (cut + cut_tokens) // per_row[group])
                if first_row < end_row:
                    parts.append((group, range(first_row, end_row)))
            sizes = [(group, len(rows)) for group, rows in parts]
            if found and sizes == before:
                first, num_cuts = found[-1]
                found[-1] = first, num_cuts + 1
            else:
                found.append((parts, 1))
            before = sizes
        return found

    def stores(self, group: int) -> bool:
        """Whether this worker stores any plane of a group."""
        copies = self._copies[group]
        return copies is None or bool(copies.is_stored.any())

    def _section(self, group: int, num_rows: int) -> ArrangedSection:
        planes = self._planes[group].copy()
        copies = self._copies[group]
        copy_bytes = planes[:, PlaneColumn.ROW_BYTES] * num_rows
        copy_bytes += -copy_bytes % HOST_ALIGNMENT_BYTES
        num_bytes = copy_bytes if copies is None else copy_bytes * copies.num_copies
        planes[:, PlaneColumn.HOST_OFFSET_BYTES] = np.cumsum(num_bytes) - num_bytes
        stored = planes
        if copies is not None:
            planes[:, PlaneColumn.HOST_OFFSET_BYTES] += copy_bytes * copies.copy
            stored = planes[copies.is_stored]
            stored.flags.writeable = False
        planes.flags.writeable = False
        return ArrangedSection(planes, stored, int(num_bytes.sum()))


class _Copies(NamedTuple):
    """The shares of a group's planes, as arrays. shape: ``[num_planes]`` each."""

    num_copies: Table
    copy: Table
    is_stored: np.ndarray


def _copies_of(sharing: HostSharing | None, group: int) -> _Copies | None:
    if sharing is None:
        return None
    num_copies, copy, is_stored, _ = zip(*sharing.planes[group], strict=True)
    return _Copies(np.array(num_copies, DTYPE), np.array(copy, DTYPE), np.array(is_stored, bool))


def _plane_table(group: LayoutGroup, num_pages: int) -> Table:
    table = np.zeros((len(group.planes), len(PlaneColumn)), DTYPE)
    for row, plane in zip(table, group.planes, strict=True):
        row[PlaneColumn.POOL] = plane.storage
        row[PlaneColumn.BASE_BYTES] = plane.base_bytes
        row[PlaneColumn.PAGE_STRIDE_BYTES] = plane.page_stride_bytes
        row[PlaneColumn.REGION_OFFSET_BYTES] = plane.region_offset_bytes
        row[PlaneColumn.ROW_BYTES] = plane.row_bytes
    table[:, PlaneColumn.ROWS_PER_PAGE] = group.rows_per_block
    table[:, PlaneColumn.NUM_PAGES] = num_pages * group.blocks_per_page
    return table
