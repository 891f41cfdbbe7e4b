# SPDX-License-Identifier: Apache-2.0
"""Serves requests to their end, and looks at everything that could be left over."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from support.connector.simulated_engine import SimulatedEngine
from support.installed import installed, retention_installed
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.store.entries import EntryState

MAX_STEPS = 4000


@contextmanager
def offloading_installed() -> Iterator[None]:
    """As in a process in which nothing is configured, or adaptive retention is."""
    with installed("fast-prefix-cache"), retention_installed(), installed("connector"):
        yield


def serve(engine: SimulatedEngine, *plans: RequestPlan) -> None:
    """Serve requests that arrive together until their transfers have ended; check the outputs."""
    outputs: dict[str, list[int]] = defaultdict(list)
    for plan in plans:
        engine.add_request(plan)
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            break
        for request_id, tokens, _ in engine.step().outputs:
            outputs[request_id] += tokens
        check_blocks(engine)
    left = {r.request_id: r.status.name for r in engine.scheduler.requests.values()}
    assert not engine.has_work(), f"not finished after {MAX_STEPS} steps; left are {left}"
    for plan in plans:
        assert outputs[plan.request_id] == plan.expected_output()


def check_blocks(engine: SimulatedEngine) -> None:
    """Every block is free or referenced, as often as requests and the connector hold it."""
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
        assert (block.block_id in free) == (block.ref_cnt == 0), f"{block} is lost, or free in use"
        num_extra += extra
    assert num_extra == engine.side.num_references
    assert pool.null_block.block_id not in free


def check_nothing_is_left(engine: SimulatedEngine) -> None:
    """No request, no transfer: nothing is held, pinned or being stored."""
    side, tier, pool = engine.side, engine.tier, engine.block_pool
    assert not engine.scheduler.requests
    assert not side.has_transfers and not side.holes
    assert engine.held.is_nothing, engine.held
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    entries = engine.entries
    assert all(entry.state is EntryState.STORED and not entry.num_pins for entry in entries)
    assert sum(entry.num_bytes for entry in entries) == tier._arena.used_bytes
    assert tier.counters.bytes_held == tier._arena.used_bytes
    assert side.remembered_tails <= {entry.number for entry in entries}
    assert not engine.scheduler.failed_recving_kv_req_ids
    assert not engine.scheduler.finished_recving_kv_req_ids
