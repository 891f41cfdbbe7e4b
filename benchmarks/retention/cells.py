# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""One cell of the table: a variant serves a trace on a layout with a pool."""

from __future__ import annotations

import functools
import gc
import math
import time
import traceback
from dataclasses import asdict, replace

from retention.engine import Engine
from retention.layouts import BenchLayout, get_layout
from retention.production import RECORDINGS, read_trace
from retention.serving import DoesNotFitError, Serving
from retention.suite import INFINITE, Batch, Cell, Finished
from retention.traces import Trace, write_trace
from retention.variants import Variant, entered

layout_named = functools.cache(get_layout)


@functools.lru_cache(maxsize=2)
def _trace(name: str, scale: float, thinning: float, stretch: float, seed: int) -> Trace:
    """A trace by its name. A seed is another part of a recorded trace, of the same length."""
    if name in RECORDINGS:
        return read_trace(name, scale, seed)
    return write_trace(name, scale * thinning, stretch, seed)


def run_batch(batch: Batch) -> list[Finished]:
    """Run one batch's cells one after the other, in this process."""
    base = _finished(batch.base, None)
    widest = base
    if layout_named(batch.base.layout).match_unit_tokens:
        # Prompts that are shorter than a block leave no whole blocks.
        widest = _finished(replace(batch.base, variant="stock"), None)
    footprint_blocks = widest.result.get("num_footprint_blocks")
    if footprint_blocks is None:
        return [widest]
    found: dict[Cell, Finished] = {}
    for repeat in range(batch.num_repeats):
        # The speed of the machine changes, so the order of the variants alternates.
        cells = reversed(batch.others) if repeat % 2 else batch.others
        for cell in cells:
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
    """Run a cell in this process.

    Args:
        cell: The cell.
        num_blocks: The size of the pool; None for a pool in which nothing is evicted.

    Returns:
        The fields of the outcome, ``hit_rate``, ``num_blocks`` and ``cell_s``. If the pool is too
        small, ``does_not_fit``. If the variant is not available, ``refused`` with the reason.

    Raises:
        ValueError: There is no such variant, trace or layout.
    """
    layout = layout_named(cell.layout)
    variant = Variant.parse(cell.variant)
    if not variant.has_match_unit:
        layout = layout.with_whole_blocks()
    trace = _trace(cell.trace, cell.scale, layout.thinning, layout.stretch, cell.seed)
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
    """A pool with room for every token of every request, and for the blocks of running requests."""
    num_tokens = sum(len(request.answered) for request in trace.requests)
    return 1 + layout.blocks_without_hits(num_tokens + 32 * layout.max_num_batched_tokens)
