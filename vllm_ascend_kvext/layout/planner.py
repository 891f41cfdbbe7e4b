# SPDX-License-Identifier: Apache-2.0
"""Plans the transfers between the pages of a request and host memory.

A store decides from tokens and block ids which rows are kept, and reports them as row maps. A load
is planned against those maps, whatever part of them it wants: rows that are in no map are missing
and are not moved. Cost grows with sections, planes and pages, never with tokens: everything that a
layout alone decides is computed once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import groupby

from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.host_arrangement import HostArrangement, chunk_bytes
from vllm_ascend_kvext.layout.model import KVLayout, StatePolicy
from vllm_ascend_kvext.layout.page_runs import (
    PlacedSection,
    RowSpan,
    planes_of,
    runs_of,
    split_at_nulls,
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
        self._rows_per_page = [group.rows_per_page for group in layout.groups]

    def chunk_bytes(self, tokens: TokenRange) -> int:
        """Host bytes of a chunk, whichever of its pages are null."""
        return chunk_bytes(self.arrangement, self._layout, tokens, self._states)

    def plan_store(self, chunks: Sequence[PlacedChunk], block_ids: BlockIds) -> StorePlan:
        """Store what chunks of one request keep.

        Args:
            chunks: What to store; their places in the host buffer do not overlap.
            block_ids: Of the request.

        Raises:
            TokenRangeError: If a list is too short, or has an id that no page has.
        """
        self._check_lists(block_ids)
        sections: list[PlacedSection] = []
        row_maps = []
        missing = []
        host_bytes = 0
        for chunk in chunks:
            check_alignment(chunk.host_offset_bytes)
            rows_of_chunk = []
            for section, rows in self._sections_to_store(chunk, block_ids):
                sections.append(section)
                rows_of_chunk += rows
                end_bytes = section.host_offset_bytes + section.arranged.num_bytes
                host_bytes = max(host_bytes, end_bytes)
            row_map = RowMap.of(rows_of_chunk)
            row_maps.append(row_map)
            missing.append(self.find_missing([StoredChunk(row_map)], chunk.tokens))
        return StorePlan(
            planes_of(sections), runs_of(sections), host_bytes, tuple(row_maps), tuple(missing)
        )

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
            TokenRangeError: If a list is too short, or has an id that no page has.
            RowMapError: If a map has a group that the layout has not.
        """
        self._check_lists(block_ids)
        needed = self._needed(tokens, groups)
        sections: list[PlacedSection] = []
        present: list[tuple[int, int, int]] = []
        host_bytes = 0
        found = find_rows(self._layout.groups, stored, needed, tokens.end)
        for section, rows_of_section in groupby(found, _section_of):
            group, section_first_row, section_rows, offset_bytes = section
            spans: list[RowSpan] = []
            for rows in rows_of_section:
                spans += self._spans(group, rows.first_row, rows.end_row, block_ids)
            if not spans:
                continue
            present += [(group, span.first_row, span.end_row) for span in spans]
            arranged = self.arrangement.section(group, section_rows)
            rows_per_page = self._rows_per_page[group]
            sections.append(
                PlacedSection(arranged, section_first_row, offset_bytes, rows_per_page, spans)
            )
            host_bytes = max(host_bytes, offset_bytes + arranged.num_bytes)
        missing = missing_rows(self._layout.groups, needed, present, tokens.end)
        return LoadPlan(planes_of(sections), runs_of(sections), host_bytes, missing)

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
        present = [(rows.group, rows.first_row, rows.end_row) for rows in found]
        return missing_rows(self._layout.groups, needed, present, tokens.end)

    def _needed(self, tokens: TokenRange, groups: Collection[int] | None) -> list[range]:
        return [
            needed_rows(group, tokens, self._states)
            if groups is None or index in groups
            else range(0)
            for index, group in enumerate(self._layout.groups)
        ]

    def _sections_to_store(
        self, chunk: PlacedChunk, block_ids: BlockIds
    ) -> Iterator[tuple[PlacedSection, list[StoredRows]]]:
        """The sections of a chunk that have rows to move, and those rows."""
        offset_bytes = 0
        for index, group in enumerate(self._layout.groups):
            kept = kept_rows(group, chunk.tokens, self._states)
            if not kept:
                continue
            arranged = self.arrangement.section(index, len(kept))
            spans = self._spans(index, kept.start, kept.stop, block_ids)
            if spans:
                rows = [
                    StoredRows(
                        index,
                        span.first_row,
                        span.end_row,
                        kept.start,
                        len(kept),
                        offset_bytes,
                    )
                    for span in spans
                ]
                place_bytes = chunk.host_offset_bytes + offset_bytes
                rows_per_page = self._rows_per_page[index]
                yield PlacedSection(arranged, kept.start, place_bytes, rows_per_page, spans), rows
            offset_bytes += arranged.num_bytes

    def _spans(
        self, group: int, first_row: int, end_row: int, block_ids: BlockIds
    ) -> list[RowSpan]:
        """The rows of a range that have a page.

        Raises:
            TokenRangeError: If the request has fewer pages, or one that does not exist.
        """
        rows_per_page = self._rows_per_page[group]
        scheduler_group = self._layout.groups[group].scheduler_group
        first_page, end_page = first_row // rows_per_page, -(-end_row // rows_per_page)
        ids = block_ids[scheduler_group]
        pages = ids[first_page:end_page]
        if len(pages) < end_page - first_page:
            raise TokenRangeError(
                f"block ids of KV cache group {scheduler_group}: expected {end_page}, found "
                f"{len(ids)}; pass the ids from the request's first token on, null blocks included"
            )
        num_pages = self._layout.num_pages
        if min(pages) < 0 or max(pages) >= num_pages:
            wrong = next(page for page in pages if not 0 <= page < num_pages)
            raise TokenRangeError(
                f"block ids of KV cache group {scheduler_group}: found id {wrong}, expected 0 to "
                f"{num_pages - 1}; pass the ids of this worker's config"
            )
        return list(split_at_nulls(first_row, end_row, rows_per_page, pages))

    def _check_lists(self, block_ids: BlockIds) -> None:
        expected = self._layout.num_scheduler_groups
        if len(block_ids) != expected:
            raise TokenRangeError(
                f"block ids: expected {expected} lists, one per KV cache group, found "
                f"{len(block_ids)}; pass those of the whole request"
            )


def _section_of(rows: StoredRows) -> tuple[int, int, int, int]:
    return rows.group, *rows[3:]
