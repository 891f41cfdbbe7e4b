# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Requests that keep their KV out of host memory, and requests that are told what was reused."""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.connector.engines import engine_of, fail_next, make_holes, plan_of
from support.connector.learning_engine import learning_engine
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GPT_OSS, LAYOUTS, STATE_LAYOUTS, PagedLayout
from support.connector.shared_objects import objects
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.workload import RequestPlan
from test_shared_tier import _equal_seeds, _patience, floor, sharing, weights
from vllm.sampling_params import SamplingParams

from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.segments.prompt_segments import STORE_KEY

__all__ = ["_equal_seeds", "_patience", "weights"]

pytestmark = pytest.mark.usefixtures("offloading_in_effect", "weights")

every_layout = pytest.mark.parametrize(
    "layout", LAYOUTS + STATE_LAYOUTS, ids=lambda layout: layout.name
)
KEPT_OUT = {"kvext_store": False}
EXPLAINED = {"kvext_explain": True}


def asked(request_id: str, prompt: list[int], max_tokens: int = 3, **extra: Any) -> RequestPlan:
    return replace(plan_of(request_id, prompt, max_tokens), extra_args=tuple(extra.items()))


def prompt_of(layout: PagedLayout, seed: object, num_units: int = 6) -> list[int]:
    return tokens(random.Random(str(seed)), num_units * layout.unit_tokens + 3)


def hit_tokens(engine: SimulatedEngine, *plans: RequestPlan) -> int:
    before = engine.side.counters.hit_tokens
    serve(engine, *plans)
    check_nothing_is_left(engine)
    return engine.side.counters.hit_tokens - before


# Requests that are not stored.


@every_layout
def test_nothing_of_it_is_stored_and_nothing_of_it_is_found(layout: PagedLayout) -> None:
    prompt = prompt_of(layout, 1)
    with engine_of(layout) as engine:
        assert hit_tokens(engine, asked("out", prompt, **KEPT_OUT)) == 0
        assert not engine.entries and not engine.side.counters.transfer_bytes["store"]
        assert hit_tokens(engine, asked("in", prompt)) == 0, (
            "the request was kept out, but its KV was found"
        )
        assert engine.entries
        assert hit_tokens(engine, asked("again", prompt)) > 0, "the control must hit"
        assert hit_tokens(engine, asked("reads", prompt, **KEPT_OUT)) > 0, (
            "a request that is kept out may still read"
        )


@every_layout
def test_what_it_answers_is_not_stored_behind_what_others_have_stored(layout: PagedLayout) -> None:
    prompt = prompt_of(layout, 1)
    with engine_of(layout) as engine:
        serve(engine, asked("in", prompt))
        entries = len(engine.entries)
        longer = [*prompt, *prompt_of(layout, 2)]
        serve(engine, asked("out", longer, 2 * layout.unit_tokens, **KEPT_OUT))
        assert len(engine.entries) == entries
        serve(engine, asked("in, too", longer))
        assert len(engine.entries) > entries, "the control must store"


def test_it_does_not_count_as_the_first_of_two_that_have_a_chunk() -> None:
    prompt = prompt_of(FULL, 1, 8)
    options = offloading(FULL, store_policy="second_touch")
    stored = {}
    for name, first in (("out", KEPT_OUT), ("in", {})):
        with engine_of(FULL, offloading=options) as engine:
            serve(engine, asked("first", [*prompt, *prompt_of(FULL, 2)], **first))
            before = len(engine.entries)
            serve(engine, asked("second", [*prompt, *prompt_of(FULL, 3)]))
            stored[name] = (before, len(engine.entries))
    assert stored["out"][0] == 0 < stored["in"][0]
    assert stored["out"][1] < stored["in"][1]


@pytest.mark.parametrize("extra", [KEPT_OUT, {}], ids=["out", "in"])
def test_its_pages_do_not_go_to_host_memory_when_it_is_preempted(extra: dict[str, Any]) -> None:
    plans = [asked(str(n), prompt_of(FULL, n), 60, **extra) for n in range(6)]
    with engine_of(FULL, num_blocks=40, max_num_seqs=6) as engine:
        serve(engine, *plans)
        assert sum(request.num_preemptions for request in engine.requests.values()) > 0
        moved = engine.side.counters.transfer_bytes["store"]
        assert (moved == 0) is bool(extra)
        assert (engine.side.counters.swapped_requests == 0) is bool(extra)


