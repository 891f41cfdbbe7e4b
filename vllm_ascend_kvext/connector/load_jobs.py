# SPDX-License-Identifier: Apache-2.0
"""What workers are told of a load: which stored rows go to which pages. Knows no tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from vllm_ascend_kvext.blending.segment_store import rows_to_load
from vllm_ascend_kvext.connector.host_layout import HostLayout
from vllm_ascend_kvext.connector.messages import HoleTails, LoadJob
from vllm_ascend_kvext.holes.window_blocks import DenseTable, WindowTable
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Hit, PlacedRows


class LoadJobs:
    """Plans the loads of one engine.

    Args:
        layout: Of the pages.
        num_groups: KV cache groups of the engine.
    """

    def __init__(self, layout: HostLayout, num_groups: int) -> None:
        self._layout = layout
        self._num_groups = num_groups

    def plan(
        self,
        request_id: str,
        hit: Hit,
        block_ids: tuple[list[int], ...],
        hole_tables: Sequence[Mapping[int, WindowTable]],
        may_lack: bool,
    ) -> LoadJob:
        """The job of one request.

        Args:
            request_id: Whose pages are filled.
            hit: What is loaded.
            block_ids: By KV cache group, from the request's first token on.
            hole_tables: By hole, and by KV cache group with windows. With none, a load that needs
                some fails.
            may_lack: See `LoadJob`.
        """
        tokens = TokenRange(hit.after_tokens, hit.boundary_tokens)
        return LoadJob(
            request_id,
            tokens,
            self._stored(hit),
            self._parts(tokens, block_ids),
            tuple(TokenRange(first, end) for first, end in hit.holes),
            tuple(self._hole_tails(hit, hole_tables)),
            may_lack,
        )

    def plan_blended(
        self,
        request_id: str,
        hit: Hit,
        block_ids: tuple[list[int], ...],
        dense: Mapping[int, DenseTable],
    ) -> LoadJob:
        """The job of a request of which rows are placed behind what is exact.

        Args:
            dense: By KV cache group with windows. Where one is missing, the load fails.
        """
        whole = TokenRange(hit.after_tokens, hit.boundary_tokens)
        tokens = whole
        holes: tuple[TokenRange, ...] = (whole,)
        stored: tuple[StoredChunk, ...] = ()
        if hit.exact_tokens > hit.after_tokens:
            tokens, holes = TokenRange(hit.after_tokens, hit.exact_tokens), ()
            # The tails once more, for the part of them that the device has not.
            entries = (*hit.entries, *([hit.exact_tails] if hit.exact_tails is not None else ()))
            exact = replace(hit, boundary_tokens=hit.exact_tokens, entries=entries, holes=())
            stored = self._stored(exact)
        parts = list(self._parts(whole, block_ids))
        for group, table in dense.items():
            parts[group] = TablePart(table.first_page, table.block_ids)
        tails: tuple[HoleTails, ...] = ()
        if hit.exact_tails is not None:
            chunk = StoredChunk(hit.exact_tails.row_map, hit.exact_tails.offset_bytes)
            groups = self._layout.tail_groups
            tails = (HoleTails(hit.exact_tokens, chunk, tuple(parts), groups),)
        return LoadJob(
            request_id,
            tokens,
            stored,
            tuple(parts),
            holes,
            tails,
            segments=tuple(map(rows_to_load, _joined((*hit.placed, *hit.heads)))),
        )

    def _stored(self, hit: Hit) -> tuple[StoredChunk, ...]:
        """What is read. Rows of holes are left out: they are being computed, and perhaps read."""
        stored = []
        for entry, *run in hit.loaded_rows:
            row_map = entry.row_map
            if tuple(run) != entry.piece[1:]:
                row_map = self._layout.rows_within(row_map, *run)
            stored.append(StoredChunk(row_map, entry.offset_bytes))
        stored += [
            StoredChunk(entry.row_map, entry.offset_bytes)
            for entry in hit.entries
            if entry.piece.kind is Kind.TAILS
        ]
        return tuple(stored)

    def _parts(self, tokens: TokenRange, block_ids: tuple[list[int], ...]) -> tuple[TablePart, ...]:
        parts = []
        for group, ids in enumerate(block_ids):
            tokens_per_page = self._layout.tokens_per_page.get(group)
            first_page = tokens.first // tokens_per_page if tokens_per_page else len(ids)
            parts.append(TablePart(first_page, tuple(ids[first_page:])))
        return tuple(parts)

    def _hole_tails(
        self, hit: Hit, tables: Sequence[Mapping[int, WindowTable]]
    ) -> Iterator[HoleTails]:
        """What the holes of a request need besides rows."""
        for number, tails in enumerate(hit.hole_tails):
            if tails is None:
                continue
            parts = [TablePart(0, ())] * self._num_groups
            for group, table in tables[number].items() if tables else ():
                parts[group] = TablePart(table.first_page, table.block_ids)
            stored = StoredChunk(tails.row_map, tails.offset_bytes)
            yield HoleTails(tails.piece.end_tokens, stored, tuple(parts), self._layout.tail_groups)


def _joined(placed: Iterable[PlacedRows]) -> list[PlacedRows]:
    """In ascending order, with rows of one entry that follow each other as one."""
    joined: list[PlacedRows] = []
    for rows in sorted(placed, key=lambda rows: rows.first_tokens):
        before = joined[-1] if joined else None
        shift_tokens = rows.first_tokens - rows.entry_tokens
        if (
            before is not None
            and before.entry is rows.entry
            and before.end_tokens == rows.first_tokens
            and before.first_tokens - before.entry_tokens == shift_tokens
        ):
            joined[-1] = before._replace(end_tokens=rows.end_tokens)
        else:
            joined.append(rows)
    return joined
