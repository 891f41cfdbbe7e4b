# SPDX-License-Identifier: Apache-2.0
"""From the chunks of a request and its block ids to the descriptors of one transfer.

Cost grows with chunks, planes and runs, never with tokens: everything that a layout alone decides
is computed once, the rest is arithmetic on arrays of pages. The same descriptors store and load; a
null page leaves out its run and moves no other row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows
from vllm_ascend_kvext.transfer.schema import (
    DTYPE,
    HOST_ALIGNMENT_BYTES,
    PlaneColumn,
    RunColumn,
    Table,
)

NULL_PAGE = 0
"""vLLM's null block: stands for tokens that nobody reads any more."""


@dataclass(frozen=True, slots=True)
class PlacedChunk:
    """Tokens, counted from the request's first, and where their bytes begin in the host buffer.

    ``host_offset_bytes`` is a multiple of 64. A chunk takes ``RunPlanner.chunk_bytes`` from there.
    """

    tokens: TokenRange
    host_offset_bytes: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Descriptors:
    """One transfer between the pages of a request and one host buffer.

    Group ``g`` of chunk ``c`` is group ``c * num_groups + g`` of the tables.

    Attributes:
        planes: See ``PlaneColumn``.
        runs: See ``RunColumn``.
        host_bytes: Where the last chunk ends: the least size of the host buffer.
        rows_missing: Rows that a chunk keeps but that have no page. shape: [num_chunks, num_groups]
    """

    planes: Table
    runs: Table
    host_bytes: int
    rows_missing: Table

    @property
    def is_complete(self) -> bool:
        """Whether every row that the chunks keep is moved."""
        return not self.rows_missing.any()


class RunPlanner:
    """Makes descriptors for the requests of one worker.

    Args:
        layout: The registered pages.
        states: What becomes of state groups.
    """

    def __init__(self, layout: KVLayout, states: StatePolicy = StatePolicy.EXACT) -> None:
        self._layout = layout
        self._states = states
        self._groups = [(group.scheduler_group, group.rows_per_page) for group in layout.groups]
        self._planes = _plane_table(layout)
        self._placed: dict[tuple[int, ...], tuple[Table, int]] = {}

    def chunk_bytes(self, tokens: TokenRange) -> int:
        """Host bytes of a chunk, as ``host_layout`` has them.

        Raises:
            TokenRangeError: See ``kept_rows``.
        """
        return self._place(self._rows(tokens))[1]

    def plan(
        self, chunks: Sequence[PlacedChunk], block_ids: Sequence[Sequence[int]]
    ) -> Descriptors:
        """The descriptors of some chunks of one request.

        Args:
            chunks: What to move; their places in the host buffer do not overlap.
            block_ids: Of the request from its first token on, one list per KV cache group.

        Raises:
            TokenRangeError: If a list is too short, or has an id that no page has.
        """
        layout = self._layout
        if len(block_ids) != layout.num_scheduler_groups:
            raise TokenRangeError(
                f"block ids: expected {layout.num_scheduler_groups} lists, one per KV cache group, "
                f"found {len(block_ids)}; pass those of the whole request"
            )
        rows = [self._rows(chunk.tokens) for chunk in chunks]
        planes, host_bytes = self._planes_of(chunks, rows)
        runs = self._runs_of(rows, block_ids)
        return Descriptors(planes, runs, host_bytes, _rows_missing(rows, runs))

    def _rows(self, tokens: TokenRange) -> list[range]:
        return [kept_rows(group, tokens, self._states) for group in self._layout.groups]

    def _planes_of(
        self, chunks: Sequence[PlacedChunk], rows: Sequence[Sequence[range]]
    ) -> tuple[Table, int]:
        """The planes of every chunk, and where the last chunk ends."""
        num_planes, num_groups = len(self._planes), len(self._layout.groups)
        planes = np.tile(self._planes, (len(chunks), 1))
        by_chunk = planes.reshape(len(chunks), num_planes, len(PlaneColumn))
        by_chunk[:, :, PlaneColumn.GROUP] += np.arange(len(chunks), dtype=DTYPE)[:, None] * (
            num_groups
        )
        host_bytes = 0
        for table, chunk, rows_of_chunk in zip(by_chunk, chunks, rows, strict=True):
            offsets, num_bytes = self._place(rows_of_chunk)
            table[:, PlaneColumn.HOST_OFFSET_BYTES] = offsets + chunk.host_offset_bytes
            host_bytes = max(host_bytes, chunk.host_offset_bytes + num_bytes)
        return planes, host_bytes

    def _runs_of(
        self, rows: Sequence[Sequence[range]], block_ids: Sequence[Sequence[int]]
    ) -> Table:
        """One run per page that is not null, chunk by chunk and group by group."""
        num_groups = len(self._layout.groups)
        spans: list[tuple[int, int, int, int, int, int]] = []
        pages: list[int] = []
        for chunk, rows_of_chunk in enumerate(rows):
            for index, kept in enumerate(rows_of_chunk):
                if not kept:
                    continue
                group, rows_per_page = self._groups[index]
                first_page, end_page = kept.start // rows_per_page, -(-kept.stop // rows_per_page)
                found = block_ids[group][first_page:end_page]
                if len(found) < end_page - first_page:
                    raise TokenRangeError(
                        f"block ids of KV cache group {group}: expected {end_page}, found "
                        f"{len(block_ids[group])}; pass the ids from the request's first token "
                        "on, null blocks included"
                    )
                number = chunk * num_groups + index
                spans.append((number, kept.start, kept.stop, first_page, len(found), rows_per_page))
                pages += found
        if not spans:
            return np.empty((0, len(RunColumn)), DTYPE)
        runs = _runs_of_spans(np.array(spans, DTYPE), np.array(pages, DTYPE))
        self._check_pages(runs)
        kept_runs: Table = runs[runs[:, RunColumn.PAGE] != NULL_PAGE]
        return kept_runs

    def _check_pages(self, runs: Table) -> None:
        pages = runs[:, RunColumn.PAGE]
        if pages.min() >= 0 and pages.max() < self._layout.num_pages:
            return
        wrong = runs[(pages < 0) | (pages >= self._layout.num_pages)][0]
        group, _ = self._groups[int(wrong[RunColumn.GROUP]) % len(self._groups)]
        raise TokenRangeError(
            f"block ids of KV cache group {group}: found id {wrong[RunColumn.PAGE]}, expected 0 to "
            f"{self._layout.num_pages - 1}; pass the ids of this worker's config"
        )

    def _place(self, rows: Sequence[range]) -> tuple[Table, int]:
        """Offset of every plane in its chunk, and the chunk's bytes.

        Chunks of equal length nearly always keep equally many rows.
        """
        num_rows = tuple(map(len, rows))
        placed = self._placed.get(num_rows)
        if placed is None:
            rows_of_plane = np.array(num_rows, DTYPE)[self._planes[:, PlaneColumn.GROUP]]
            num_bytes = self._planes[:, PlaneColumn.ROW_BYTES] * rows_of_plane
            num_bytes += -num_bytes % HOST_ALIGNMENT_BYTES
            placed = np.cumsum(num_bytes) - num_bytes, int(num_bytes.sum())
            if len(self._placed) < _MAX_PLACED:
                self._placed[num_rows] = placed
        return placed


