# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans what workers are told of a load: which stored rows go to which pages.

The module knows no tier.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import HoleTails, LoadJob
from vllm_ascend_kvext.holes.hole_blocks import WindowTables
from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.token_range import TokenRange


class LoadJobs:
    """Plans the loads of one engine, which has ``num_groups`` KV cache groups."""

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
        """The load of one request. All that is loaded is exact.

        Args:
            block_ids: The request's blocks by KV cache group, from its first token on.
            hole_tables: The blocks of holes, by hole, and by KV cache group with windows. If no
                tables are given, a load that needs such blocks fails.
            may_lack: See `LoadJob`.
        """
        tokens = TokenRange(plan.after_tokens, plan.boundary_tokens)
        return LoadJob(
            request_id,
            tokens,
            self.stored(plan, plan.tails.get(plan.boundary_tokens)),
            self.table_parts(tokens, block_ids),
            tuple(plan.holes),
            tuple(self._hole_tails(plan, hole_tables)),
            may_lack,
        )

    def stored(self, plan: LoadPlan, tails: Entry | None) -> tuple[StoredChunk, ...]:
        """The stored chunks of the prompt's own prefix that the load reads.

        Rows of holes are left out, because a step is computing them, and another row may read them.
        """
        stored = []
        for first_tokens, end_tokens, entry, *_ in plan.exact_spans:
            assert entry is not None
            row_map = entry.row_map
            if (first_tokens, end_tokens) != entry.piece[1:]:
                row_map = self._layout.rows_within(row_map, first_tokens, end_tokens)
            stored.append(StoredChunk(row_map, entry.offset_bytes))
        if tails is not None:
            stored += chunks_of(tails)
        return tuple(stored)

    def table_parts(
        self, tokens: TokenRange, block_ids: tuple[list[int], ...]
    ) -> tuple[TablePart, ...]:
        """The part of a request's block table from a token on, by KV cache group."""
        parts = []
        for group, ids in enumerate(block_ids):
            tokens_per_page = self._layout.tokens_per_page.get(group)
            first_page = tokens.first_tokens // tokens_per_page if tokens_per_page else len(ids)
            parts.append(TablePart(first_page, tuple(ids[first_page:])))
        return tuple(parts)

    def _hole_tails(self, plan: LoadPlan, tables: Sequence[WindowTables]) -> Iterator[HoleTails]:
        """The tails that the holes of a request need besides rows."""
        for number, hole in enumerate(plan.holes):
            tails = plan.tails.get(hole.first_tokens)
            if tails is None:
                continue
            parts = [TablePart(0, ())] * self._num_groups
            for group, table in tables[number].items() if tables else ():
                parts[group] = TablePart(table.first_page, table.block_ids)
            groups = self._layout.tail_groups
            yield HoleTails(hole.first_tokens, chunks_of(tails), tuple(parts), groups)


def chunks_of(tails: Entry) -> tuple[StoredChunk, ...]:
    """Tails, and those that they continue, as workers read them."""
    return tuple(StoredChunk(each.row_map, each.offset_bytes) for each in tails.chain)
