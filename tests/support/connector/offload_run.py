# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs an `OffloadWorkload` to its end, and checks that nothing is left over."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

from vllm.v1.request import RequestStatus

from support.connector.held import Held
from support.connector.offload_workloads import OffloadWorkload
from support.connector.simulated_engine import SimulatedEngine
from support.installed import installed, retention_installed
from support.retention.checkpoints import adaptive_chosen
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.store.entries import EntryState, Kind

MAX_STEPS = 4000


@contextmanager
def offloading_installed() -> Iterator[None]:
    """Install the features of a process without settings, or with adaptive retention."""
    with installed("fast-prefix-cache"), retention_installed(), installed("connector"):
        yield


@dataclass(slots=True)
class Offloaded:
    """The answers of requests. Aborted requests have no finish reason."""

    counts: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, list[int]] = field(default_factory=dict)
    finish_reasons: dict[str, str] = field(default_factory=dict)


def run_offloading(
    workload: OffloadWorkload, num_contents: Sequence[int] | None = None
) -> Offloaded:
    """Run a workload with all checks, inside `offloading_installed`.

    Args:
        num_contents: See `SimulatedEngine`.
    """
    rng = random.Random(f"events/{workload.name}")
    result = Offloaded()

    def disturb() -> None:
        if rng.random() < workload.abort_share:
            _abort_one(engine, rng, result.counts)
        if rng.random() < workload.reset_share:
            _reset(engine, rng, result.counts)
        if workload.eviction_share and rng.random() < workload.eviction_share:
            evict_one(engine, rng)
        if not engine.has_work():
            check_nothing_is_left(engine)

    with adaptive_chosen() if workload.is_adaptive else nullcontext():
        engine = SimulatedEngine(workload.layout, workload.options, workload.script, num_contents)
    try:
        _serve(engine, workload.requests, result, disturb)
        _check_outputs(workload, result)
        _count(engine, result.counts)
        return result
    finally:
        engine.shutdown()


def serve(engine: SimulatedEngine, *plans: RequestPlan) -> None:
    """Serve requests that arrive together, until their transfers have ended.

    Check their outputs.
    """
    result = Offloaded()
    _serve(engine, plans, result, lambda: None)
    for plan in plans:
        assert result.outputs[plan.request_id] == plan.expected_output()


def _serve(
    engine: SimulatedEngine,
    plans: Sequence[RequestPlan],
    result: Offloaded,
    before_step: Callable[[], None],
) -> None:
    arrivals = list(reversed(plans))
    for step_number in range(MAX_STEPS):
        while arrivals and arrivals[-1].arrival_step <= step_number:
            engine.add_request(arrivals.pop())
        before_step()
        if engine.has_work():
            _record(engine.step(), result)
            check_blocks(engine)
        elif not arrivals:
            return
    left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
    raise AssertionError(f"not finished after {MAX_STEPS} steps; left are {left}")


