# SPDX-License-Identifier: Apache-2.0
"""What workers are told of a load: which stored rows go to which pages. Knows no tier."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from vllm_ascend_kvext.blending.segment_store import rows_to_load
from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import HoleTails, LoadJob
from vllm_ascend_kvext.holes.hole_blocks import WindowTables
from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.token_range import TokenRange


class LoadJobs:
    """Plans the loads of one engine, which has so many KV cache groups."""

    def __init__(self, layout: HostLayout, num_groups: int) -> None:
        self._layout = layout
        self._num_groups = num_groups

    def plan(
        self,
        request_id: str,
        plan: LoadPlan,
        block_ids: tuple[list[int], ...],
        hole_tables: Sequence[WindowTables],
        may_lack: bool,
    ) -> LoadJob:
        """The job of one request; all that is loaded is exact.

        Args:
            block_ids: By KV cache group, from the request's first token on.
            hole_tables: By hole, and by KV cache group with windows. With none, a load that needs
                some fails.
            may_lack: See `LoadJob`.
        """
        tokens = TokenRange(plan.after_tokens, plan.boundary_tokens)
        return LoadJob(
            request_id,
            tokens,
            self._stored(plan, plan.tails.get(plan.boundary_tokens)),
            self._parts(tokens, block_ids),
            tuple(plan.holes),
            tuple(self._hole_tails(plan, hole_tables)),
            may_lack,
        )

    def plan_blended(
        self,
        request_id: str,
        plan: LoadPlan,
        block_ids: tuple[list[int], ...],
        dense: WindowTables,
    ) -> LoadJob:
        """The job of a request of which rows of segments are loaded behind what is exact.

        Args:
            dense: By KV cache group with windows. Where one is missing, the load fails.
        """
        whole = TokenRange(plan.after_tokens, plan.boundary_tokens)
        tokens = whole
        holes: tuple[TokenRange, ...] = (whole,)
        stored: tuple[StoredChunk, ...] = ()
        exact_tails = plan.tails.get(plan.exact_tokens)
        if plan.exact_tokens > plan.after_tokens:
            tokens, holes = TokenRange(plan.after_tokens, plan.exact_tokens), ()
            stored = self._stored(plan, exact_tails)
        parts = list(self._parts(whole, block_ids))
        for group, table in dense.items():
            parts[group] = TablePart(table.first_page, table.block_ids)
        tails: tuple[HoleTails, ...] = ()
        if exact_tails is not None:
            # Once more, for the part of them that the device has not.
            groups = self._layout.tail_groups
            tails = (HoleTails(plan.exact_tokens, _chunk_of(exact_tails), tuple(parts), groups),)
        return LoadJob(
            request_id,
            tokens,
            stored,
            tuple(parts),
            holes,
            tails,
            segments=tuple(map(rows_to_load, _joined(plan.segment_spans))),
        )

    def _stored(self, plan: LoadPlan, tails: Entry | None) -> tuple[StoredChunk, ...]:
        """What is read. Rows of holes are left out: they are being computed, and perhaps read."""
        stored = []
        for first_tokens, end_tokens, entry, *_ in plan.exact_spans:
            assert entry is not None
            row_map = entry.row_map
            if (first_tokens, end_tokens) != entry.piece[1:]:
                row_map = self._layout.rows_within(row_map, first_tokens, end_tokens)
            stored.append(StoredChunk(row_map, entry.offset_bytes))
        if tails is not None:
            stored.append(_chunk_of(tails))
        return tuple(stored)

    def _parts(self, tokens: TokenRange, block_ids: tuple[list[int], ...]) -> tuple[TablePart, ...]:
        parts = []
        for group, ids in enumerate(block_ids):
            tokens_per_page = self._layout.tokens_per_page.get(group)
            first_page = tokens.first_tokens // tokens_per_page if tokens_per_page else len(ids)
            parts.append(TablePart(first_page, tuple(ids[first_page:])))
        return tuple(parts)

    def _hole_tails(self, plan: LoadPlan, tables: Sequence[WindowTables]) -> Iterator[HoleTails]:
        """What the holes of a request need besides rows."""
        for number, hole in enumerate(plan.holes):
            tails = plan.tails.get(hole.first_tokens)
            if tails is None:
                continue
            parts = [TablePart(0, ())] * self._num_groups
            for group, table in tables[number].items() if tables else ():
                parts[group] = TablePart(table.first_page, table.block_ids)
            groups = self._layout.tail_groups
            yield HoleTails(hole.first_tokens, _chunk_of(tails), tuple(parts), groups)


def _chunk_of(entry: Entry) -> StoredChunk:
    return StoredChunk(entry.row_map, entry.offset_bytes)


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Ascending spans, with rows of one entry that follow each other as one."""
    joined: list[Span] = []
    for span in spans:
        before = joined[-1] if joined else None
        if (
            before is not None
            and before.entry is span.entry
            and before.end_tokens == span.first_tokens
            and before.first_tokens - before.entry_tokens == span.first_tokens - span.entry_tokens
        ):
            joined[-1] = before._replace(end_tokens=span.end_tokens)
        else:
            joined.append(span)
    return joined
