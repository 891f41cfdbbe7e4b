# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One row of the table: a trace on a layout, on the device alone and with a host tier behind it."""

from __future__ import annotations

import gc
from collections.abc import Sequence

from retention.cells import run_cell
from retention.layouts import BenchLayout, get_layout
from retention.serving import DoesNotFitError
from retention.suite import INFINITE, Cell
from retention.traces import Trace, write_trace
from retention.variants import installed
from support.connector.held import held_by

from host_tier.engine import Engine, host_memory
from host_tier.pages import pages_of
from host_tier.results import CEILING_UNIT_TOKENS, HostUse, Result, Row, Variant
from host_tier.serving import Serving
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.replay.serving import Outcome
from vllm_ascend_kvext.store.entries import Kind

HOST_BYTES = 1 << 40
"""The size of host memory, more than a trace stores. It is only counted, and not allocated."""


def run_row(
    layout_name: str,
    trace_name: str,
    scale: float,
    pools: Sequence[float],
    host_bytes: int = HOST_BYTES,
) -> Row:
    """Serve a trace in every variant, in the smallest pool that is large enough for all of them."""
    layout = get_layout(layout_name)
    trace = write_trace(trace_name, scale * layout.thinning, layout.stretch)
    # The number of blocks that the trace takes in a pool without evictions, with dense caching.
    endless = run_cell(Cell(layout_name, trace_name, INFINITE, "dense", scale), None)
    num_footprint_blocks = int(endless["num_footprint_blocks"])  # type: ignore[call-overload]
    row = Row(layout_name, trace_name, scale, len(trace.requests))
    for pool in pools:
        row.pool, row.num_blocks = pool, round(pool * num_footprint_blocks)
        row.results.clear()
        try:
            for variant in Variant:
                row.results[variant] = _serve(layout, trace, variant, row.num_blocks)
        except DoesNotFitError:
            continue
        return row
    return row


def _serve(layout: BenchLayout, trace: Trace, variant: Variant, num_blocks: int) -> Result:
    host = None
    if variant.has_host:
        host = host_memory(pages_of(layout.name, num_blocks), HOST_BYTES, "second_touch")
    gc.collect()
    with installed(variant.policy):
        engine = Engine(layout, num_blocks, host)
        outcome = Serving(engine, trace, layout.hash_block_tokens, CEILING_UNIT_TOKENS).run()
    side = engine.side
    return Result(
        hit_rate=outcome.hit_rate,
        ceiling=outcome.shared_tokens / outcome.prompt_tokens,
        scheduler_ms_per_request=1e3 * outcome.scheduler_s / outcome.num_requests,
        num_preemptions=outcome.num_preemptions,
        host=_host_use(side, trace, outcome) if side is not None else None,
    )


def _host_use(side: ConnectorScheduler, trace: Trace, outcome: Outcome) -> HostUse:
    tier = side.counters.tier
    answered_tokens = sum(len(request.answered) for request in trace.requests)
    return HostUse(
        row_bytes=tier.stored_bytes[Kind.ROWS],
        tail_bytes=tier.stored_bytes[Kind.TAILS],
        num_tails=tier.stored_entries[Kind.TAILS],
        bytes_held=tier.bytes_held,
        computed_tokens=answered_tokens - outcome.shared_tokens,
        shortfalls={reason.value: count for reason, count in tier.shortfalls.items() if count},
        refusals={reason.value: count for reason, count in tier.refused_stores.items() if count},
        num_leaks=side.references.num_references + len(held_by(side).pinned_ids),
    )
