# SPDX-License-Identifier: Apache-2.0
"""Plans the transfers between the pages of a request and host memory.

A store decides from tokens and block ids which rows are kept, and reports them as row maps. A load
is planned against those maps, whatever part of them it wants: rows that are in no map are missing
and are not moved. Cost grows with sections, planes and pages, never with tokens: everything that a
layout alone decides is computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.page_runs import (
    NULL_PAGE,
    ids_of,
    planes_of,
    rows_with_pages,
    runs_of,
    runs_with_pages,
    without_null_pages,
)
from vllm_ascend_kvext.layout.row_map import RowMap, StoredChunk, StoredRows
from vllm_ascend_kvext.layout.rows import TokenRange, kept_rows, needed_rows
from vllm_ascend_kvext.layout.stored_rows import (
    MissingRows,
    check_alignment,
    find_rows,
    missing_rows,
)
from vllm_ascend_kvext.layout.transfer_plan import BlockIds, LoadPlan, PlacedChunk, StorePlan
from vllm_ascend_kvext.transfer.schema import Table

_MAX_REMEMBERED = 4096
"""Chunks whose sections are remembered: requests are cut at the same tokens."""

_MAX_REMEMBERED_RUNS = 1 << 18
"""Runs that are remembered: 40 bytes each, shared by chunks that are cut alike."""

_SECTION = itemgetter(0, 3, 4, 5)
"""Of ``StoredRows``: what names a section."""


class _KeptRows(NamedTuple):
    """What a chunk keeps of one group: a section."""

    group: int
    first_row: int
    end_row: int
    host_offset_bytes: int


class _ChunkSections(NamedTuple):
    """What the tokens of a chunk decide, whatever its pages.

    Attributes:
        kept: Of the groups of which anything is kept.
        pages: Of each section: scheduler group, first page of the request and end page.
        planes: Of all sections, numbered from 0 on, placed at 0.
        spans: Fields as of `RowSpan`, of all sections, numbered from 0 on; rows are counted from
            each section's first page.
        runs: Of the spans, without their pages; None if they are not remembered.
        num_bytes: Of all sections.
        row_map: What a store without a null page leaves.
        missing: What it does not have.
    """

    kept: tuple[_KeptRows, ...]
    pages: tuple[tuple[int, int, int], ...]
    planes: Table
    spans: tuple[tuple[int, ...], ...]
    runs: Table | None
    num_bytes: int
    row_map: RowMap
    missing: tuple[MissingRows, ...]


class TransferPlanner:
    """Plans the transfers of one worker.

    Args:
        layout: The registered pages.
        states: What becomes of state groups.
    """

    def __init__(self, layout: KVLayout, states: StatePolicy = StatePolicy.EXACT) -> None:
        self.arrangement = HostArrangement(layout)
        self._layout = layout
        self._states = states
        self._pages = [(group.scheduler_group, group.rows_per_page) for group in layout.groups]
        self._chunks: dict[tuple[int, int, tuple[int, ...] | None], _ChunkSections] = {}
        self._runs: dict[tuple[tuple[int, ...], ...], Table] = {}
        self._num_remembered_runs = 0

    def chunk_bytes(self, tokens: TokenRange, groups: tuple[int, ...] | None = None) -> int:
        """Host bytes of a chunk, whichever of its pages are null.

        Args:
            tokens: Of the chunk.
            groups: See `PlacedChunk`.

        Raises:
            TokenRangeError: If the layout has not all of the groups.
        """
        return self._sections_of(tokens, groups).num_bytes

    def plan_store(self, chunks: Sequence[PlacedChunk], block_ids: BlockIds) -> StorePlan:
        """Store what chunks of one request keep.

        Args:
            chunks: What to store; their places in the host buffer do not overlap.
            block_ids: Of the request.

        Raises:
            TokenRangeError: If a list is too short, or has an id that no page has; or if the
                layout has not all of the groups.
        """
        self._check_lists(block_ids)
        sections_of_chunks = []
        offsets: list[int] = []
        pages: list[int] = []
        host_bytes = 0
        for tokens, offset_bytes, groups in chunks:
            check_alignment(offset_bytes)
            sections = self._sections_of(tokens, groups)
            sections_of_chunks.append(sections)
            offsets.append(offset_bytes)
            host_bytes = max(host_bytes, offset_bytes + sections.num_bytes)
            for scheduler_group, first_page, end_page in sections.pages:
                pages += _pages_of(block_ids, scheduler_group, first_page, end_page)
        ids = ids_of(pages)
        has_null = self._check_pages(ids)
        num_sections = [len(sections.kept) for sections in sections_of_chunks]
        planes = planes_of(
            [sections.planes for sections in sections_of_chunks], num_sections, offsets
        )
        runs = runs_with_pages(
            [self._runs_of(sections) for sections in sections_of_chunks], num_sections, ids
        )
        if not has_null:
            row_maps = tuple([sections.row_map for sections in sections_of_chunks])
            missing = tuple([sections.missing for sections in sections_of_chunks])
            return StorePlan(planes, runs, host_bytes, row_maps, missing)
        row_maps = tuple(self._row_map_of(sections, block_ids) for sections in sections_of_chunks)
        missing = tuple(
            self.find_missing([StoredChunk(row_map)], chunk.tokens, chunk.groups)
            for row_map, chunk in zip(row_maps, chunks, strict=True)
        )
        return StorePlan(planes, without_null_pages(runs), host_bytes, row_maps, missing)

    def plan_load(
        self,
        stored: Sequence[StoredChunk],
        tokens: TokenRange,
        block_ids: BlockIds,
        groups: Collection[int] | None = None,
    ) -> LoadPlan:
        """Load what resuming at the end of a range needs.

        Args:
            stored: Chunks, or parts of chunks, of this request's tokens. Where several have a row,
                any of them is taken.
            tokens: From the first token that is not in the request's pages, to where it resumes.
            block_ids: Of the request.
            groups: Indices in the layout of the groups to load; all of them if omitted.

        Raises:
            TokenRangeError: If a list is too short, or has an id that no page has; or if the
                layout has not all of the groups.
            RowMapError: If a map has a group that the layout has not.
        """
        self._check_lists(block_ids)
        needed = self._needed(tokens, groups)
        found = find_rows(self._layout.groups, stored, needed, tokens.end)
        spans: list[tuple[int, ...]] = []
        pages: list[int] = []
        tables: list[Table] = []
        offsets: list[int] = []
        host_bytes = 0
        section: tuple[int, ...] = ()
        # A section is named once, also where another chunk has rows between its rows.
        for rows in sorted(found, key=_SECTION):
            group, first_row, end_row, section_first_row, section_rows, offset_bytes = rows
            if section != (group, section_first_row, section_rows, offset_bytes):
                section = group, section_first_row, section_rows, offset_bytes
                table, num_bytes = self.arrangement.section(group, section_rows)
                tables.append(table)
                offsets.append(offset_bytes)
                host_bytes = max(host_bytes, offset_bytes + num_bytes)
            number = len(tables) - 1
            self._add_span(
                spans, pages, number, group, first_row, end_row, section_first_row, block_ids
            )
        ids = ids_of(pages)
        has_null = self._check_pages(ids)
        runs = runs_of(spans, ids)
        present = [rows[:3] for rows in found]
        if has_null:
            runs = without_null_pages(runs)
            present = [
                (group, first, end)
                for group, first_row, end_row in present
                for first, end in self._rows_with_pages(group, first_row, end_row, block_ids)
            ]
        missing = missing_rows(self._layout.groups, needed, present, tokens.end)
        planes = planes_of(tables, [1] * len(tables), offsets)
        return LoadPlan(planes, runs, host_bytes, missing)

    def find_missing(
        self,
        stored: Sequence[StoredChunk],
        tokens: TokenRange,
        groups: Collection[int] | None = None,
    ) -> tuple[MissingRows, ...]:
        """What resuming at the end of a range needs and no map has; arguments as of ``plan_load``.

        Nothing is moved: a scheduler finds by this the longest range that it can load.
        """
        needed = self._needed(tokens, groups)
        found = find_rows(self._layout.groups, stored, needed, tokens.end)
        present = [rows[:3] for rows in found]
        return missing_rows(self._layout.groups, needed, present, tokens.end)

    def _needed(self, tokens: TokenRange, groups: Collection[int] | None) -> list[range]:
        self._check_groups(groups)
        return [
            needed_rows(group, tokens, self._states)
            if groups is None or index in groups
            else range(0)
            for index, group in enumerate(self._layout.groups)
        ]

    def _sections_of(self, tokens: TokenRange, groups: tuple[int, ...] | None) -> _ChunkSections:
        key = tokens.first, tokens.end, groups
        found = self._chunks.get(key)
        if found is None:
            self._check_groups(groups)
            kept = []
            offset_bytes = 0
            for index, group in enumerate(self._layout.groups):
                rows = kept_rows(group, tokens, self._states)
                if rows and (groups is None or index in groups):
                    kept.append(_KeptRows(index, rows.start, rows.stop, offset_bytes))
                    offset_bytes += self.arrangement.section(index, len(rows)).num_bytes
            row_map = RowMap.of(
                StoredRows(
                    rows.group,
                    rows.first_row,
                    rows.end_row,
                    rows.first_row,
                    rows.end_row - rows.first_row,
                    rows.host_offset_bytes,
                )
                for rows in kept
            )
            sizes = tuple((rows.group, rows.end_row - rows.first_row) for rows in kept)
            planes = self.arrangement.sections(sizes)
            missing = self.find_missing([StoredChunk(row_map)], tokens, groups)
            pages: list[tuple[int, int, int]] = []
            spans: list[tuple[int, ...]] = []
            for number, section in enumerate(kept):
                scheduler_group, rows_per_page, first_page, end_page = self._page_range(
                    section.group, section.first_row, section.end_row
                )
                pages.append((scheduler_group, first_page, end_page))
                # Counted from the section's first page: the same for every chunk that is cut alike.
                first_row = section.first_row - first_page * rows_per_page
                end_row = section.end_row - first_page * rows_per_page
                num_pages = end_page - first_page
                spans.append((number, first_row, end_row, first_row, rows_per_page, num_pages))
            found = _ChunkSections(
                tuple(kept),
                tuple(pages),
                planes,
                tuple(spans),
                self._remembered_runs(tuple(spans)),
                offset_bytes,
                row_map,
                missing,
            )
            if len(self._chunks) == _MAX_REMEMBERED:
                del self._chunks[next(iter(self._chunks))]  # the oldest
            self._chunks[key] = found
        return found

    def _runs_of(self, sections: _ChunkSections) -> Table:
        """Runs without their pages. Shared: copy before you write."""
        if sections.runs is not None:
            return sections.runs
        return runs_of(sections.spans, [NULL_PAGE] * sum(span[-1] for span in sections.spans))

    def _remembered_runs(self, spans: tuple[tuple[int, ...], ...]) -> Table | None:
        """Runs of the spans without their pages; None where too many are remembered already."""
        runs = self._runs.get(spans)
        if runs is None:
            num_pages = sum(span[-1] for span in spans)
            if self._num_remembered_runs + num_pages > _MAX_REMEMBERED_RUNS:
                return None
            self._num_remembered_runs += num_pages
            runs = runs_of(spans, [NULL_PAGE] * num_pages)
            runs.flags.writeable = False
            self._runs[spans] = runs
        return runs

    def _row_map_of(self, sections: _ChunkSections, block_ids: BlockIds) -> RowMap:
        """What a store of the chunk leaves, null pages left out."""
        return RowMap.of(
            StoredRows(group, first, end, first_row, end_row - first_row, offset_bytes)
            for group, first_row, end_row, offset_bytes in sections.kept
            for first, end in self._rows_with_pages(group, first_row, end_row, block_ids)
        )

    def _page_range(self, group: int, first_row: int, end_row: int) -> tuple[int, int, int, int]:
        """Scheduler group, rows per page, first page and end page of some rows."""
        scheduler_group, rows_per_page = self._pages[group]
        return (
            scheduler_group,
            rows_per_page,
            first_row // rows_per_page,
            -(-end_row // rows_per_page),
        )

    def _rows_with_pages(
        self, group: int, first_row: int, end_row: int, block_ids: BlockIds
    ) -> list[tuple[int, int]]:
        scheduler_group, rows_per_page, first_page, end_page = self._page_range(
            group, first_row, end_row
        )
        pages = block_ids[scheduler_group][first_page:end_page]
        return list(rows_with_pages(first_row, end_row, rows_per_page, pages))

    def _add_span(
        self,
        spans: list[tuple[int, ...]],
        pages: list[int],
        section: int,
        group: int,
        first_row: int,
        end_row: int,
        section_first_row: int,
        block_ids: BlockIds,
    ) -> None:
        """Add a ``RowSpan`` as a plain tuple, and its pages.

        Raises:
            TokenRangeError: If the request has fewer pages.
        """
        scheduler_group, rows_per_page, first_page, end_page = self._page_range(
            group, first_row, end_row
        )
        pages += _pages_of(block_ids, scheduler_group, first_page, end_page)
        num_pages = end_page - first_page
        spans.append((section, first_row, end_row, section_first_row, rows_per_page, num_pages))

    def _check_pages(self, pages: Sequence[int] | Table) -> bool:
        """Whether one of them is the null page.

        Raises:
            TokenRangeError: If there is no page with one of these ids.
        """
        if not len(pages):
            return False
        if isinstance(pages, np.ndarray):
            least, most = pages.min(), pages.max()
        else:
            least, most = min(pages), max(pages)
        num_pages = self._layout.num_pages
        if least < 0 or most >= num_pages:
            wrong = next(page for page in pages if not 0 <= page < num_pages)
            raise TokenRangeError(
                f"block ids: found id {wrong}, expected 0 to {num_pages - 1}; pass the ids of this "
                "worker's config"
            )
        return bool(least == NULL_PAGE)

    def _check_groups(self, groups: Collection[int] | None) -> None:
        num_groups = len(self._layout.groups)
        if groups is not None and not all(0 <= index < num_groups for index in groups):
            raise TokenRangeError(
                f"groups: expected indices in the layout, 0 to {num_groups - 1}, found "
                f"{sorted(groups)}; these are not the KV cache groups of the config"
            )

    def _check_lists(self, block_ids: BlockIds) -> None:
        expected = self._layout.num_scheduler_groups
        if len(block_ids) != expected:
            raise TokenRangeError(
                f"block ids: expected {expected} lists, one per KV cache group, found "
                f"{len(block_ids)}; pass those of the whole request"
            )


def _pages_of(
    block_ids: BlockIds, scheduler_group: int, first_page: int, end_page: int
) -> Sequence[int]:
    """Block ids of a request's pages.

    Raises:
        TokenRangeError: If the request has fewer pages.
    """
    ids = block_ids[scheduler_group]
    found = ids[first_page:end_page]
    if len(found) < end_page - first_page:
        raise TokenRangeError(
            f"block ids of KV cache group {scheduler_group}: expected {end_page}, found "
            f"{len(ids)}; pass the ids from the request's first token on, null blocks included"
        )
    return found
