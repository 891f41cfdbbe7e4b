# SPDX-License-Identifier: Apache-2.0
"""Holes beside other requests, resets and aborts: what a review of them has found.

On vLLM's real scheduler, with real pages and without a model: see ``test_connector_scheduler``.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from support.connector.engines import engine_of, make_holes, plan_of
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.options import Drafter
from support.scheduler.workload import RequestPlan
from vllm.v1.core.sched.interface import PauseState

from vllm_ascend_kvext.patches.connector import scheduler
from vllm_ascend_kvext.upstream_state import RequestState

PROMPT_TOKENS = 400


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@contextmanager
def engine_with_holes(
    *holes: tuple[int, int], **options: Any
) -> Iterator[tuple[SimulatedEngine, RequestPlan]]:
    """A prompt is stored but for some tokens; with the request that asks for it again."""
    prompt = tokens(random.Random(1), PROMPT_TOKENS)
    with engine_of(FULL, **options) as engine:
        serve(engine, plan_of("first", prompt))
        make_holes(engine, *holes)
        yield engine, plan_of("second", prompt)


def step_until_only_a_hole_is_missing(engine: SimulatedEngine) -> None:
    while not engine.side.holes or engine.held.loading_ids:
        engine.step()


def test_a_load_writes_no_rows_of_others_into_a_hole_that_is_computed_beside_it() -> None:
    """The entry of another prompt has a row of this one too, but the run of it is too short."""
    rng = random.Random(7)
    prompt, other = tokens(rng, PROMPT_TOKENS), tokens(rng, PROMPT_TOKENS)
    chunk = offloading(FULL, chunk_tokens=128)
    with engine_of(FULL, offloading=chunk) as engine:
        for number, stored in enumerate(
            (prompt[:65], prompt[:80] + other[80:129], prompt[:113], prompt)
        ):
            serve(engine, plan_of(f"first-{number}", stored, max_tokens=1))
        pieces = sorted(entry.piece[1:] for entry in engine.entries)
        assert pieces[:4] == [(0, 64), (64, 128), (80, 112), (112, 128)]
        engine.evict(lambda entry: entry.piece[1:] in [(0, 64), (80, 112)])
        engine.add_request(plan_of("second", prompt))
        (worker,) = engine.workers
        with mock.patch.object(worker.transfers, "end_some"):
            engine.step()
            engine.step()
        assert engine.side.counters.hole_tokens == 112
        serve(engine)


@pytest.mark.parametrize("hole_reuse", [False, True], ids=["no-holes", "holes"])
def test_a_request_that_has_loaded_does_not_wait_for_itself(hole_reuse: bool) -> None:
    """A reset takes its blocks before it runs: then it finds its own load to be expected."""
    prompt = tokens(random.Random(8), PROMPT_TOKENS)
    options = offloading(FULL, hole_reuse=hole_reuse)
    with engine_of(FULL, offloading=options, caching=True) as engine:
        serve(engine, plan_of("first", prompt))
        assert engine.reset()
        engine.add_request(plan_of("second", prompt, max_tokens=20))
        while "second" not in engine.scheduler.finished_recving_kv_req_ids:
            engine.step()
        assert engine.reset(reset_running_requests=True)
        for _ in range(100):
            if engine.has_work():
                engine.step()
        assert not engine.has_work()


@pytest.mark.parametrize("is_paused", [False, True], ids=["unpaused", "paused"])
def test_a_request_that_waits_for_its_holes_is_restarted_by_a_reset(is_paused: bool) -> None:
    """Its load has ended: nobody but a step of the scheduler writes to its blocks."""
    with engine_with_holes((64, 192), max_num_batched_tokens=16) as (engine, second):
        engine.add_request(second)
        step_until_only_a_hole_is_missing(engine)
        if is_paused:
            # As ``pause_generation("keep")``: caches are reset once there is nothing to do.
            engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while engine.has_work():
                engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        found = [token for _, tokens, _ in outputs_of(engine) for token in tokens]
        assert found == second.expected_output()
        check_nothing_is_left(engine)


def test_the_prefix_cache_can_be_reset_after_an_abort_of_a_request_with_holes() -> None:
    with engine_with_holes((64, 192), max_num_batched_tokens=16) as (engine, second):
        engine.add_request(second)
        step_until_only_a_hole_is_missing(engine)
        engine.abort("second")
        assert engine.reset()
        check_nothing_is_left(engine)


def test_no_request_has_the_id_of_a_row() -> None:
    with engine_with_holes((64, 192)) as (engine, second):
        other = plan_of("second-hole-1", tokens(random.Random(3), 20), max_tokens=40)
        serve(engine, other, second)


def test_requests_decode_beside_holes_and_the_prompt_of_another() -> None:
    rng = random.Random(4)
    small = {"max_num_batched_tokens": 64, "long_prefill_tokens": 24}
    with engine_with_holes((64, 320), **small) as (engine, second):
        engine.add_request(plan_of("long", tokens(rng, 800)))
        engine.add_request(plan_of("decoding", tokens(rng, 10), max_tokens=30))
        engine.step()
        engine.add_request(second)
        steps = list(scheduled_until_end_of(engine, "decoding"))
        assert all("decoding" in step for step in steps), steps


def test_requests_with_drafts_decode_beside_holes() -> None:
    rng = random.Random(5)
    drafting = {"drafter": Drafter.NGRAM, "num_draft_tokens": 3, "max_num_batched_tokens": 64}
    with engine_with_holes((64, 320), **drafting) as (engine, second):
        for number in range(4):
            engine.add_request(plan_of(f"decoding-{number}", tokens(rng, 10), max_tokens=40))
        engine.step()
        engine.add_request(second)
        steps = list(scheduled_until_end_of(engine, "second"))
        left_out = [
            step
            for step in steps
            for number in range(4)
            if f"decoding-{number}" in engine.scheduler.requests
            and f"decoding-{number}" not in step
        ]
        assert not left_out, left_out


def test_the_first_request_answers_before_the_holes_of_all_are_computed() -> None:
    rng = random.Random(6)
    prompts = [tokens(rng, PROMPT_TOKENS) for _ in range(8)]
    with engine_of(FULL, max_num_batched_tokens=128) as engine:
        serve(engine, *(plan_of(f"first-{n}", prompt) for n, prompt in enumerate(prompts)))
        make_holes(engine, (64, 192))
        for number, prompt in enumerate(prompts):
            engine.add_request(plan_of(f"second-{number}", prompt, max_tokens=1))
        steps: dict[str, int] = {}
        for number in range(100):
            for request_id, *_ in engine.step().outputs:
                steps.setdefault(request_id, number)
        # A step has room for one hole, or for the ends of eight.
        assert steps["second-0"] < steps["second-7"] / 2, steps


def scheduled_until_end_of(engine: SimulatedEngine, request_id: str) -> Iterator[dict[str, int]]:
    """Tokens by request or row, step by step, while a request is there."""
    while request_id in engine.scheduler.requests:
        step = engine.step()
        yield {request.request_id: request.num_tokens for request in step.scheduled}


def outputs_of(engine: SimulatedEngine) -> Iterator[Any]:
    while engine.has_work():
        yield from engine.step().outputs


def test_steps_without_holes_do_not_count_what_is_running() -> None:
    """That takes time in proportion to the requests."""
    prompt = tokens(random.Random(9), PROMPT_TOKENS)
    with engine_of(FULL) as engine:
        with mock.patch.object(scheduler, "budget_of_holes", side_effect=AssertionError):
            serve(engine, plan_of("first", prompt))
            serve(engine, plan_of("second", prompt))
        make_holes(engine, (64, 192))
        serve(engine, plan_of("third", prompt))
        assert engine.side.counters.hole_tokens


@pytest.mark.parametrize("looks_at_prompts", [False, True], ids=["copied", "looked at"])
def test_tokens_of_a_request_are_read_once_for_all_its_rows(looks_at_prompts: bool) -> None:
    """Of many steps; the tokens themselves are compared by the model runner of the harness."""
    found: list[Any] = []
    read: list[Any] = []
    holes = (64, 192), (256, 320)
    with engine_with_holes(*holes, max_num_batched_tokens=48) as (engine, second):
        schedule = engine.scheduler.schedule

        def watch() -> Any:
            output = schedule()
            new = output.scheduled_new_reqs
            found.extend(each.prompt_token_ids for each in new if "-hole-" in each.req_id)
            if request := engine.scheduler.requests.get("second"):
                read.append(RequestState.of(request).token_ids)
            return output

        engine.scheduler.schedule = watch  # type: ignore[method-assign]
        of_model = type(engine.scheduler.vllm_config.model_config)
        with mock.patch.object(of_model, "uses_mrope", looks_at_prompts):
            serve(engine, second)
        assert len(found) > 3
        assert {type(each) for each in found} == {list if looks_at_prompts else array}
        assert len({id(each) for each in read if each is not None}) == (not looks_at_prompts)


def test_references_of_the_connector_are_no_common_prefix() -> None:
    """Cascade attention would read the blocks of one request for all of them."""
    rng = random.Random(10)
    with engine_of(FULL, caching=True) as engine:
        for name in ("first", "second"):
            engine.add_request(plan_of(name, tokens(rng, PROMPT_TOKENS), max_tokens=30))
        (worker,) = engine.workers
        count = engine.scheduler.kv_cache_manager.get_num_common_prefix_blocks
        with mock.patch.object(worker.transfers, "end_some"):
            while len(engine.scheduler.running) < 2 or not engine.side.num_references:
                engine.step()
            assert engine.scheduler.kv_cache_manager.coordinator.get_num_common_prefix_blocks(
                "first"
            ) != [0]
            assert count("first") == [0]
        serve(engine)
