# SPDX-License-Identifier: Apache-2.0
"""Adaptive retention under load: random workloads on vLLM's real scheduler, checked in every step.

What `test_retention_scheduler` puts an interval through, in pools in which checkpoints have to give
way, with hints, state groups, and drafts that are accepted and rejected. No request reads KV that
is not its own, no cached block holds anything else than its key says, and the checkpoints know of
every block that is cached.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
from support.retention.checkpoints import (
    CheckpointsAccountForCache,
    adaptive_retention,
    retention_books,
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
from support.scheduler.layouts import DEEPSEEK_V4, FULL_WINDOW, LAYOUTS, MAMBA, Layout
from support.scheduler.model_runner import ReadCheck, WrongKVError
from support.scheduler.random_workloads import (
    EAGLE_LAYOUTS,
    random_workload,
    without_upstream_defects,
    workload_of,
)
from support.scheduler.run import Check, run
from support.scheduler.transcript import Step, Transcript, first_difference
from support.scheduler.workload import RequestPlan, Workload
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from vllm_ascend_kvext.features import REPAIRS
from vllm_ascend_kvext.patches.retention.block_pool import RetainedPool

NUM_SEEDS = sampled(8)
REPAIRED = frozenset(repair.name for repair in REPAIRS)
SPARSE_LAYOUTS = [
    layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.has_window or layout.has_mamba
]

by_name = {"ids": lambda layout: layout.name}


def workload_of_seed(layout: Layout, seed: int) -> Workload:
    """A random workload, some of whose requests name boundaries."""
    plain = random_workload(layout, seed)
    workload = without_upstream_defects(plain, REPAIRED)
    rng = random.Random(f"hints/{workload.name}")
    return replace(
        workload,
        # Without events keys are short, and other functions look them up.
        options=replace(workload.options, events=seed % 4 != 1),
        requests=tuple(_with_hints(plan, rng) for plan in workload.requests),
    )


def _with_hints(plan: RequestPlan, rng: random.Random) -> RequestPlan:
    if rng.random() < 0.7:
        return plan
    hints = [rng.randrange(1, len(plan.prompt) + 1) for _ in range(rng.choice((1, 3)))]
    return replace(plan, checkpoint_tokens=tuple(hints))


def interval_of_seed(layout: Layout, seed: int) -> int | None:
    """Every third workload has a grid besides."""
    return 2 * layout.unit_tokens if seed % 3 == 0 else None


def conserved_if_shared_without_hash(engine: SchedulerEngine, step: Step) -> None:
    """`blocks_are_conserved`, but that requests may go on sharing what has given way.

    A block that two requests read can lose its key to a newer copy, or with the last checkpoint
    that needed it. They read it as before; only nobody else will.
    """
    hidden: list[tuple[KVCacheBlock, bytes]] = []
    try:
        for block in engine.block_pool.blocks:
            if block.ref_cnt > 1 and block.block_hash is None and not block.is_null:
                block._block_hash = b"shared"
                hidden.append((block, b"shared"))
        blocks_are_conserved(engine, step)
    finally:
        for block, _ in hidden:
            block._block_hash = None


def all_checks(workload: Workload) -> list[Check]:
    checks = [
        null_block_is_left_alone,
        conserved_if_shared_without_hash,
        useless_blocks_come_first,
        CheckpointsAccountForCache(),
    ]
    return [*checks, CacheContents(workload)] if workload.options.events else checks


@dataclass(frozen=True)
class Outcome:
    """All workloads of one layout."""

    violations: list[str]
    counts: Counter[str]


@functools.cache
def outcome_of(layout: Layout) -> Outcome:
    violations = []
    counts: Counter[str] = Counter()
    with adaptive_retention():
        for seed in range(NUM_SEEDS):
            workload = workload_of_seed(layout, seed)
            checks = all_checks(workload)
            try:
                with retention_interval(interval_of_seed(layout, seed)):
                    result = run(workload, checks, ReadCheck.ALL)
                assert not result.wrong_outputs(workload), "wrong outputs"
            except (AssertionError, RuntimeError) as error:
                violations.append(f"{workload.name}, {workload.options}: {error!r}")
                continue
            counts += result.transcript.counts
            for check in checks:
                if isinstance(check, CheckpointsAccountForCache):
                    counts["idle"] += check.num_idle
                    counts["checkpoints when idle"] += check.num_checkpoints
                if isinstance(check, CacheContents):
                    counts["cached blocks checked"] += check.num_cached_checked
                    counts["events checked"] += check.num_events_checked
    return Outcome(violations, counts)


@pytest.mark.parametrize("layout", SPARSE_LAYOUTS, **by_name)
def test_nothing_is_wrong(layout: Layout) -> None:
    outcome = outcome_of(layout)
    assert not outcome.violations, "\n".join(outcome.violations)
    assert outcome.counts["hits"] > 15
    assert outcome.counts["checkpoints when idle"] > 20


def test_sample_exercises_what_it_should() -> None:
    counts: Counter[str] = Counter()
    for layout in SPARSE_LAYOUTS:
        counts += outcome_of(layout).counts
    print(dict(counts))
    for what in (
        "preemptions",
        "aborts",
        "resets",
        "external loads",
        "encoder inputs",
        "BlockRemoved",
        "cached blocks checked",
        "events checked",
    ):
        assert counts[what] >= sampled(20), f"{what}: {counts[what]}"


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS, **by_name)
def test_drafts_are_accepted_and_rejected_where_groups_look_ahead(layout: Layout) -> None:
    counts = outcome_of(layout).counts
    assert counts["accepted drafts"] > 100
    assert counts["rejected drafts"] > 100


def test_decides_the_same_with_upstreams_prefix_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is faster decides what upstream's functions decide, under adaptive retention too."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM derives its block hashes from it
    layouts = (FULL_WINDOW, FULL_WINDOW.with_eagle(1), DEEPSEEK_V4, MAMBA)
    workloads = [workload_of_seed(layout, seed) for layout in layouts for seed in (0, 2, 3)]
    transcripts: dict[bool, list[Transcript]] = {}
    for is_fast in (False, True):
        with adaptive_retention(is_fast):
            transcripts[is_fast] = [run(workload).transcript for workload in workloads]
    for workload, *both in zip(workloads, transcripts[False], transcripts[True], strict=True):
        assert first_difference(*both) is None, workload.name


class ResetWhenIdle:
    """Empties the prefix cache whenever no request is left, and looks at what remains."""

    def __init__(self) -> None:
        self.num_resets = 0

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        if engine.scheduler.requests or not engine.reset_prefix_cache(False):
            return
        self.num_resets += 1
        assert not retention_books(engine.scheduler.kv_cache_manager).describe()
        assert not any(block.block_hash for block in engine.block_pool.blocks)
        assert engine.block_pool.get_num_free_blocks() == engine.options.num_blocks - 1


@pytest.mark.parametrize("layout", [FULL_WINDOW, DEEPSEEK_V4, MAMBA], **by_name)
def test_reset_leaves_nothing(layout: Layout) -> None:
    reset = ResetWhenIdle()
    with adaptive_retention():
        for seed in range(4):
            workload = workload_of_seed(layout, seed)
            run(workload, [reset, conserved_if_shared_without_hash], ReadCheck.ALL)
    assert reset.num_resets > 4


def test_forgets_what_a_preempted_request_did_not_compute() -> None:
    """Upstream caches blocks when it schedules; a request preempted in that step leaves them."""
    for name in ("wide-window-43", "wide-window-45", "wide-window-58"):
        workload = without_upstream_defects(workload_of(name), REPAIRED)
        with adaptive_retention():
            run(workload, all_checks(workload), ReadCheck.ALL)


def violation_of(layout: Layout, *checks: Check) -> str:
    """What is said about the first workload of a layout in which something is wrong."""
    with adaptive_retention():
        for seed in range(NUM_SEEDS):
            workload = workload_of_seed(layout, seed)
            workload = replace(workload, options=replace(workload.options, events=True))
            try:
                run(workload, [*checks, *all_checks(workload)], ReadCheck.ALL)
            except (AssertionError, RuntimeError) as error:
                return f"{type(error).__name__}: {error}"
    return ""


def swap_the_last_two(engine: SchedulerEngine, step: Step) -> None:
    """Exchange the content of the cached blocks that are evicted last."""
    hashed = [block for block in step.free_queue if step.blocks[block][1] is not None]
    if len(hashed) >= 2:
        engine.runner.memory.swap(hashed[-1], hashed[-2])


def uncache_a_needed_block(engine: SchedulerEngine, step: Step) -> None:
    """Take a block from a checkpoint behind its back."""
    books = retention_books(engine.scheduler.kv_cache_manager)
    for block_id in reversed(step.free_queue):
        if books.num_needs(block_id):
            engine.block_pool.evict_blocks({block_id})
            return


def spoil_the_order(engine: SchedulerEngine, step: Step) -> None:
    """Make the first cached block that nothing needs the last one to be reallocated."""
    books = retention_books(engine.scheduler.kv_cache_manager)
    queue = engine.block_pool.free_block_queue
    for block_id in step.free_queue:
        block = engine.block_pool.blocks[block_id]
        if block.block_hash is not None and not books.num_needs(block_id):
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
    found = violation_of(FULL_WINDOW, spoil)
    assert found
    assert violation in found


def test_sees_wrong_reads() -> None:
    with adaptive_retention():
        for seed in range(NUM_SEEDS):
            try:
                run(workload_of_seed(FULL_WINDOW, seed), [swap_the_last_two], ReadCheck.ALL)
            except WrongKVError:
                return
    pytest.fail("nobody read the swapped blocks")


def without_a_step_of_grace(cache: Callable[..., None]) -> Callable[..., None]:
    def cache_at_once(self: RetainedPool, request: object, group: object, run: range) -> None:
        cache(self, request, group, run)
        new_this_step = getattr(group.manager, "cached_blocks_this_step", None)
        if new_this_step is not None:
            new_this_step.clear()

    return cache_at_once


def test_sees_states_that_are_read_in_the_step_that_computes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RetainedPool, "cache", without_a_step_of_grace(RetainedPool.cache))
    with adaptive_retention():
        for seed in range(40):
            try:
                run(workload_of_seed(MAMBA, seed), read_check=ReadCheck.ALL)
            except WrongKVError as error:
                assert "does not hold the state" in str(error)
                return
    pytest.fail("nobody read a state that is not there yet")
