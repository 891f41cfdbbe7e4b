# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention beside ``--prefix-match-unit``: hits end inside blocks, on vLLM's real scheduler.

Random workloads have chunked prefill, preemption, priorities, aborts, resets, asynchronous
scheduling and drafts. No request reads KV or a state that is not its own, and every key of the
prefix cache names a block that holds what the key says.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.installed import retention_installed
from support.retention import inspection
from support.retention.checkpoints import CheckpointsAccountForCache, adaptive_retention
from support.retention.started import retention_of
from support.sample import sampled
from support.scheduler.block_manager import retention_interval
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import (
    CacheContents,
    blocks_are_conserved,
    null_block_is_left_alone,
    useless_blocks_come_first,
)
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.model_runner import ReadCheck, rows_of
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.random_workloads import random_workload, with_options
from support.scheduler.run import Check, failure_of
from support.scheduler.token_stream import VOCAB_SIZE
from support.scheduler.workload import RequestPlan, Workload
from vllm.v1.core.kv_cache_utils import get_group_id

from vllm_ascend_kvext.settings import DISABLE_VARIABLE

pytestmark = pytest.mark.vllm(">=0.30")

NUM_SEEDS = sampled(40)
UNIT = 4
BLOCK = 16
STATES = Layout(
    "states",
    (Group(Attention.FULL, BLOCK), Group(Attention.MAMBA, BLOCK), Group(Attention.MAMBA, BLOCK)),
)
LAYOUTS = [STATES, STATES.with_eagle(0), STATES.with_eagle(0, 1, 2)]
INSTALLED = {"adaptive": adaptive_retention, "interval": retention_installed}


def workload_of_seed(layout: Layout, seed: int) -> Workload:
    workload = random_workload(layout, seed)
    if layout is not STATES:
        # The runner of these tests keeps no states of drafts. So there are no steps with drafts.
        requests = tuple(replace(plan, max_tokens=1) for plan in workload.requests)
        workload = replace(workload, requests=requests)
    return with_options(workload, match_unit_tokens=UNIT, events=seed % 4 == 1)


class KeysInsideBlocks(CacheContents):
    """Compares what every key names, also where a block has several keys."""

    def _check_blocks(self, engine: SchedulerEngine) -> None:
        super()._check_blocks(engine)
        for key, found in engine.block_pool.cached_block_hash_to_block._cache.items():
            blocks = found.values() if isinstance(found, dict) else [found]
            group_id = get_group_id(key)
            digests = self._keys[key].digests
            group = engine.layout.groups[group_id]
            expected = [
                row for *_, rows in rows_of(group, digests, 0, len(digests)) for row in rows
            ]
            for block in blocks:
                held = engine.runner.memory.read(block.block_id, group_id, 0, len(expected))
                assert held == expected, f"block {block.block_id} does not hold what a key says"
                self.counts["keys inside blocks"] += len(digests) < group.block_tokens


def all_checks() -> list[Check]:
    return [
        null_block_is_left_alone,
        functools.partial(blocks_are_conserved, shares_unhashed=True),
        useless_blocks_come_first,
        CheckpointsAccountForCache(),
        KeysInsideBlocks(),
    ]


@functools.cache
def outcome_of(layout: Layout, policy: str) -> tuple[list[str], Counter[str]]:
    counts: Counter[str] = Counter()
    violations = []
    with INSTALLED[policy]():
        for seed in range(NUM_SEEDS):
            workload = workload_of_seed(layout, seed)
            with retention_interval(2 * BLOCK * (seed % 2) if policy == "interval" else None):
                violations.append(failure_of(workload, all_checks(), counts=counts))
    return list(filter(None, violations)), counts


@pytest.mark.parametrize("policy", INSTALLED)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_nothing_is_wrong(layout: Layout, policy: str) -> None:
    violations, counts = outcome_of(layout, policy)
    print(counts)
    assert not violations, "\n".join(violations)
    assert counts["hits"] > 15 * NUM_SEEDS // 8


