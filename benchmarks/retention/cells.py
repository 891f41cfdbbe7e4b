# SPDX-License-Identifier: Apache-2.0
"""One cell of the table: a variant serves a trace on a layout with a pool."""

from __future__ import annotations

import functools
import gc
import math
import time
import traceback
from dataclasses import asdict

from retention.engine import Engine
from retention.layouts import BenchLayout, get_layout
from retention.serving import DoesNotFitError, Serving
from retention.suite import INFINITE, Batch, Cell, Finished
from retention.traces import Trace, write_trace
from retention.variants import Variant, entered

layout_named = functools.cache(get_layout)
_trace = functools.lru_cache(maxsize=2)(write_trace)


def run_batch(batch: Batch) -> list[Finished]:
    """Run one batch's cells one after the other, in this process."""
    base = _finished(batch.base, None)
    footprint_blocks = base.result.get("num_footprint_blocks")
    if footprint_blocks is None:
        return [base]
    found: dict[Cell, Finished] = {}
    for repeat in range(batch.num_repeats):
        # The machine gets faster and slower meanwhile: the variants take turns at coming first.
        for cell in reversed(batch.others) if repeat % 2 else batch.others:
            is_infinite = cell.pool == INFINITE
            num_blocks = None if is_infinite else round(float(cell.pool) * footprint_blocks)
            finished = _finished(cell, num_blocks)
            known = found.setdefault(cell, finished)
            if "scheduler_s" in known.result:
                times_s = [each.result.get("scheduler_s", math.inf) for each in (known, finished)]
                known.result["scheduler_s"] = min(times_s)
    return [base, *(found[cell] for cell in batch.others)]


def _finished(cell: Cell, num_blocks: int | None) -> Finished:
    try:
        return Finished(cell, run_cell(cell, num_blocks))
    except Exception:
        return Finished(cell, {"error": traceback.format_exc()})


def run_cell(cell: Cell, num_blocks: int | None) -> dict[str, object]:
    """Run it in this process.

    Args:
        num_blocks: Size of the pool; None for one in which nothing has to be evicted.

    Returns:
        The outcome's fields, ``hit_rate``, ``num_blocks`` and ``cell_s``; or ``does_not_fit`` if
        the pool is too small; or ``refused`` with the reason why the variant cannot be had.

    Raises:
        ValueError: There is no such variant, trace or layout.
    """
    layout = layout_named(cell.layout)
    variant = Variant.parse(cell.variant)
    trace = _trace(cell.trace, cell.scale * layout.thinning, layout.stretch, cell.seed)
    if num_blocks is None:
        num_blocks = _blocks_without_evictions(layout, trace)
    gc.collect()
    gc.disable()
    started_s = time.thread_time()
    try:
        with entered(variant):
            try:
                engine = Engine(layout, num_blocks)
            except ValueError as error:
                return {"refused": str(error), "num_blocks": num_blocks}
            outcome = Serving(layout, engine, trace).run()
    except DoesNotFitError:
        return {"does_not_fit": True, "num_blocks": num_blocks}
    finally:
        gc.enable()
    return asdict(outcome) | {
        "hit_rate": outcome.hit_rate,
        "num_blocks": num_blocks,
        "cell_s": time.thread_time() - started_s,
    }


def _blocks_without_evictions(layout: BenchLayout, trace: Trace) -> int:
    """Room for every token of every request, and for what the running ones hold meanwhile."""
    num_tokens = sum(len(request.answered) for request in trace.requests)
    return 1 + layout.blocks_without_hits(num_tokens + 32 * layout.max_num_batched_tokens)