_MAX_PLACED = 1024
"""Numbers of rows whose places are remembered: prompts may be cut anywhere."""


def _plane_table(layout: KVLayout) -> Table:
    rows = [
        {
            PlaneColumn.GROUP: index,
            PlaneColumn.POOL: plane.pool,
            PlaneColumn.BASE_BYTES: plane.base_bytes,
            PlaneColumn.PAGE_STRIDE_BYTES: plane.page_stride_bytes,
            PlaneColumn.REGION_OFFSET_BYTES: plane.region_offset_bytes,
            PlaneColumn.ROW_BYTES: plane.row_bytes,
            PlaneColumn.ROWS_PER_PAGE: group.rows_per_page,
            PlaneColumn.NUM_PAGES: layout.num_pages,
            PlaneColumn.HOST_OFFSET_BYTES: 0,
        }
        for index, group in enumerate(layout.groups)
        for plane in group.planes
    ]
    table = [[row[column] for column in PlaneColumn] for row in rows]
    return np.array(table, DTYPE).reshape(len(rows), len(PlaneColumn))


def _runs_of_spans(spans: Table, pages: Table) -> Table:
    """One run per page.

    Args:
        spans: Pages that follow each other in a request. Columns: group, first and end row, first
            page, pages, rows per page.
        pages: Block ids of all spans, one after the other.
    """
    counts = spans[:, 4]
    before = np.cumsum(counts) - counts
    group, start_row, end_row, first_page, _, rows_per_page = np.repeat(spans, counts, axis=0).T
    # Rows are counted from the request's first token.
    page_row = (np.arange(len(pages)) - np.repeat(before, counts) + first_page) * rows_per_page
    first_row = np.maximum(page_row, start_row)
    runs = np.empty((len(pages), len(RunColumn)), DTYPE)
    runs[:, RunColumn.GROUP] = group
    runs[:, RunColumn.PAGE] = pages
    runs[:, RunColumn.FIRST_ROW] = first_row - page_row
    runs[:, RunColumn.NUM_ROWS] = np.minimum(page_row + rows_per_page, end_row) - first_row
    runs[:, RunColumn.HOST_ROW] = first_row - start_row
    return runs


def _rows_missing(rows: Sequence[Sequence[range]], runs: Table) -> Table:
    missing = np.array([list(map(len, rows_of_chunk)) for rows_of_chunk in rows], DTYPE)
    np.subtract.at(missing.reshape(-1), runs[:, RunColumn.GROUP], runs[:, RunColumn.NUM_ROWS])
    return missing
