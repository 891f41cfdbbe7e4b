# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans the load jobs of requests that reuse segments. This module knows no tier."""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_kvext.connector.common.host_layout import HostLayout
from vllm_ascend_kvext.connector.common.messages import HoleTails, LoadJob
from vllm_ascend_kvext.connector.scheduler.load_jobs import LoadJobs, chunks_of
from vllm_ascend_kvext.holes.hole_blocks import WindowTables
from vllm_ascend_kvext.holes.load_plan import Span
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.segments.scheduler.blended_plan import BlendedPlan
from vllm_ascend_kvext.segments.scheduler.segment_store import rows_to_load
from vllm_ascend_kvext.token_range import TokenRange


class BlendedLoads:
    """Plans the loads of one engine with ``num_groups`` KV cache groups."""

    def __init__(self, layout: HostLayout, num_groups: int) -> None:
        self._layout = layout
        self._exact = LoadJobs(layout, num_groups)

    def plan(
        self,
        request_id: str,
        plan: BlendedPlan,
        block_ids: tuple[list[int], ...],
        dense: WindowTables,
    ) -> LoadJob:
        """Plan the load of a request: exact rows, and behind them rows of segments.

        Args:
            block_ids: The block ids from the request's first token on, by KV cache group.
            dense: The window tables, by KV cache group with windows. If one is missing, the load
                fails.
        """
        whole = TokenRange(plan.after_tokens, plan.boundary_tokens)
        tokens = whole
        holes: tuple[TokenRange, ...] = (whole,)
        stored: tuple[StoredChunk, ...] = ()
        exact_tails = plan.tails.get(plan.exact_tokens)
        if plan.exact_tokens > plan.after_tokens:
            tokens = TokenRange(plan.after_tokens, plan.exact_tokens)
            holes = ()
            stored = self._exact.stored(plan, exact_tails)
        parts = list(self._exact.table_parts(whole, block_ids))
        for group, table in dense.items():
            parts[group] = TablePart(table.first_page, table.block_ids)
        tails: tuple[HoleTails, ...] = ()
        if exact_tails is not None:
            # The device may lack a part of the tails, so they are loaded here, too.
            groups = self._layout.tail_groups
            tails = (HoleTails(plan.exact_tokens, chunks_of(exact_tails), tuple(parts), groups),)
        return LoadJob(
            request_id,
            tokens,
            stored,
            tuple(parts),
            holes,
            tails,
            extras=tuple(map(rows_to_load, _joined(plan.segment_spans))),
        )


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Join ascending spans whose rows follow each other in one entry."""
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
