# SPDX-License-Identifier: Apache-2.0
"""Retention under load: random workloads on vLLM's real scheduler, checked after every step.

Chunked prefill, preemption, priorities, aborts, resets, asynchronous scheduling, drafts, KV
connectors, images, adapters and cache salts, on layouts of every kind that has a sliding window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
from support.installed import retention_installed
from support.sample import sampled
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import (
    CacheContents,
    blocks_are_conserved,
    null_block_is_left_alone,
    useless_blocks_come_first,
)
from support.scheduler.layouts import FULL_WINDOW, LAYOUTS, MAMBA_WINDOW, Layout
from support.scheduler.model_runner import ReadCheck, WrongKVError
from support.scheduler.options import Drafter
from support.scheduler.random_workloads import (
    EAGLE_LAYOUTS,
    random_workload,
    without_upstream_defects,
    workload_of,
)
from support.scheduler.run import Check, run
from support.scheduler.transcript import Step
from support.scheduler.workload import Workload
from support.scheduler.worlds import INTERVAL_VARIABLE
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

from vllm_ascend_kvext.features import REPAIRS

NUM_SEEDS = sampled(6)
REPAIRED = frozenset(repair.name for repair in REPAIRS)
WINDOW_LAYOUTS = [layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.has_window]

by_name = {"ids": lambda layout: layout.name}


@pytest.fixture
def retention() -> Iterator[None]:
    with retention_installed():
        yield


def workloads(layout: Layout, repaired: frozenset[str] = frozenset()) -> list[Workload]:
    return [
        without_upstream_defects(random_workload(layout, s), repaired) for s in range(NUM_SEEDS)
    ]


def all_checks(workload: Workload) -> list[Check]:
    return [
        null_block_is_left_alone,
        blocks_are_conserved,
        useless_blocks_come_first,
        CacheContents(workload),
    ]


@pytest.mark.usefixtures("retention")
@pytest.mark.parametrize("interval_units", [0, 2])
@pytest.mark.parametrize("layout", WINDOW_LAYOUTS, **by_name)
def test_invariants_hold(
    layout: Layout, interval_units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(INTERVAL_VARIABLE, str(interval_units * layout.unit_tokens))
    counts: Counter[str] = Counter()
    for workload in workloads(layout, REPAIRED):
        try:
            result = run(workload, all_checks(workload), ReadCheck.ALL)
        except AssertionError as error:
            raise AssertionError(f"{workload.name}, {workload.options}: {error}") from error
        assert not result.wrong_outputs(workload), workload.name
        counts += result.transcript.counts
    assert counts["hits"] >= sampled(11)
    assert counts["BlockStored"] > 100


def read_wrong_kv_with_drafts_in_flight() -> int:
    """Workloads in which a request reads KV that is not its own, of those with async drafts."""
    num_wrong = num_workloads = 0
    for layout in WINDOW_LAYOUTS:
        for workload in workloads(layout):
            if workload.options.is_async and workload.options.drafter is Drafter.EAGLE:
                num_workloads += 1
                try:
                    run(workload, read_check=ReadCheck.ALL)
                except WrongKVError:
                    num_wrong += 1
    assert num_workloads > 3
    return num_wrong


@pytest.mark.usefixtures("retention")
def test_windows_outlive_drafts_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERVAL_VARIABLE, "0")
    assert read_wrong_kv_with_drafts_in_flight() == 0


def test_stock_windows_do_not_outlive_drafts_in_flight() -> None:
    """Upstream frees window blocks as if drafts in flight had been accepted (vLLM #47728)."""
    assert read_wrong_kv_with_drafts_in_flight() > 0


def test_forgets_what_a_preempted_request_did_not_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Upstream caches blocks when it schedules; a request preempted in that step leaves them."""
    monkeypatch.setenv(INTERVAL_VARIABLE, "0")
    names = ("wide-window-43", "wide-window-45", "wide-window-58")
    candidates = [without_upstream_defects(workload_of(name), REPAIRED) for name in names]
    with retention_installed():
        assert not first_violation(candidates, lambda workload: [CacheContents(workload)])
    monkeypatch.delenv(INTERVAL_VARIABLE)
    stock = first_violation(candidates, lambda workload: [CacheContents(workload)])
    assert "does not hold what its key says" in stock


def first_violation(
    candidates: Iterable[Workload],
    make_checks: Callable[[Workload], list[Check]],
    read_check: ReadCheck = ReadCheck.NONE,
) -> str:
    """What the checks say about the first workload that violates them."""
    for workload in candidates:
        try:
            run(workload, make_checks(workload), read_check)
        except AssertionError as error:
            return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    ("make_checks", "violation"),
    [
        (lambda workload: [null_block_is_left_alone], "null block"),
        (lambda workload: [useless_blocks_come_first], "free queue"),
        (lambda workload: [CacheContents(workload)], "not a chain: BlockStored"),
    ],
    ids=["null-block", "free-queue", "events"],
)
def test_stock_violates(
    make_checks: Callable[[Workload], list[Check]], violation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With vLLM's own interval 0."""
    monkeypatch.setenv(INTERVAL_VARIABLE, "0")
    assert violation in first_violation(workloads(MAMBA_WINDOW), make_checks)


def test_sees_cached_blocks_swapped() -> None:
    def swap_the_last_two(engine: SchedulerEngine, step: Step) -> None:
        hashed = [block for block in step.free_queue if step.blocks[block][1] is not None]
        if len(hashed) >= 2:
            engine.runner.memory.swap(hashed[-1], hashed[-2])

    violation = first_violation(
        workloads(FULL_WINDOW), lambda workload: [swap_the_last_two], ReadCheck.ALL
    )
    assert WrongKVError.__name__ in violation
    violation = first_violation(
        workloads(FULL_WINDOW), lambda workload: [swap_the_last_two, CacheContents(workload)]
    )
    assert "does not hold what its key says" in violation


def test_sees_blocks_cached_before_they_are_full(monkeypatch: pytest.MonkeyPatch) -> None:
    block_tokens = FULL_WINDOW.unit_tokens
    allocate_slots = KVCacheManager.allocate_slots

    def allocate_and_cache(
        self: KVCacheManager, request: Request, num_new_tokens: int, *args: Any, **kwargs: Any
    ) -> Any:
        blocks = allocate_slots(self, request, num_new_tokens, *args, **kwargs)
        if blocks is not None and not kwargs.get("delay_cache_blocks"):
            num_tokens = request.num_computed_tokens + kwargs.get("num_new_computed_tokens", 0)
            num_tokens += num_new_tokens
            rounded_up = -(-num_tokens // block_tokens) * block_tokens
            self.cache_blocks(request, min(rounded_up, request.num_tokens))
        return blocks

    monkeypatch.setattr(KVCacheManager, "allocate_slots", allocate_and_cache)
    violation = first_violation(workloads(FULL_WINDOW), lambda workload: [CacheContents(workload)])
    assert "does not hold what its key says" in violation


@pytest.mark.parametrize("method", ["touch", "free_blocks"])
def test_sees_lost_and_shared_blocks(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that forgets to take hit blocks, or to give one back, does not go unnoticed."""
    original = getattr(BlockPool, method)

    def forget_one(self: BlockPool, blocks: Iterable[KVCacheBlock], **kwargs: Any) -> None:
        original(self, list(blocks)[1:], **kwargs)

    monkeypatch.setattr(BlockPool, method, forget_one)
    violation = first_violation(workloads(FULL_WINDOW), lambda workload: [blocks_are_conserved])
    assert " is held " in violation
