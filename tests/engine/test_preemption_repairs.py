# SPDX-License-Identifier: Apache-2.0
"""What a preempted request leaves behind: in the steps in flight, and in the prefix cache.

A test named ``test_stock_...`` shows vLLM on its own: it fails as soon as upstream is right, and
then the repair can go.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from support.installed import installed
from support.sample import sampled
from support.scheduler.defects import observed_defects
from support.scheduler.engine import SchedulerEngine
from support.scheduler.invariants import CacheContents, blocks_are_conserved
from support.scheduler.layouts import EAGLE_LAYOUTS, FULL_WINDOW, LAYOUTS
from support.scheduler.model_runner import ReadCheck
from support.scheduler.options import Drafter, EngineOptions, ExternalLoad
from support.scheduler.random_workloads import random_workload
from support.scheduler.run import Check, run
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan, ResetPrefixCache, Workload
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from vllm_ascend_kvext.features import REPAIRS
from vllm_ascend_kvext.upstream_state import SchedulerState

FRAMES, IN_STEP = "discarded-frames", "preempted-in-step"
NUM_RUNS = sampled(200)
DRAFT_LAYOUTS = [layout for layout in LAYOUTS + EAGLE_LAYOUTS if layout.supports_drafts]
PRIORITY_SEEDS = range(sampled(8))
FAILURES = {
    "is cached, but does not hold": "caches what was not computed",
    "are not the request's own": "reads what is not its own",
    "scheduled up to token": "computes tokens that do not exist",
    "not finished after": "does not end",
}
"""What an error of the harness says, and what that means."""


@pytest.fixture
def repaired() -> Iterator[None]:
    with all_repairs():
        yield


def all_repairs(but: str = "") -> Any:
    return installed(*(repair.name for repair in REPAIRS if repair.name != but))


def workload_with_resets(number: int) -> Workload:
    """A random workload with drafts in flight, whose running requests are preempted for resets."""
    layout = DRAFT_LAYOUTS[number % len(DRAFT_LAYOUTS)]
    workload = random_workload(layout, number // len(DRAFT_LAYOUTS))
    rng = random.Random(f"resets/{workload.name}")
    last_step = max(plan.arrival_step for plan in workload.requests) + 60
    options = replace(
        workload.options, is_async=True, drafter=Drafter.EAGLE, external_load=None, events=False
    )
    resets = tuple(
        ResetPrefixCache(rng.randrange(last_step), reset_running_requests=True)
        for _ in range(rng.choice((1, 3, 9)))
    )
    return replace(workload, options=options, resets=resets)


def workload_by_priority(layout: Any, seed: int) -> Workload:
    """A random workload in a small pool, whose prompts are computed together and in chunks.

    Whoever comes later is more urgent: who came first is scheduled first, too, and then preempted.
    """
    workload = random_workload(layout, seed)
    num_blocks = workload.options.num_blocks
    if workload.options.external_load is ExternalLoad.BETWEEN_STEPS:
        num_blocks //= 3  # such a workload is given three times the room
    options = replace(
        workload.options,
        num_blocks=num_blocks,
        max_num_seqs=16,
        max_num_batched_tokens=256,
        long_prefill_tokens=layout.unit_tokens + 1,
        reserve_full_prompt=False,
        by_priority=True,
        external_load=None,
        is_async=seed % 2 == 1,
        drafter=None,
        events=False,
    )
    requests = tuple(
        replace(plan, arrival_step=plan.arrival_step // 4, priority=-number)
        for number, plan in enumerate(workload.requests)
    )
    return replace(workload, options=options, requests=requests, resets=())


def failures(workloads: Iterable[Workload]) -> Counter[str]:
    """How the runs fail, and how many of them meet which defect."""
    found: Counter[str] = Counter()
    for workload in workloads:
        with observed_defects() as defects:
            failure = how_it_fails(workload)
        found.update(defects)
        found["runs"] += 1
        if failure is not None:
            found["failed"] += 1
            found[failure] += 1
    return found


def how_it_fails(workload: Workload) -> str | None:
    try:
        result = run(workload, [blocks_are_conserved, cached_blocks_hold(workload)], ReadCheck.ALL)
    except (AssertionError, RuntimeError) as error:
        kinds = [kind for part, kind in FAILURES.items() if part in str(error)]
        return kinds[0] if kinds else f"{type(error).__name__}: {error}"
    unfinished = {plan.request_id for plan in workload.requests} - result.finish_reasons.keys()
    if result.wrong_outputs(workload) or unfinished - {a.request_id for a in workload.aborts}:
        return "wrong outputs"
    return None


def cached_blocks_hold(workload: Workload) -> Check:
    """What their keys say. Events are left out: upstream gets some wrong (vLLM issue 44451)."""
    contents = CacheContents(workload)

    def check(engine: SchedulerEngine, step: Step) -> None:
        contents.learn(engine)
        contents.check_blocks(engine)

    return check


class TestDiscardedFrames:
    """Asynchronous scheduling, draft tokens, and a reset that preempts what runs."""

    PLAN = RequestPlan(request_id="r", arrival_step=0, prompt=tuple(range(20)), max_tokens=24)

    def test_random_runs_read_and_answer_right(self, repaired: None) -> None:
        found = failures(map(workload_with_resets, range(NUM_RUNS)))
        print(f"with all repairs: {dict(found)}")
        assert found["failed"] == 0
        assert found[FRAMES] > NUM_RUNS // 3

    def test_stock_random_runs_do_not(self) -> None:
        with all_repairs(but=FRAMES):
            found = failures(map(workload_with_resets, range(NUM_RUNS)))
        print(f"without {FRAMES}: {dict(found)}")
        assert found["failed"] > NUM_RUNS // 3

    def engine(self) -> SchedulerEngine:
        options = EngineOptions(
            num_blocks=200, is_async=True, drafter=Drafter.EAGLE, num_draft_tokens=3
        )
        return SchedulerEngine(FULL_WINDOW, options, ReadCheck.ALL)

    def decode(self, engine: SchedulerEngine) -> list[int]:
        """All tokens that the scheduler puts out from here on."""
        tokens: list[int] = []
        for _ in range(100):
            if not engine.has_work():
                return tokens
            tokens += [t for _, new, _ in engine.step().outputs for t in new]
        raise AssertionError("it does not end")

    def test_no_step_is_remembered_for_longer_than_it_is_in_flight(self, repaired: None) -> None:
        engine = self.engine()
        engine.add_request(self.PLAN)
        self.decode(engine)
        assert not SchedulerState.of(engine.scheduler).steps_in_flight._steps

    def test_every_step_in_flight_is_dropped(self, repaired: None) -> None:
        """Pipeline parallelism has several."""
        engine = self.engine()
        engine.add_request(self.PLAN)
        in_flight = []
        for _ in range(3):
            planned = engine.scheduler.schedule()
            in_flight.append((planned, engine.runner.execute(planned)))
        assert engine.reset_prefix_cache(reset_running_requests=True)
        for planned, output in in_flight:
            assert not engine.scheduler.update_from_output(planned, output)
        assert self.decode(engine) == self.PLAN.expected_output()

    def test_prompt_logprobs_come_with_the_first_token_that_counts(self, repaired: None) -> None:
        """Workers make them once; upstream's assertion ends the engine."""
        engine = self.engine()
        engine.add_request(self.PLAN)
        engine.step()
        assert engine._in_flight[0][1].sampled_token_ids == [self.PLAN.expected_output()[:1]]
        engine._in_flight[0][1].prompt_logprobs_dict["r"] = "logprobs"
        assert engine.reset_prefix_cache(reset_running_requests=True)
        update, sent = engine.scheduler.update_from_output, []

        def update_from_output(*args: Any) -> Any:
            outputs = update(*args)
            sent.extend(each for one in outputs.values() for each in one.outputs)
            return outputs

        engine.scheduler.update_from_output = update_from_output
        assert self.decode(engine) == self.PLAN.expected_output()
        assert [each.new_prompt_logprobs_tensors for each in sent[:2]] == ["logprobs", None]

    def test_a_scheduler_that_processes_outputs_itself_is_left_alone(self, repaired: None) -> None:
        class Own(AsyncScheduler):
            def update_from_output(self, *args: Any) -> Any:
                return AsyncScheduler.update_from_output(self, *args)

        engine = self.engine()
        engine.scheduler.__class__ = Own
        request = engine.add_request(self.PLAN)
        while request.num_output_placeholders < 2:
            engine.step()
        num_placeholders = request.num_output_placeholders
        assert engine.reset_prefix_cache(reset_running_requests=True)
        assert request.async_tokens_to_discard == num_placeholders


class TestPreemptedInStep:
    """A request is preempted, by priority, in the step that has scheduled it."""

    def workloads(self) -> Iterator[Workload]:
        for layout in LAYOUTS:
            for seed in PRIORITY_SEEDS:
                yield workload_by_priority(layout, seed)

    def test_random_runs_read_and_answer_right(self, repaired: None) -> None:
        found = failures(self.workloads())
        print(f"with all repairs: {dict(found)}")
        assert found["failed"] == 0
        assert found[IN_STEP] > len(PRIORITY_SEEDS)

    def test_stock_random_runs_do_not(self) -> None:
        with all_repairs(but=IN_STEP):
            found = failures(self.workloads())
        print(f"without {IN_STEP}: {dict(found)}")
        assert found["failed"] > len(PRIORITY_SEEDS)
