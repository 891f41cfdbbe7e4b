# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention under load: random workloads on vLLM's real scheduler, checked in every step.

The workloads have chunked prefill, preemption, priorities, aborts, resets, asynchronous scheduling,
drafts, KV connectors, images, adapters and cache salts. Retention works by interval and adaptively,
in pools in which checkpoints have to be given up. No request reads KV that is not its own, cached
blocks hold what their keys say, and the checkpoints know every cached block.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support import family
from support.installed import retention_installed
from support.retention import inspection
from support.retention.checkpoints import (
    CheckpointsAccountForCache,
    adaptive_retention,
    cache_state_of,
)
from support.sample import sampled
from support.scheduler.block_manager import retention_interval
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import (
    CacheContents,
    blocks_are_conserved,
    null_block_is_left_alone,
    useless_blocks_come_first,
)
from support.scheduler.layouts import (
    EAGLE_LAYOUTS,
    FULL_WINDOW,
    LAYOUTS,
    MAMBA,
    MAMBA_WINDOW,
    Layout,
)
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import Drafter
from support.scheduler.random_workloads import (
    random_workload,
    with_options,
    without_upstream_defects,
)
from support.scheduler.run import Check, failure_of, run
from support.scheduler.transcript import Step
from support.scheduler.workload import Workload
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_ascend_kvext.patches.retention.block_pool import RetainedPool

NUM_SEEDS = {"adaptive": sampled(8), "interval": sampled(4)}
SPARSE_LAYOUTS = [
    layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.has_window or layout.has_mamba
]
INSTALLED = {"adaptive": adaptive_retention, "interval": retention_installed}


def workload_of_seed(layout: Layout, seed: int) -> Workload:
    # Without events, keys are short, and other functions look them up.
    return with_options(random_workload(layout, seed), events=seed % 4 != 1)


def interval_of_seed(layout: Layout, policy: str, seed: int) -> int | None:
    """Every third adaptive workload also has a grid."""
    if policy == "interval":
        return 2 * layout.unit_tokens * (seed % 2)
    return 2 * layout.unit_tokens if seed % 3 == 0 else None


def all_checks(workload: Workload) -> list[Check]:
    checks = [
        null_block_is_left_alone,
        functools.partial(blocks_are_conserved, shares_unhashed=True),
        useless_blocks_come_first,
        CheckpointsAccountForCache(),
    ]
    return [*checks, CacheContents()] if workload.options.events else checks


@functools.cache
def outcome_of(layout: Layout, policy: str) -> tuple[list[str], Counter[str]]:
    """The faults in the workloads of a layout, and the counts of their events."""
    counts: Counter[str] = Counter()
    violations = []
    with INSTALLED[policy]():
        for seed in range(NUM_SEEDS[policy]):
            workload = workload_of_seed(layout, seed)
            with retention_interval(interval_of_seed(layout, policy, seed)):
                violations.append(failure_of(workload, all_checks(workload), counts=counts))
    return list(filter(None, violations)), counts


