# SPDX-License-Identifier: Apache-2.0
"""How rows are arranged in host memory: the one place that decides it.

The rows of a section lie plane after plane, and every plane begins at a multiple of 64 bytes; see
``row_map``. A chunk has a section for each group of which it keeps rows, one behind the other, so
that its size does not depend on which pages are null. Knows planes; knows no block ids.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.layout.errors import RowMapError
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup
from vllm_ascend_kvext.layout.page_runs import planes_of
from vllm_ascend_kvext.layout.row_map import RowMap
from vllm_ascend_kvext.layout.rows import TokenRange, dense_rows
from vllm_ascend_kvext.transfer.schema import (
    DTYPE,
    HOST_ALIGNMENT_BYTES,
    PlaneColumn,
    Table,
)

_MAX_REMEMBERED = 1024
"""Sizes of sections whose planes are remembered: prompts may end anywhere."""

_MAX_SECTION_BYTES = 1 << 62
"""What 63 bits hold, planes aligned."""


class ArrangedSection(NamedTuple):
    """A section of some size, placed at 0.

    Attributes:
        planes: See ``PlaneColumn``; ``GROUP`` is 0, offsets are from the section's start. Shared:
            copy before you write. shape: [num_planes of the group, 9]
        num_bytes: A multiple of 64.
    """

    planes: Table
    num_bytes: int


class HostArrangement:
    """Sections of the groups of one layout."""

    def __init__(self, layout: KVLayout) -> None:
        self._num_groups = len(layout.groups)
        self._row_bytes = [group.row_bytes for group in layout.groups]
        self._planes = [_plane_table(group, layout.num_pages) for group in layout.groups]
        self._sections: dict[tuple[int, int], ArrangedSection] = {}
        self._of_chunks: dict[tuple[tuple[int, int], ...], Table] = {}

    def section(self, group: int, num_rows: int) -> ArrangedSection:
        """A section of ``num_rows`` rows of the group at this index.

        Raises:
            RowMapError: If it has more bytes than a table can say.
        """
        key = group, num_rows
        found = self._sections.get(key)
        if found is None:
            if num_rows * self._row_bytes[group] > _MAX_SECTION_BYTES:
                raise RowMapError(
                    f"section of group {group}: found {num_rows} rows of {self._row_bytes[group]} "
                    f"bytes, expected at most {_MAX_SECTION_BYTES} bytes; drop the chunk"
                )
            planes = self._planes[group].copy()
            num_bytes = planes[:, PlaneColumn.ROW_BYTES] * num_rows
            num_bytes += -num_bytes % HOST_ALIGNMENT_BYTES
            planes[:, PlaneColumn.HOST_OFFSET_BYTES] = np.cumsum(num_bytes) - num_bytes
            planes.flags.writeable = False
            found = ArrangedSection(planes, int(num_bytes.sum()))
            if len(self._sections) < _MAX_REMEMBERED:
                self._sections[key] = found
        return found

    def sections(self, sizes: tuple[tuple[int, int], ...]) -> Table:
        """The planes of sections one behind the other, numbered from 0 on. Shared, as above.

        Args:
            sizes: Group and number of rows of each section.
        """
        planes = self._of_chunks.get(sizes)
        if planes is None:
            found = [self.section(*size) for size in sizes]
            offsets = [0, *accumulate(section.num_bytes for section in found)][: len(found)]
            planes = planes_of([section.planes for section in found], [1] * len(found), offsets)
            planes.flags.writeable = False
            if len(self._of_chunks) < _MAX_REMEMBERED:
                self._of_chunks[sizes] = planes
        return planes

    def check(self, row_map: RowMap, num_bytes: int) -> None:
        """Refuse a map that no store with this layout can have written.

        Args:
            row_map: Of one chunk.
            num_bytes: Size of the chunk's place.

        Raises:
            RowMapError: Naming the section.
        """
        end_bytes = 0
        section: tuple[int, ...] = ()
        for rows in sorted(row_map, key=lambda rows: (rows.host_offset_bytes, rows)):
            if rows.group >= self._num_groups:
                raise RowMapError(
                    f"row map: found group {rows.group}, this layout has {self._num_groups}; it "
                    "belongs to another layout: drop the chunk"
                )
            if section == (rows.group, *rows[3:]):
                continue
            section = (rows.group, *rows[3:])
            if rows.host_offset_bytes < end_bytes:
                raise RowMapError(
                    f"row map: the section of {rows} begins before byte {end_bytes}, where the "
                    "section before it ends; it belongs to another layout: drop the chunk"
                )
            size_bytes = self.section(rows.group, rows.section_rows).num_bytes
            end_bytes = rows.host_offset_bytes + size_bytes
        if end_bytes > num_bytes:
            raise RowMapError(
                f"row map: its rows end at byte {end_bytes}, the chunk's place has {num_bytes}; "
                "drop the chunk"
            )


def dense_chunk_bytes(layout: KVLayout, tokens: TokenRange) -> int:
    """Host bytes of a chunk that keeps every row of every group."""
    arrangement = HostArrangement(layout)
    num_rows = [len(dense_rows(group, tokens)) for group in layout.groups]
    return sum(
        arrangement.section(group, count).num_bytes for group, count in enumerate(num_rows) if count
    )


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
