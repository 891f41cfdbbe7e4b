# SPDX-License-Identifier: Apache-2.0
"""A KV connector fails to load, and the model has several KV cache groups.

Real schedulers run random workloads in which half of all loads fail. The model runner of the
harness checks every position that is read, `CacheContents` every block that can be hit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
import vllm
from support.installed import installed, repairs_installed
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import CacheContents, blocks_are_conserved
from support.scheduler.layouts import (
    DEEPSEEK_V4,
    FULL,
    FULL_WINDOW,
    GEMMA,
    MAMBA,
    MAMBA_WINDOW,
    MIXED_BLOCKS,
    TWO_FULL,
    Layout,
)
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import ExternalLoad, FailingLoads
from support.scheduler.random_workloads import random_workload, without_upstream_defects
from support.scheduler.run import Run, run
from support.scheduler.transcript import Step
from support.scheduler.workload import ResetPrefixCache, Workload

FEATURE = "failed-loads"
NUM_SEEDS = 12
LAYOUTS = [FULL_WINDOW, GEMMA, MIXED_BLOCKS, TWO_FULL, DEEPSEEK_V4, DEEPSEEK_V4.with_eagle(1)]
if not vllm.__version__.startswith("0.20."):
    LAYOUTS += [MAMBA, MAMBA_WINDOW]  # vLLM 0.20.2 loads no states
LOADS = (ExternalLoad.IN_STEP, ExternalLoad.BETWEEN_STEPS)


def failing(
    layout: Layout, seed: int, load: ExternalLoad, is_async: bool, **how: object
) -> Workload:
    """A random workload in a small pool, whose connector loads what fails half of the time."""
    repairs = frozenset({"two-phase-allocation"})
    workload = without_upstream_defects(random_workload(layout, seed), repairs)
    options = workload.options
    # Loads between steps hold their blocks while they wait for each other.
    has_room = options.external_load is ExternalLoad.BETWEEN_STEPS
    needs_room = load is ExternalLoad.BETWEEN_STEPS
    num_blocks = options.num_blocks
    if has_room != needs_room:
        num_blocks = num_blocks * 3 if needs_room else num_blocks // 3
    options = replace(
        options,
        num_blocks=num_blocks,
        external_load=load,
        is_async=is_async,
        failing_loads=FailingLoads(seed=seed, max_steps=3, **how),
    )
    # Upstream cannot preempt for a reset while a connector holds blocks.
    resets = tuple(ResetPrefixCache(reset.step, False) for reset in workload.resets)
    return replace(workload, options=options, resets=resets)


class LastEngine:
    """Remembers the engine, to look at it when the workload has ended."""

    engine: SchedulerEngine

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        self.engine = engine


def run_checked(workload: Workload) -> Run:
    """Run with all checks; nothing is held at the end."""
    last = LastEngine()
    contents = CacheContents(workload)

    def check_cached_blocks(engine: SchedulerEngine, _: Step) -> None:
        contents.learn(engine)
        contents.check_blocks(engine)  # its events upstream gets wrong (vLLM issue 44451)

    checks = [blocks_are_conserved, check_cached_blocks, last]
    result = run(workload, checks, ReadCheck.ALL)
    pool = last.engine.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1, "blocks are still held"
    assert not any(block.ref_cnt for block in pool.blocks if not block.is_null)
    assert not last.engine.scheduler.requests
    return result


@pytest.fixture
def repaired() -> Iterator[None]:
    with repairs_installed():
        yield


@pytest.mark.usefixtures("repaired")
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.value)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_outputs_are_those_of_a_run_without_failures(
    layout: Layout, load: ExternalLoad, is_async: bool
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(NUM_SEEDS):
        workload = failing(layout, seed, load, is_async)
        result = run_checked(workload)
        assert not result.wrong_outputs(workload), workload.name
        counts.update(result.transcript.counts)
    assert counts["failed loads"] > NUM_SEEDS
    print(dict(counts))
