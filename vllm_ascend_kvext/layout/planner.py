# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans the transfers between the pages of a request and host memory.

A store decides from tokens and block ids which rows are kept, and reports these rows as row maps.
A load is planned against row maps, and may ask for any part of them. Rows that are in no map are
reported as missing, and are not moved. In both plans the sections become planes, and the pages that
hold their rows become runs. The cost grows with sections, planes and pages, never with tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache
from itertools import groupby, pairwise
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
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import BlockIds, PlacedChunk, TransferPlan
from vllm_ascend_kvext.token_range import TokenRange
from vllm_ascend_kvext.transfer.schema import DTYPE, PlaneColumn, RunColumn, Table

_MAX_REMEMBERED = 4096
"""The number of chunks whose sections are cached. Requests are cut at the same tokens."""

_SECTION = itemgetter(0, 3, 4, 5)
"""The fields of ``StoredRows`` that identify a section."""

_SECTION_COLUMNS = [0, 3, 4, 5]
"""The same fields as columns of a table of spans. The columns of such a table are the fields of
``StoredRows``, the rows per page, and where the ids of the span's pages would have page 0."""


class TransferPlanner:
    """Plans the transfers of one worker. Threads may share it.

    Args:
        sharing: How the worker shares its host memory; None if it has memory of its own. A store
            then moves the planes that this worker stores, and a load moves all planes.
    """

    def __init__(
        self,
        layout: KVLayout,
        states: StatePolicy = StatePolicy.EXACT,
        sharing: HostSharing | None = None,
    ) -> None:
        self._arrangement = HostArrangement(layout, sharing)
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
        for tokens, place_bytes, groups, cut_tokens in chunks:
            sections, num_bytes, row_map, missing_of_chunk = self._full_chunk(
                tokens, groups, cut_tokens
            )
            present = self._with_pages(sections, block_ids)
            if present != sections:
                row_map = RowMap.of(present)
                missing_of_chunk = self._missing(row_map, tokens, groups)
            row_maps.append(row_map)
            missing += missing_of_chunk
            placed += [
                StoredRows(*rows[:5], place_bytes + rows[5], rows[6])
                for rows in present
                if self._arrangement.stores(rows.group)
            ]
            host_bytes = max(host_bytes, place_bytes + num_bytes)
        planes, runs, _ = self._tables(placed, block_ids, is_store=True)
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
                the same row, the plan reads it from any of them. Of states, pass only those that
                were stored at the end of ``tokens``.
            tokens: From the first token that is not in the request's pages to the token at which
                the request resumes.
            block_ids: The block tables of the request.
            groups: Indices in the layout of the groups to load; None for all of them.

        Raises:
            TokenRangeError: If a list of block ids is too short, or the range has no tokens.
        """
        needed = self._rows(needed_rows, tokens, groups)
        found = find_rows(stored, needed)
        present = self._with_pages(found, block_ids)
        planes, runs, host_bytes = self._tables(present, block_ids)
        missing = missing_rows(self._groups, needed, present, tokens.end_tokens)
        return TransferPlan(planes, runs, host_bytes, missing)

    def _arrange(
        self, tokens: TokenRange, groups: tuple[int, ...] | None, cut_tokens: int
    ) -> tuple[list[StoredRows], int, RowMap, tuple[MissingRows, ...]]:
        """Arrange a chunk whose pages are all present.

        Returns:
            The sections, their bytes, the row map, and the rows that the chunk does not keep
            although resuming at its end needs them.
        """
        found = enumerate(self._rows(kept_rows, tokens, groups))
        kept = [(group, rows) for group, rows in found if rows]
        sections, num_bytes = self._arrangement.place(kept, cut_tokens)
        row_map = RowMap.of(sections)
        return sections, num_bytes, row_map, self._missing(row_map, tokens, groups)

    def _missing(
        self, row_map: RowMap, tokens: TokenRange, groups: tuple[int, ...] | None
    ) -> tuple[MissingRows, ...]:
        needed = self._rows(needed_rows, tokens, groups)
        found = find_rows([StoredChunk(row_map)], needed)
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

    def _tables(
        self, found: Iterable[StoredRows], block_ids: BlockIds, is_store: bool = False
    ) -> tuple[Table, Table, int]:
        """The planes, the runs, and the byte at which the last section ends.

        A section gets its planes once, even if rows of another chunk lie between its rows, because
        the op refuses planes that share host bytes.

        Args:
            found: Rows whose pages are not null.
            is_store: Whether only the planes that this worker stores are moved.
        """
        spans: list[tuple[int, ...]] = []
        pages: list[int] = []
        for rows in sorted(found, key=_SECTION):
            group = self._groups[rows.group]
            rows_per_block = group.rows_per_block
            # The first page of the rows begins with this kernel block.
            first_block = rows.first_row // group.rows_per_page * group.blocks_per_page
            spans.append((*rows, rows_per_block, len(pages) - first_block))
            pages += _kernel_blocks(self._pages_of(rows, block_ids), group.blocks_per_page)
        if not spans:
            return np.empty((0, len(PlaneColumn)), DTYPE), np.empty((0, len(RunColumn)), DTYPE), 0
        spans_of_sections = _cut_into_sections(np.array(spans, DTYPE))
        sections = spans_of_sections[:, _SECTION_COLUMNS]
        is_first = np.ones(len(sections), bool)
        is_first[1:] = (sections[1:] != sections[:-1]).any(axis=1)
        planes, host_bytes = self._planes_of(sections[is_first], is_store)
        runs = _runs_of(spans_of_sections, np.cumsum(is_first) - 1, np.array(pages, DTYPE))
        return planes, runs, host_bytes

    def _planes_of(self, sections: Table, is_store: bool) -> tuple[Table, int]:
        """The planes of some sections, and the byte at which the last section ends.

        Args:
            sections: The group, the first row, the number of rows, and the offset of each.
        """
        sizes = sections[:, (0, 2)]
        offsets = sections[:, 3]
        changes = np.flatnonzero((sizes[1:] != sizes[:-1]).any(axis=1)) + 1
        tables: list[Table] = []
        num_planes: list[int] = []
        host_bytes = 0
        # Most sections are as large as the section before.
        for first, end in pairwise((0, *changes.tolist(), len(sections))):
            group, num_rows = sizes[first].tolist()
            section = self._arrangement.section(group, num_rows)
            table = section.stored_planes if is_store else section.planes
            tables.append(np.tile(table, (end - first, 1)))
            num_planes += [len(table)] * (end - first)
            host_bytes = max(host_bytes, int(offsets[first:end].max()) + section.num_bytes)
        planes = np.concatenate(tables)
        planes[:, PlaneColumn.GROUP] = np.repeat(np.arange(len(sections)), num_planes)
        planes[:, PlaneColumn.HOST_OFFSET_BYTES] += np.repeat(offsets, num_planes)
        return planes, host_bytes

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


def _kernel_blocks(pages: Sequence[int], blocks_per_page: int) -> Sequence[int]:
    """The numbers of the kernel blocks of some pages, which are not null."""
    if blocks_per_page == 1:
        return pages
    first = [page * blocks_per_page for page in pages]
    return [number + block for number in first for block in range(blocks_per_page)]


def _cut_into_sections(spans: Table) -> Table:
    """The parts of some spans that lie in each section."""
    _, first_row, end_row, section_first_row, section_rows, *_ = spans.T
    first = (first_row - section_first_row) // section_rows
    num_sections = (end_row - 1 - section_first_row) // section_rows + 1 - first
    if num_sections.max() == 1 and not first.any():
        return spans
    parts = np.repeat(spans, num_sections, axis=0)
    _, first_row, end_row, section_first_row, section_rows, offset_bytes, cut_bytes, *_ = parts.T
    in_span = np.arange(len(parts)) - np.repeat(
        np.cumsum(num_sections) - num_sections, num_sections
    )
    number = np.repeat(first, num_sections) + in_span
    # The columns are views, so the table changes, too.
    section_first_row += number * section_rows
    offset_bytes += number * cut_bytes
    np.maximum(first_row, section_first_row, out=first_row)
    np.minimum(end_row, section_first_row + section_rows, out=end_row)
    return parts


def _runs_of(spans: Table, sections: Table, pages: Table) -> Table:
    """One run per page, sorted by section. shape: [num_runs, 5]

    Args:
        spans: Spans that lie in one section each, sorted by section.
        sections: The number of the section of each span.
        pages: The block ids of all spans.
    """
    _, first_row, end_row, *_, rows_per_page, _ = spans.T
    first_page = first_row // rows_per_page
    num_pages = (end_row - 1) // rows_per_page + 1 - first_page
    of_page = np.repeat(spans, num_pages, axis=0)
    _, first_row, end_row, section_first_row, _, _, _, rows_per_page, page_0 = of_page.T
    page_in_span = np.arange(len(of_page)) - np.repeat(np.cumsum(num_pages) - num_pages, num_pages)
    page = first_row // rows_per_page + page_in_span
    page_row = page * rows_per_page
    first_row = np.maximum(page_row, first_row)
    runs = np.empty((len(of_page), len(RunColumn)), DTYPE)
    runs[:, RunColumn.GROUP] = np.repeat(sections, num_pages)
    runs[:, RunColumn.PAGE] = pages[page_0 + page]
    runs[:, RunColumn.FIRST_ROW] = first_row - page_row
    runs[:, RunColumn.NUM_ROWS] = np.minimum(page_row + rows_per_page, end_row) - first_row
    runs[:, RunColumn.HOST_ROW] = first_row - section_first_row
    return runs
