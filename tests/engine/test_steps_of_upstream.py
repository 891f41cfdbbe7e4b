# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which steps vLLM's own ``schedule`` plans. Replacing it in all steps changes no step.

The tests run vLLM's real scheduler with real pages, but no model. See ``test_connector_scheduler``.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, count, pairwise, product
from types import FunctionType, MethodType
from typing import Any

import pytest
from support.connector.engines import engine_of, fail_next, make_holes, plan_of
from support.connector.learning_engine import LearningEngine, learning_engine
from support.connector.offload_run import check_nothing_is_left, run_offloading, serve
from support.connector.offload_workloads import EngineKind, random_offload, tokens
from support.connector.paged_layouts import FULL, GEMMA, GPT_OSS, STATE_LAYOUTS, PagedLayout
from support.connector.simulated_engine import SimulatedEngine
from support.connector.step_clock import StepClock
from support.upstream_version import IS_SINCE_0_30
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.metrics.stats import PrefixCacheStats
from vllm.v1.request import RequestStatus

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.patches.connector import scheduler as patched_scheduler
from vllm_ascend_kvext.patches.connector.hole_rows import correct_hits
from vllm_ascend_kvext.patches.connector.scheduler import side_of
from vllm_ascend_kvext.patches.connector.step_parts import StepParts
from vllm_ascend_kvext.patches.segments import learned_requests
from vllm_ascend_kvext.patching.instance_methods import _Layer

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

PROMPT = tokens(random.Random(1), 400)
ONE, OTHER = (tuple(tokens(random.Random(name), 40)) for name in ("one", "other"))
NUM_CYCLES = 3
NUM_SEEDS = 3

by_layout = {"ids": lambda layout: layout.name}
sync_or_async = pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])


def is_upstreams(scheduler: Any) -> bool:
    """Whether a call of ``schedule`` directly calls the function in vLLM's file."""
    written = vars(Scheduler)["schedule"]
    assert type(written) is FunctionType and written.__module__ == Scheduler.__module__
    found = scheduler.schedule
    return type(found) is MethodType and found.__func__ is written


def watch_planning(engine: SimulatedEngine) -> list[bool]:
    """Record for each step from now on whether vLLM's own function plans it."""
    planned: list[bool] = []
    step = engine.step

    def watched() -> Any:
        planned.append(is_upstreams(engine.scheduler))
        return step()

    engine.step = watched  # type: ignore[method-assign]
    return planned


def num_times_off(planned: list[bool]) -> int:
    """How often another function was removed again."""
    return sum(not before and after for before, after in pairwise(planned))


@sync_or_async
@pytest.mark.parametrize("layout", [FULL, GEMMA, GPT_OSS, STATE_LAYOUTS[0]], **by_layout)
def test_upstreams_function_plans_every_step_of_an_engine_without_holes(
    layout: PagedLayout, is_async: bool
) -> None:
    prompts = [tokens(random.Random(number), 6 * layout.unit_tokens + 9) for number in range(3)]
    with engine_of(layout, is_async=is_async) as engine:
        planned = watch_planning(engine)
        for turn in ("first", "second"):
            plans = [plan_of(f"{turn}-{n}", prompt) for n, prompt in enumerate(prompts)]
            serve(engine, *plans)
            assert engine.reset(reset_running_requests=turn == "second")
        counts = engine.workers[0].transfers.counts
        assert counts["loads"] == len(prompts) and counts["stores"]
        assert len(planned) > 8 and all(planned)
        check_nothing_is_left(engine)


# Another function is in place while there are holes, and no longer.


def serve_with_a_hole(engine: SimulatedEngine, name: str) -> None:
    make_holes(engine, (64, 192))
    serve(engine, plan_of(name, PROMPT))


def begin_with_a_hole(engine: SimulatedEngine, name: str, is_loaded: bool) -> None:
    make_holes(engine, (64, 192))
    engine.add_request(plan_of(name, PROMPT))
    while not engine.side.holes or (is_loaded and engine.held.loading_ids):
        engine.step()


def abort(engine: SimulatedEngine, name: str, is_loaded: bool) -> None:
    begin_with_a_hole(engine, name, is_loaded)
    assert engine.abort(name)
    serve(engine)


def preempt(engine: SimulatedEngine, name: str) -> None:
    begin_with_a_hole(engine, name, is_loaded=True)
    request = engine.scheduler.requests[name]
    while request.status != RequestStatus.RUNNING:
        engine.step()
    make_holes(engine, (64, 192))
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, 0.0)
    serve(engine)