@pytest.mark.parametrize("layout", STATE_LAYOUTS, ids=lambda layout: layout.name)
def test_its_steps_do_not_end_where_a_state_would_be_stored(layout: PagedLayout) -> None:
    prompt = prompt_of(layout, 1, 9)
    num_steps = {}
    for name, extra in (("out", KEPT_OUT), ("in", {})):
        with engine_of(layout, max_num_batched_tokens=4096) as engine:
            step, steps = engine.step, []
            engine.step = lambda step=step, steps=steps: steps.append(1) or step()  # type: ignore[method-assign]
            serve(engine, asked("a", prompt, 1, **extra))
            num_steps[name] = len(steps)
    assert num_steps["out"] <= num_steps["in"]


def test_it_does_not_reach_a_shared_tier(tmp_path: Path) -> None:
    prompt = prompt_of(FULL, 1)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        for number in range(2):
            serve(engine, asked(f"out {number}", prompt, **KEPT_OUT))
        assert not objects(tmp_path)
        serve(engine, asked("in", prompt))
    assert objects(tmp_path), "the control must put objects"


@pytest.mark.parametrize(
    ("value", "is_stored"),
    [
        *((value, False) for value in (False, "false", " False ", 0, "0", 0.0)),
        *((value, True) for value in (True, "true", 1, None)),
        *((value, False) for value in ("no", [False], {}, 2, "")),
    ],
)
def test_endpoints_write_truth_values_in_many_ways(
    value: Any, is_stored: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A value that is neither true nor false counts as false: nothing is stored.

    The log says so.
    """
    with engine_of(FULL) as engine, caplog.at_level("WARNING"):
        serve(engine, asked("a", prompt_of(FULL, 1), kvext_store=value))
        assert bool(engine.entries) is is_stored
    is_wrong = "kvext_store: expected true or false, found" in caplog.text
    assert is_wrong is (value in ("no", [False], {}, 2, ""))


@pytest.mark.parametrize("turns", [(KEPT_OUT, {}), ({}, KEPT_OUT), ({}, {})], ids=str)
def test_a_turn_of_a_session_may_keep_out_what_follows(turns: Any) -> None:
    """vLLM gives a session the parameters of each turn.

    KV that was kept out is not stored later.
    """
    first_args, second_args = turns
    prompt = prompt_of(GPT_OSS, 1, 8)
    with engine_of(GPT_OSS) as engine:
        request = engine.add_request(asked("session", prompt, 60, **first_args))
        while not request.num_output_tokens:
            engine.step()
        update = SimpleNamespace(
            prompt_token_ids=prompt_of(FULL, 2, 20),
            mm_features=None,
            arrival_time=0.0,
            sampling_params=SamplingParams(max_tokens=60, extra_args=second_args),
        )
        engine.scheduler._update_request_as_session(request, update)
        is_kept_out = bool(first_args or second_args)
        assert engine.side._may_store(request) is not is_kept_out
        assert (engine.held.num_referenced_blocks > 0) is not is_kept_out
        engine.abort("session")


def test_no_segment_is_learned_from_it() -> None:
    document = tuple(tokens(random.Random("document"), 60))
    with learning_engine() as engine:
        for _ in range(3):
            engine.ask(document, extra_args=KEPT_OUT)
            engine.step_until(lambda: len(engine.answers) == engine.num_asked)
        assert not engine.own_plans
        engine.show_twice(document)
        assert engine.learned == [document], "the control must be learned"


def test_it_stores_no_segment(caplog: pytest.LogCaptureFixture) -> None:
    document = tuple(tokens(random.Random("document"), 60))
    with learning_engine(segments={"learn": False}) as engine, caplog.at_level("WARNING"):
        args = ((STORE_KEY, True), *KEPT_OUT.items())
        engine.send(document, 1, extra_args=args)
        engine.serve()
        assert not engine.entries
    assert f"{STORE_KEY}: expected a request whose KV may be stored" in caplog.text


# The fields of responses.


def reported(engine: SimulatedEngine, plan: RequestPlan) -> dict[str, Any]:
    """The fields of the response of a request."""
    found: list[Any] = []
    finish = engine.scheduler._connector_finished

    def watched(request: Any) -> Any:
        delays, params = finish(request)
        found.append(params)
        return delays, params

    engine.scheduler._connector_finished = watched
    serve(engine, plan)
    engine.scheduler._connector_finished = finish
    (params,) = found
    return {} if params is None else params["kvext_report"]


def test_a_response_says_what_was_reused_and_why_no_more(caplog: pytest.LogCaptureFixture) -> None:
    prompt = prompt_of(FULL, 1, 40)
    unit_tokens = FULL.unit_tokens
    with engine_of(FULL) as engine, caplog.at_level(logging.DEBUG, "vllm.ascend_kvext.connector"):
        first = reported(engine, asked("first", prompt, **EXPLAINED))
        assert (first["device_tokens"], first["host_tokens"]) == (0, 0)
        assert first["shortfall"] == "never_stored" and first["decision"] == "nothing_found"
        second = reported(engine, asked("second", prompt, **EXPLAINED))
        assert second["host_tokens"] == floor(engine, len(prompt) - 1)
        assert (second["decision"], second["prompt_tokens"]) == ("loaded", len(prompt))
        make_holes(engine, (10 * unit_tokens, 14 * unit_tokens))
        third = reported(engine, asked("third", prompt, **EXPLAINED))
        assert third["hole_tokens"] > 0 and third["holes"] == 1
        assert third["host_tokens"] == second["host_tokens"] - third["hole_tokens"]
        assert third["shortfall"] == "evicted"
        assert reported(engine, asked("fourth", prompt)) == {}, (
            "the request has not asked for fields"
        )
    lines = [each for each in caplog.messages if "decision=" in each]
    assert [line.split(":")[0] for line in lines] == [
        f"Request {name}" for name in ("first", "second", "third", "fourth")
    ]
    assert f"host_tokens={second['host_tokens']}" in lines[1]


def test_what_the_device_has_is_told_apart() -> None:
    prompt = prompt_of(FULL, 1, 8)
    with engine_of(FULL, caching=True) as engine:
        serve(engine, asked("first", prompt))
        found = reported(engine, asked("second", prompt, **EXPLAINED))
        assert found["device_tokens"] > 0 and found["host_tokens"] == 0
        engine.reset()
        found = reported(engine, asked("third", prompt, **EXPLAINED))
        assert found["device_tokens"] == 0 and found["host_tokens"] > 0


def test_a_load_that_would_take_longer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = prompt_of(FULL, 1, 8)
    with engine_of(FULL, offloading=offloading(FULL, load_if_slower=False)) as engine:
        serve(engine, asked("first", prompt))
        monkeypatch.setattr(TransferCost, "is_slower_than_computing", lambda *_: True)
        found = reported(engine, asked("second", prompt, **EXPLAINED))
        assert (found["decision"], found["host_tokens"]) == ("slower", 0)


def test_what_comes_from_a_shared_tier_is_told(tmp_path: Path) -> None:
    prompt = prompt_of(FULL, 1, 8)
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        serve(engine, asked("first", prompt))
    with engine_of(FULL, offloading=sharing(FULL, tmp_path)) as engine:
        found = reported(engine, asked("second", prompt, **EXPLAINED))
        assert found["tier_tokens"] >= found["host_tokens"] > 0
        found = reported(engine, asked("third", prompt, **EXPLAINED))
        assert found["tier_tokens"] == 0 < found["host_tokens"]


def test_a_load_that_has_failed_is_told() -> None:
    """vLLM computes what follows the device's hit. It does not look the request up again."""
    prompt = prompt_of(FULL, 1, 40)
    with engine_of(FULL, caching=True) as engine:
        serve(engine, asked("first", prompt))
        engine.reset()
        serve(engine, asked("begins alike", prompt[: 4 * FULL.unit_tokens + 1]))
        fail_next(engine, *range(1, 100))
        found = reported(engine, asked("second", prompt, **EXPLAINED))
        assert found["device_tokens"] > 0
        assert (found["decision"], found["host_tokens"]) == ("failed_loads", 0)


def test_what_a_load_fails_to_bring_is_told() -> None:
    prompt = prompt_of(FULL, 1, 40)
    with engine_of(FULL) as engine:
        serve(engine, asked("first", prompt))
        fail_next(engine, 1, 3)
        before = engine.side.counters.hit_tokens
        found = reported(engine, asked("second", prompt, **EXPLAINED))
        assert engine.side.counters.hole_tokens > 0, (
            "no hole was computed, so the case did not occur"
        )
        assert found["host_tokens"] == engine.side.counters.hit_tokens - before
        assert found["hole_tokens"] == engine.side.counters.hole_tokens
        assert (found["decision"], found["holes"]) == ("loaded", 1)