def engine_with(layout: Layout, unit_tokens: int = UNIT, **options: Any) -> SchedulerEngine:
    return SchedulerEngine(
        layout,
        EngineOptions(
            num_blocks=64,
            max_num_batched_tokens=256,
            match_unit_tokens=unit_tokens,
            events=False,
            **options,
        ),
        ReadCheck.ALL,
    )


def hits_of(engine: SchedulerEngine, *prompts: list[int], max_tokens: int = 1) -> list[int]:
    """Send prompts at once; the tokens that each of them hits."""
    first = len(engine.plans)
    for number, prompt in enumerate(prompts, first):
        engine.add_request(
            RequestPlan(
                request_id=f"request-{number}",
                arrival_step=0,
                prompt=tuple(prompt),
                max_tokens=max_tokens,
            )
        )
    found = {}
    for step in engine.finish():
        for each in step.scheduled:
            found.setdefault(each.request_id, each.num_computed_tokens)
    return [found[f"request-{number}"] for number in range(first, first + len(prompts))]


def numbers(first: int, count: int) -> list[int]:
    return [(first + index) % VOCAB_SIZE for index in range(count)]


def test_prompts_hit_where_earlier_prompts_part_from_them() -> None:
    """The second prompt leaves a state where it parts from the first. The third one hits there."""
    shared = numbers(0, BLOCK + 2 * UNIT + 1)
    with adaptive_retention():
        engine = engine_with(STATES)
        found = [hits_of(engine, shared + numbers(7 * each, 9)) for each in range(3)]
        engine.shutdown()
    assert found == [[0], [0], [BLOCK + 2 * UNIT]]


def test_a_short_prompt_and_its_next_turn_hit() -> None:
    prompt = numbers(0, 2 * UNIT + 1)
    with adaptive_retention():
        engine = engine_with(STATES)
        found = [hits_of(engine, prompt), hits_of(engine, prompt), hits_of(engine, prompt * 2)]
        engine.shutdown()
    assert found == [[0], [2 * UNIT], [2 * UNIT]]


@pytest.mark.parametrize("length", [3 * UNIT, BLOCK + 2 * UNIT])
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_a_prompt_of_whole_units_hits_again(layout: Layout, length: int) -> None:
    lost_tokens = UNIT * (1 if layout is STATES else 2)
    with adaptive_retention():
        engine = engine_with(layout, drafter=None if layout is STATES else Drafter.EAGLE)
        found = [hits_of(engine, numbers(0, length)) for _ in range(2)]
        engine.shutdown()
    assert found == [[0], [length - lost_tokens]]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rows_of_the_last_step_have_keys(layout: Layout) -> None:
    """With drafts, a hit also reads rows behind its state, which the last step computes."""
    lost_tokens = 1 if layout is STATES else 1 + UNIT
    prompt = numbers(0, BLOCK + 3 * UNIT + 1)
    with adaptive_retention():
        engine = engine_with(layout, drafter=None if layout is STATES else Drafter.EAGLE)
        found = [hits_of(engine, prompt) for _ in range(2)]
        engine.shutdown()
    assert found == [[0], [len(prompt) - lost_tokens]]


def test_a_prompt_still_hits_when_its_last_block_is_full() -> None:
    """An answer fills the block in which the prompt ends."""
    prompt = numbers(0, BLOCK + 2 * UNIT + 1)
    with adaptive_retention():
        engine = engine_with(STATES)
        found = hits_of(engine, prompt, max_tokens=2 * BLOCK) + hits_of(engine, prompt)
        engine.shutdown()
    assert found == [0, BLOCK + 2 * UNIT]