def fail(engine: SimulatedEngine, name: str, has_hole: bool) -> None:
    """Let a part of the load fail. If there is a hole, let all of the load fail."""
    if has_hole:
        make_holes(engine, (64, 192))
    fail_next(engine, *(range(1, 40) if has_hole else (1, 3)))
    serve(engine, plan_of(name, PROMPT))
    fail_next(engine)
    serve(engine, plan_of(f"{name}, to store it again", PROMPT))


def reset(engine: SimulatedEngine, name: str) -> None:
    begin_with_a_hole(engine, name, is_loaded=True)
    assert engine.reset(reset_running_requests=True)
    serve(engine)


WAYS: dict[str, Callable[[SimulatedEngine, str], None]] = {
    "served": serve_with_a_hole,
    "aborted while it loads": partial(abort, is_loaded=False),
    "aborted when it has loaded": partial(abort, is_loaded=True),
    "preempted": preempt,
    "a part of its load fails": partial(fail, has_hole=False),
    "its load fails": partial(fail, has_hole=True),
    "reset": reset,
}


def num_layers() -> int:
    gc.collect()
    return sum(type(each) is _Layer for each in gc.get_objects())


@sync_or_async
@pytest.mark.parametrize("way", WAYS)
def test_another_function_is_there_for_as_long_as_holes_are(way: str, is_async: bool) -> None:
    if way == "preempted" and is_async:
        pytest.skip("between two calls of step, an asynchronous step is in flight")
    with engine_of(FULL, is_async=is_async, max_num_batched_tokens=64) as engine:
        serve(engine, plan_of("first", PROMPT))
        assert engine.reset()
        WAYS[way](engine, "before")
        attributes, layers = vars(engine.scheduler).keys(), num_layers()
        assert "schedule" not in attributes
        planned = watch_planning(engine)
        for number in range(NUM_CYCLES):
            before = num_times_off(planned)
            WAYS[way](engine, f"again-{number}")
            serve(engine, plan_of(f"short-{number}", PROMPT[:20]))
            assert is_upstreams(engine.scheduler)
            assert num_times_off(planned) > before
            check_nothing_is_left(engine)
            assert not engine.side.row_ids
        assert vars(engine.scheduler).keys() == attributes
        assert num_layers() == layers, "removed functions still exist"


def test_the_function_is_vllms_in_the_step_after_the_workers_know_the_end_of_the_last_row() -> None:
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        make_holes(engine, (64, 192))
        engine.add_request(plan_of("second", PROMPT, max_tokens=9))
        planned = watch_planning(engine)
        row_ids: list[list[str]] = []
        told: list[list[str]] = []
        while engine.scheduler.requests:
            step = engine.step()
            row_ids.append(
                [each.request_id for each in step.scheduled if "hole" in each.request_id]
            )
            told.append([request_id for request_id in step.finished if "hole" in request_id])
        with_rows = [number for number, found in enumerate(row_ids) if found]
        last = with_rows[-1]
        assert told[last + 1] == row_ids[last] and not any(told[last + 2 :])
        assert sorted(chain(*told)) == sorted(chain(*row_ids)), "each end must be told once"
        born = planned.index(False)
        assert planned == [number not in range(born, last + 2) for number in range(len(planned))]
        assert born <= with_rows[0]
        serve(engine)


@sync_or_async
def test_holes_are_no_hits_from_the_step_on_in_which_hits_are_counted(is_async: bool) -> None:
    """Statistics of that step are sent before the next step is planned."""
    with engine_of(FULL, is_async=is_async) as engine:
        serve(engine, plan_of("first", PROMPT))
        make_holes(engine, (64, 192))
        scheduler = engine.scheduler
        scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        engine.add_request(plan_of("second", PROMPT))
        scheduler.schedule()
        assert engine.held.hole_ids == {"second"} and engine.held.loading_ids == {"second"}
        last_boundary = (len(PROMPT) - 1) // FULL.unit_tokens * FULL.unit_tokens
        hit_tokens = last_boundary - (192 - 64)
        assert scheduler.connector_prefix_cache_stats.hits == hit_tokens
        assert scheduler.requests["second"].prefill_stats.num_external_cached_tokens == hit_tokens


# Learning.


