# SPDX-License-Identifier: Apache-2.0
"""Plans the transfers between the pages of a request and host memory.

A store decides from tokens and block ids which rows are kept, and reports these rows as row maps.
A load is planned against row maps, and may ask for any part of them. Rows that are in no map are
reported as missing, and are not moved. In both plans the sections become planes, and the pages that
hold their rows become runs. The cost grows with sections, planes and pages, never with tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from operator import itemgetter, not_

import numpy as np

from vllm_ascend_kvext.errors import TokenRangeError
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import NULL_PAGE, KVLayout, LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.row_map import (
    MissingRows,
    RowMap,
    StoredChunk,
    StoredRows,
    find_rows,
    missing_rows,
)
from vllm_ascend_kvext.layout.rows import kept_rows, needed_rows
from vllm_ascend_kvext.layout.transfer_plan import BlockIds, PlacedChunk, TransferPlan
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn, Table

_MAX_REMEMBERED = 4096
"""The number of chunks whose sections are cached. Requests are cut at the same tokens."""

_SECTION = itemgetter(0, 3, 4, 5)
"""The fields of ``StoredRows`` that identify a section."""


class TransferPlanner:
    """Plans the transfers of one worker. Threads may share it."""

    def __init__(self, layout: KVLayout, states: StatePolicy = StatePolicy.EXACT) -> None:
        self._arrangement = HostArrangement(layout)
        self._groups = layout.groups
        self._states = states
        self._full_chunk = lru_cache(_MAX_REMEMBERED)(self._arrange)

    def plan_store(self, chunks: Iterable[PlacedChunk], block_ids: BlockIds) -> TransferPlan:
        """Plan the store of some chunks of one request.

        Args:
            chunks: Chunks whose places in the host buffer do not overlap.
            block_ids: The block tables of the request.

        Raises:
            TokenRangeError: If a list of block ids is too short, or a chunk has no tokens.
        """
        placed: list[StoredRows] = []
        row_maps = []
        missing: list[MissingRows] = []
        host_bytes = 0
        for tokens, place_bytes, groups in chunks:
            sections, num_bytes, row_map, missing_of_chunk = self._full_chunk(tokens, groups)
            present = self._with_pages(sections, block_ids)
            if present != sections:
                row_map = RowMap.of(present)
                missing_of_chunk = self._missing(row_map, tokens, groups)
            row_maps.append(row_map)
            missing += missing_of_chunk
            placed += [StoredRows(*rows[:5], place_bytes + rows[5]) for rows in present]
            host_bytes = max(host_bytes, place_bytes + num_bytes)
        planes, runs, _ = self._tables(placed, block_ids)
        return TransferPlan(planes, runs, host_bytes, tuple(missing), tuple(row_maps))

    def plan_load(
        self,
        stored: Iterable[StoredChunk],
        tokens: TokenRange,
        block_ids: BlockIds,
        groups: Collection[int] | None = None,
    ) -> TransferPlan:
        """Plan the load of all rows that a request needs to resume at the end of a range.

        Args:
            stored: Chunks, or parts of chunks, of this request's tokens. If several of them have
                the same row, the plan reads it from any of them.
            tokens: From the first token that is not in the request's pages to the token at which
                the request resumes.
            block_ids: The block tables of the request.
            groups: Indices in the layout of the groups to load; None for all of them.

        Raises:
            TokenRangeError: If a list of block ids is too short, or the range has no tokens.
        """
        needed = self._rows(needed_rows, tokens, groups)
        found = find_rows(self._groups, stored, needed, tokens.end_tokens)
        present = self._with_pages(found, block_ids)
        planes, runs, host_bytes = self._tables(present, block_ids)
        missing = missing_rows(self._groups, needed, present, tokens.end_tokens)
        return TransferPlan(planes, runs, host_bytes, missing)

    def _arrange(
        self, tokens: TokenRange, groups: tuple[int, ...] | None
    ) -> tuple[list[StoredRows], int, RowMap, tuple[MissingRows, ...]]:
        """Arrange a chunk whose pages are all present.

        Returns:
            The sections, their bytes, the row map, and the rows that the chunk does not keep
            although resuming at its end needs them.
        """
        kept = enumerate(self._rows(kept_rows, tokens, groups))
        sections, num_bytes = self._arrangement.place((i, rows) for i, rows in kept if rows)
        row_map = RowMap.of(sections)
        return sections, num_bytes, row_map, self._missing(row_map, tokens, groups)

    def _missing(
        self, row_map: RowMap, tokens: TokenRange, groups: tuple[int, ...] | None
    ) -> tuple[MissingRows, ...]:
        needed = self._rows(needed_rows, tokens, groups)
        found = find_rows(self._groups, [StoredChunk(row_map)], needed, tokens.end_tokens)
        return missing_rows(self._groups, needed, found, tokens.end_tokens)

    def _rows(
        self,
        rows_of: Callable[[LayoutGroup, TokenRange, StatePolicy], range],
        tokens: TokenRange,
        groups: Collection[int] | None,
    ) -> list[range]:
        return [
            rows_of(group, tokens, self._states) if groups is None or index in groups else range(0)
            for index, group in enumerate(self._groups)
        ]

    def _with_pages(self, found: Iterable[StoredRows], block_ids: BlockIds) -> list[StoredRows]:
        """The parts of the found rows whose page is not null."""
        present = []
        for rows in found:
            pages = self._pages_of(rows, block_ids)
            if NULL_PAGE not in pages:
                present.append(rows)
                continue
            rows_per_page = self._groups[rows.group].rows_per_page
            row = rows.first_row // rows_per_page * rows_per_page
            for is_null, stretch in groupby(pages, not_):
                next_row = row + len(list(stretch)) * rows_per_page
                if not is_null:
                    first_row = max(row, rows.first_row)
                    end_row = min(next_row, rows.end_row)
                    present.append(rows._replace(first_row=first_row, end_row=end_row))
                row = next_row
        return present

    def _tables(self, found: Iterable[StoredRows], block_ids: BlockIds) -> tuple[Table, Table, int]:
        """The planes, the runs, and the byte at which the last section ends.

        A section gets its planes once, even if rows of another chunk lie between its rows, because
        the op refuses planes that share host bytes.

        Args:
            found: Rows whose pages are not null.
        """
        tables: list[Table] = []
        offsets: list[int] = []
        spans: list[tuple[int, ...]] = []
        pages: list[int] = []
        host_bytes = 0
        section: tuple[int, ...] = ()
        for rows in sorted(found, key=_SECTION):
            if section != _SECTION(rows):
                section = _SECTION(rows)
                table, num_bytes = self._arrangement.section(rows.group, rows.section_rows)
                tables.append(table)
                offsets.append(rows.host_offset_bytes)
                host_bytes = max(host_bytes, rows.host_offset_bytes + num_bytes)
            ids = self._pages_of(rows, block_ids)
            pages += ids
            spans.append(
                (
                    len(tables) - 1,
                    rows.first_row,
                    rows.end_row,
                    rows.section_first_row,
                    self._groups[rows.group].rows_per_page,
                    len(ids),
                )
            )
        if not tables:
            return np.empty((0, len(PlaneColumn)), DTYPE), np.empty((0, len(RunColumn)), DTYPE), 0
        counts = list(map(len, tables))
        planes = np.concatenate(tables)
        planes[:, PlaneColumn.GROUP] = np.repeat(np.arange(len(tables)), counts)
        planes[:, PlaneColumn.HOST_OFFSET_BYTES] += np.repeat(np.array(offsets, DTYPE), counts)
        return planes, _runs_of(spans, pages), host_bytes

    def _pages_of(self, rows: StoredRows, block_ids: BlockIds) -> Sequence[int]:
        group = self._groups[rows.group]
        first_page = rows.first_row // group.rows_per_page
        end_page = -(-rows.end_row // group.rows_per_page)
        ids = block_ids[group.kv_cache_group_id]
        found = ids[first_page:end_page]
        if len(found) < end_page - first_page:
            raise TokenRangeError(
                f"block ids of KV cache group {group.kv_cache_group_id}: expected {end_page}, "
                f"found {len(ids)}; pass the ids from the request's first token on, null blocks "
                "included"
            )
        return found


def _runs_of(spans: Sequence[tuple[int, ...]], pages: Sequence[int]) -> Table:
    """One run per page, sorted by section. shape: [num_runs, 5]

    Args:
        spans: One tuple per span, sorted by section: section, first row, end row, first row of the
            section, rows per page, number of pages.
        pages: The block ids of all spans, in the order of the spans.
    """
    table = np.array(spans, DTYPE)
    num_pages = table[:, -1]
    of_page = np.repeat(table, num_pages, axis=0)
    section, first_row, end_row, section_first_row, rows_per_page, _ = of_page.T
    page_in_span = np.arange(len(pages)) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    page_row = (first_row // rows_per_page + page_in_span) * rows_per_page
    first_row = np.maximum(page_row, first_row)
    runs = np.empty((len(pages), len(RunColumn)), DTYPE)
    runs[:, RunColumn.GROUP] = section
    runs[:, RunColumn.PAGE] = pages
    runs[:, RunColumn.FIRST_ROW] = first_row - page_row
    runs[:, RunColumn.NUM_ROWS] = np.minimum(page_row + rows_per_page, end_row) - first_row
    runs[:, RunColumn.HOST_ROW] = first_row - section_first_row
    return runs