def test_checkpoints_inside_blocks_outlive_other_prompts() -> None:
    """A prompt that comes again and again is not given up for prompts that come once."""
    prompt = numbers(0, BLOCK + UNIT + 1)
    rng = random.Random(1)
    with adaptive_retention():
        engine = engine_with(STATES)
        for _ in range(3):
            hits_of(engine, prompt)
        found = []
        for _ in range(12):
            for _ in range(6):
                hits_of(engine, [rng.randrange(VOCAB_SIZE) for _ in range(3 * BLOCK)])
            found += hits_of(engine, prompt)
        engine.shutdown()
    # How often prompts come again is learned first.
    assert found[3:] == [BLOCK + UNIT] * 9


def test_no_block_is_copied_in_the_step_that_writes_it() -> None:
    """A state is older than the rows before it. A prompt hits it in the step that computes them.

    The state of a block's end is hit one unit earlier, if drafts take a unit away.
    """
    layout = STATES.with_eagle(0)
    prompt = numbers(0, 2 * BLOCK)
    with adaptive_retention():
        engine = engine_with(layout, drafter=Drafter.EAGLE)
        hits_of(engine, prompt[: BLOCK + 3 * UNIT + 1])
        # The rows of the second block are gone, and its states are not.
        pool = engine.block_pool
        keys = list(pool.cached_block_hash_to_block._cache.items())
        gone = {
            block.block_id
            for key, block in keys
            if get_group_id(key) == 0 and block.block_hash_num_tokens > BLOCK
        }
        pool.evict_blocks(gone)
        found = hits_of(engine, [*prompt, 1], [*prompt, 2])
        engine.shutdown()
    assert gone
    assert found[1] > 0


def test_no_checkpoint_keeps_a_block_that_gives_its_key_away() -> None:
    """Two requests leave the same state, and each moves its key later. The workload has such."""
    workload = with_options(
        workload_of_seed(STATES, 376),
        num_blocks=31,
        max_num_seqs=16,
        max_num_batched_tokens=64,
        by_priority=False,
        reserve_full_prompt=False,
    )
    requests = [replace(plan, arrival_step=plan.arrival_step // 4) for plan in workload.requests]
    aborts = [replace(each, step=max(1, each.step // 4)) for each in workload.aborts]
    workload = replace(workload, requests=tuple(requests), aborts=tuple(aborts))
    with adaptive_retention():
        assert not failure_of(workload, all_checks())


@pytest.mark.parametrize("max_tokens", [1, 2])
def test_requests_that_have_ended_go_on_from_no_checkpoint(max_tokens: int) -> None:
    """With one token, the state inside a block is kept when the request ends."""
    with adaptive_retention():
        engine = engine_with(STATES)
        for number in range(5):
            hits_of(engine, numbers(number, 3 * BLOCK + 2 * UNIT), max_tokens=max_tokens)
        retention = retention_of(engine.scheduler.kv_cache_manager.coordinator)
        assert retention is not None
        checkpoints = inspection.describe(retention.cache_state)
        assert len(checkpoints) > 5
        assert not sum(each["num_requests"] for each in checkpoints)
        engine.shutdown()


REFUSED = {
    "windows": Layout("windows", (*STATES.groups, Group(Attention.WINDOW, UNIT, UNIT))),
    "blocks of two sizes": Layout(
        "sizes", (Group(Attention.FULL, 2 * BLOCK), Group(Attention.MAMBA, BLOCK))
    ),
}


@pytest.mark.parametrize("layout", REFUSED.values(), ids=REFUSED)
def test_other_layouts_are_left_to_upstream(layout: Layout) -> None:
    with adaptive_retention():
        engine = engine_with(layout)
        assert retention_of(engine.scheduler.kv_cache_manager.coordinator) is None
        engine.shutdown()


def test_without_the_repair_of_copies_upstream_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    with adaptive_retention():
        engine = engine_with(STATES)
        assert retention_of(engine.scheduler.kv_cache_manager.coordinator) is not None
        monkeypatch.setenv(DISABLE_VARIABLE, "block-copies")
        engine = engine_with(STATES)
        assert retention_of(engine.scheduler.kv_cache_manager.coordinator) is None