@sync_or_async
def test_another_function_is_there_while_segments_are_learned(is_async: bool) -> None:
    with learning_engine(is_async=is_async) as engine:
        planned = watch_planning(engine)
        engine.answer(tokens(random.Random("seen once"), 40))
        assert planned and all(planned)
        for number, document in enumerate((ONE, OTHER)):
            engine.show_twice(document)
            engine.serve()
            assert len(engine.own_plans) == number + 1
            engine.answer(tokens(random.Random(number), 40))
            assert is_upstreams(engine.scheduler)
            assert num_times_off(planned) == number + 1


# The results equal those of an engine in which another function is always in place.


_take_new_holes = HoleQueue.take_new_holes


class StandingParts(StepParts):
    """Another function is in place in every step. Hits are corrected after each step."""

    def add(self, part: Any) -> None:
        super().add(part)
        self.put_on()

    def schedule(self, wrapped: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        for part in reversed(self._parts):
            wrapped = partial(part.schedule, wrapped)
        output = wrapped(*args, **kwargs)
        for new in _take_new_holes(side_of(self._scheduler).holes):
            correct_hits(self._scheduler, not IS_SINCE_0_30, new)
        return output


@pytest.fixture
def standing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From the call on, make engines with `StandingParts`."""

    def stand() -> None:
        monkeypatch.setattr(patched_scheduler, "StepParts", StandingParts)
        monkeypatch.setattr(HoleQueue, "take_new_holes", lambda holes: [])

    return stand


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The steps, and the counts of hits after each step."""
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # All engines hash blocks alike.
    found: list[Any] = []
    shake_hands, record = SimulatedEngine._shake_hands, SimulatedEngine._record

    def begin(engine: SimulatedEngine) -> None:
        shake_hands(engine)
        StepClock(engine)
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()

    def note(engine: SimulatedEngine, output: Any, results: dict[int, Any]) -> Any:
        step = record(engine, output, results)
        of_requests = [
            (each.request_id, repr(each.prefill_stats))
            for of_client in results.values()
            for each in of_client.outputs
        ]
        waiting = [
            (request_id, repr(request.prefill_stats))
            for request_id, request in engine.scheduler.requests.items()
        ]
        counted = repr(engine.scheduler.connector_prefix_cache_stats)
        found.append((step, of_requests, waiting, counted))
        return step

    monkeypatch.setattr(SimulatedEngine, "_shake_hands", begin)
    monkeypatch.setattr(SimulatedEngine, "_record", note)
    yield found


@pytest.mark.parametrize("layout", [FULL, GEMMA, GPT_OSS], **by_layout)
def test_steps_and_counted_hits_are_those_of_an_engine_that_always_has_another_function(
    layout: PagedLayout,
    standing: Callable[[], None],
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    runs = []
    num_hole_tokens = 0
    for is_standing in (False, True):
        if is_standing:
            standing()
        for kind, seed in product(EngineKind, range(NUM_SEEDS)):
            workload = random_offload(layout, seed, 20, kind)._replace(eviction_share=0.5)
            num_hole_tokens += run_offloading(workload).counts["hole tokens"]
        runs.append(list(seen))
        seen.clear()
    assert len(runs[0]) > 500 and num_hole_tokens > 50
    for number, (found, expected) in enumerate(zip(*runs, strict=True)):
        assert found == expected, f"step {number}"


@sync_or_async
def test_segments_are_learned_in_the_same_steps(
    is_async: bool,
    standing: Callable[[], None],
    seen: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """This also holds for segments that a lookup asks for, or that a reset lets it try again."""

    def learn(engine: LearningEngine) -> None:
        for document in (ONE, OTHER, ONE):
            engine.show_twice(document)
        engine.queue(tuple(tokens(random.Random("third"), 60)))
        engine.step()
        engine.reset(reset_running_requests=True)
        engine.serve()
        engine.answer(ONE, OTHER)

    runs = []
    for is_standing in (False, True):
        if is_standing:
            standing()
        numbers = count()
        monkeypatch.setattr(
            learned_requests,
            "uuid4",
            lambda numbers=numbers: type("Number", (), {"hex": str(next(numbers))}),
        )
        with learning_engine(is_async=is_async, max_num_batched_tokens=32) as engine:
            learn(engine)
            assert len(engine.own_plans) > 1
        runs.append(list(seen))
        seen.clear()
    for number, (found, expected) in enumerate(zip(*runs, strict=True)):
        assert found == expected, f"step {number}"