def check_blocks(engine: SimulatedEngine) -> None:
    """Check that every block is free, or has as many references as holders."""
    pool = engine.block_pool
    held: Counter[int] = Counter()
    for manager in engine.managers:
        for blocks in manager.req_to_blocks.values():
            held.update(block.block_id for block in blocks if not block.is_null)
    free = {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    num_extra = 0
    for block in pool.blocks:
        if block.is_null:
            continue
        extra = block.ref_cnt - held[block.block_id]
        assert extra >= 0, f"{block} is held {held[block.block_id]} times by requests"
        assert (block.block_id in free) == (block.ref_cnt == 0), (
            f"{block} is lost, or is free while in use"
        )
        num_extra += extra
    assert num_extra == engine.side.references.num_references
    assert pool.null_block.block_id not in free


def check_nothing_is_left(engine: SimulatedEngine) -> None:
    """Check that nothing is held, pinned or being stored when no request or transfer is left."""
    side = engine.side
    tier = engine.tier
    pool = engine.block_pool
    assert not engine.scheduler.requests
    assert not side.has_transfers and not side.holes
    assert engine.held == Held()
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    entries = engine.entries
    assert all(entry.state is EntryState.STORED and not entry.num_pins for entry in entries)
    assert sum(entry.num_bytes for entry in entries) == tier._arena.used_bytes
    assert tier.counters.bytes_held == tier._arena.used_bytes
    assert side._stores.reasons.keys() <= {entry.number for entry in entries}
    assert not engine.scheduler.failed_recving_kv_req_ids
    assert not engine.scheduler.finished_recving_kv_req_ids


def evict_one(engine: SimulatedEngine, rng: random.Random) -> None:
    """Remove an entry that no job loads, usually rows with other rows behind them."""
    entries = [entry for entry in engine.entries if entry.is_evictable]
    if rng.random() < 0.9:
        entries = [entry for entry in entries if entry.piece.kind is Kind.ROWS]
    if entries:
        chosen = rng.choice(entries)
        engine.tier.evict(lambda entry: entry is chosen)


def _abort_one(engine: SimulatedEngine, rng: random.Random, counts: Counter[str]) -> None:
    requests = list(engine.scheduler.requests.values())
    live = [request for request in requests if not request.is_finished()]
    loading = [r for r in live if r.status is RequestStatus.WAITING_FOR_REMOTE_KVS]
    if live:
        request = rng.choice(loading if loading and rng.random() < 0.5 else live)
        counts["aborts while loading"] += request in loading
        counts["aborts"] += engine.abort(request.request_id)


def _reset(engine: SimulatedEngine, rng: random.Random, counts: Counter[str]) -> None:
    resets_running = rng.random() < 0.5 and _can_preempt_for_reset(engine)
    held = engine.held
    counts["resets with stores under way"] += held.num_stores + held.num_planned_stores > 0
    has_reset = engine.reset(resets_running, reset_connector=rng.random() < 0.5)
    counts["resets"] += has_reset
    if resets_running:
        assert has_reset
        counts["resets of running requests"] += 1


def _can_preempt_for_reset(engine: SimulatedEngine) -> bool:
    """Whether upstream can reset. It cannot while a request holds blocks but does not run."""
    scheduler = engine.scheduler
    running = {request.request_id for request in scheduler.running}
    return all(manager.req_to_blocks.keys() <= running for manager in engine.managers)


def _record(step: Step, result: Offloaded) -> None:
    result.counts["steps"] += 1
    result.counts["preemptions"] += len(step.preempted)
    for request_id, tokens, finish_reason in step.outputs:
        result.outputs.setdefault(request_id, []).extend(tokens)
        if finish_reason != "None":
            result.finish_reasons[request_id] = finish_reason


def _check_outputs(workload: OffloadWorkload, result: Offloaded) -> None:
    for plan in workload.requests:
        output = result.outputs.get(plan.request_id, [])
        expected = plan.expected_output()
        is_finished = result.finish_reasons.get(plan.request_id) in ("stop", "length")
        right = expected if is_finished else expected[: len(output)]
        assert output == right, f"{plan.request_id}: expected {right}, found {output}"
        result.counts["finished"] += is_finished


def _count(engine: SimulatedEngine, counts: Counter[str]) -> None:
    counters = engine.side.counters
    tier = engine.tier.counters
    counts["requests"] += len(engine.requests)
    counts["hit requests"] += counters.hit_requests
    counts["hit tokens"] += counters.hit_tokens
    counts["swaps"] += counters.swapped_requests
    counts["joined loads"] += counters.joined_loads
    counts["hole tokens"] += counters.hole_tokens
    counts["too dear"] += counters.too_dear_loads
    for name, of_kind in (("refused", tier.refused_stores), ("removed", tier.removed_entries)):
        for kind, count in of_kind.items():
            counts[f"{name}: {kind.value}"] += count
    for worker in engine.workers:
        counts.update(worker.transfers.counts)