@pytest.mark.parametrize("policy", INSTALLED)
@pytest.mark.parametrize("layout", SPARSE_LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_is_wrong(layout: Layout, policy: str) -> None:
    violations, counts = outcome_of(layout, policy)
    assert not violations, "\n".join(violations)
    assert counts["hits"] > 15 * NUM_SEEDS[policy] // 8
    assert counts["checkpoints when idle"] > 20 * NUM_SEEDS[policy] // 8


def test_sample_exercises_what_it_should() -> None:
    counts: Counter[str] = Counter()
    for layout in SPARSE_LAYOUTS:
        counts += outcome_of(layout, "adaptive")[1]
    print(dict(counts))
    for what in (
        "preemptions",
        "aborts",
        "resets",
        "external loads",
        "encoder inputs",
        "accepted drafts",
        "rejected drafts",
        "BlockRemoved",
        "cached blocks checked",
        "events checked",
    ):
        # vLLM-Ascend has a quarter of the layouts. Each pool has room for two steps.
        least = sampled(5 if family.IS_ASCEND else 20)
        assert counts[what] >= least, f"{what}: {counts[what]}"


def test_windows_outlive_drafts_in_flight() -> None:
    """`test_repairs` shows that in stock vLLM they do not (#47728)."""
    num_workloads = 0
    with retention_installed(), retention_interval(0):
        for layout in SPARSE_LAYOUTS:
            for seed in range(sampled(6) if layout.has_window else 0):
                workload = without_upstream_defects(random_workload(layout, seed))
                if workload.options.is_async and workload.options.drafter is Drafter.EAGLE:
                    num_workloads += 1
                    run(workload, read_check=ReadCheck.ALL)
    assert num_workloads > sampled(3)


def first_violation(
    workloads: Iterable[Workload],
    make_checks: Callable[[Workload], list[Check]],
    read_check: ReadCheck = ReadCheck.NONE,
) -> str:
    """The findings of the checks for the first workload with a fault."""
    failures = (failure_of(each, make_checks(each), read_check) for each in workloads)
    return next(filter(None, failures), "")


def plain_workloads(layout: Layout) -> list[Workload]:
    return [without_upstream_defects(random_workload(layout, seed)) for seed in range(sampled(6))]


@pytest.mark.parametrize(
    ("make_checks", "violation"),
    [
        pytest.param(lambda _: [null_block_is_left_alone], "null block", id="null-block"),
        pytest.param(
            *(lambda _: [useless_blocks_come_first], "free queue"),
            id="free-queue",
            marks=pytest.mark.vllm("<0.30"),
        ),
        pytest.param(lambda _: [CacheContents()], "not a chain: BlockStored", id="events"),
    ],
)
def test_stock_violates(make_checks: Callable[[Workload], list[Check]], violation: str) -> None:
    """Stock runs with vLLM's own interval 0."""
    with retention_interval(0):
        assert violation in first_violation(plain_workloads(MAMBA_WINDOW), make_checks)


@pytest.mark.vllm(">=0.30")
def test_stock_frees_useless_blocks_first() -> None:
    with retention_interval(0):
        assert not first_violation(
            plain_workloads(MAMBA_WINDOW), lambda _: [useless_blocks_come_first]
        )


@pytest.mark.parametrize("method", ["touch", "free_blocks"])
def test_sees_lost_and_shared_blocks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checks notice a pool that does not take hit blocks, or does not give a block back."""
    original = getattr(BlockPool, method)

    def forget_one(self: BlockPool, blocks: Iterable[KVCacheBlock], **kwargs: Any) -> None:
        original(self, list(blocks)[1:], **kwargs)

    monkeypatch.setattr(BlockPool, method, forget_one)
    violation = first_violation(plain_workloads(FULL_WINDOW), lambda _: [blocks_are_conserved])
    assert " is held " in violation


def with_events(layout: Layout) -> list[Workload]:
    seeds = range(NUM_SEEDS["adaptive"])
    return [with_options(random_workload(layout, seed), events=True) for seed in seeds]


def swap_the_last_two(engine: SchedulerEngine, step: Step) -> None:
    """Exchange the contents of the cached blocks that are evicted last."""
    hashed = [block for block in step.free_queue if step.blocks[block][1] is not None]
    if len(hashed) >= 2:
        engine.runner.memory.swap(hashed[-1], hashed[-2])


def uncache_a_needed_block(engine: SchedulerEngine, step: Step) -> None:
    """Take a block away from a checkpoint. The checkpoint is not told."""
    cache_state = cache_state_of(engine.scheduler.kv_cache_manager)
    for block_id in reversed(step.free_queue):
        if inspection.num_needs(cache_state, block_id):
            engine.block_pool.evict_blocks({block_id})
            return


def spoil_the_order(engine: SchedulerEngine, step: Step) -> None:
    """Move the first cached block that nothing needs to the end of the queue."""
    cache_state = cache_state_of(engine.scheduler.kv_cache_manager)
    queue = engine.block_pool.free_block_queue
    for block_id in step.free_queue:
        block = engine.block_pool.blocks[block_id]
        if block.block_hash is not None and not inspection.num_needs(cache_state, block_id):
            queue.remove(block)
            queue.append(block)
            return


@pytest.mark.parametrize(
    ("spoil", "violation"),
    [
        (swap_the_last_two, "does not hold what its key says"),
        (uncache_a_needed_block, "free queue (hashed or not)"),
        (spoil_the_order, "which nothing needs, waits behind"),
    ],
    ids=["swapped", "uncached", "out of order"],
)
def test_sees_what_is_wrong(spoil: Check, violation: str) -> None:
    with adaptive_retention():
        found = first_violation(
            with_events(FULL_WINDOW), lambda each: [spoil, *all_checks(each)], ReadCheck.ALL
        )
    assert violation in found


def test_sees_states_that_are_read_in_the_step_that_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cache = RetainedPool.cache

    def cache_at_once(self: RetainedPool, request: object, group: object, run: range) -> None:
        cache(self, request, group, run)
        new_this_step = getattr(group.manager, "cached_blocks_this_step", None)
        if new_this_step is not None:
            new_this_step.clear()

    monkeypatch.setattr(RetainedPool, "cache", cache_at_once)
    with adaptive_retention():
        workloads = (workload_of_seed(MAMBA, seed) for seed in range(40))
        found = first_violation(workloads, lambda _: [], ReadCheck.ALL)
    assert "are not the request's own" in found
    assert "(mamba)" in found
