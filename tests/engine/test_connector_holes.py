# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Chunks that are missing in the host tier are computed, and what lies behind them is loaded.

The tests run vLLM's real scheduler with real pages, but no model. See ``test_connector_scheduler``.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from pytest_mock import MockerFixture
from support.connector.engines import (
    engine_of,
    make_holes,
    plan_of,
    watch_computed,
    zeroing,
)
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_EAGLE,
    FULL,
    FULL_EAGLE,
    GPT_OSS,
    LAYOUTS,
    TWO_FULL,
    TWO_WINDOWS,
    WINDOW,
    PagedLayout,
)
from support.connector.simulated_engine import SimulatedEngine
from support.scenarios.engine import watch
from support.scheduler.options import Drafter
from vllm.config import SpeculativeConfig
from vllm.v1.core.sched.interface import PauseState

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.patches.connector import hole_steps, scheduler
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.upstream_state import RequestState

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

PROMPT = tokens(random.Random(1), 400)
SECOND = plan_of("second", PROMPT)
WITHOUT_ROWS = (WINDOW, TWO_WINDOWS)
HYBRIDS = tuple(
    layout for layout in LAYOUTS if layout not in (FULL, TWO_FULL, *WITHOUT_ROWS, DEEPSEEK_V4_EAGLE)
)
"""The layouts whose holes read windows, too."""

by_layout = {"ids": lambda layout: layout.name}


@contextmanager
def engine_with_holes(*holes: tuple[int, int], **options: Any) -> Iterator[SimulatedEngine]:
    """Store `PROMPT` without some tokens."""
    with engine_of(FULL, **options) as engine:
        serve(engine, plan_of("first", PROMPT))
        assert engine.reset()
        make_holes(engine, *holes)
        yield engine
        serve(engine)
        check_nothing_is_left(engine)


def computed_holes(computed: dict[str, list[tuple[int, int]]]) -> list[tuple[int, int]]:
    """The tokens of the watched requests that steps have computed as holes."""
    found: list[tuple[int, int]] = []
    for first, end in sorted(
        run for row, runs in computed.items() if "hole" in row for run in runs
    ):
        if found and found[-1][1] == first:
            first = found.pop()[0]
        found.append((first, end))
    return found


HOLES = {
    "at the beginning": ([(0, 32)], [(0, 32)]),
    "in the middle": ([(160, 192)], [(160, 192)]),
    "several": ([(64, 96), (160, 192), (288, 320)], [(64, 96), (160, 192), (288, 320)]),
    "adjacent": ([(64, 96), (96, 128)], [(64, 128)]),
    "before a short run": ([(64, 96), (128, 160)], [(64, 160)]),
    "before the last chunk": ([(352, 384)], []),
    "at the end": ([(384, 400)], []),
    "larger than a step": ([(32, 320)], [(32, 320)]),
}
"""The missing tokens, and the number of tokens that are computed before the request continues."""


@pytest.mark.parametrize("caching", [False, True], ids=["host", "both"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("name", HOLES)
def test_only_holes_and_the_end_are_computed(name: str, is_async: bool, caching: bool) -> None:
    missing, holes = HOLES[name]
    with engine_with_holes(*missing, is_async=is_async, caching=caching) as engine:
        computed = watch_computed(engine)
        serve(engine, SECOND)
        assert computed_holes(computed) == holes
        last_boundary = (len(PROMPT) - 1) // FULL.unit_tokens * FULL.unit_tokens
        assert computed["second"][0][0] == (last_boundary if holes else missing[0][0])
        assert engine.side.counters.hole_tokens == sum(end - first for first, end in holes)


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("num_tokens", [48, 10_000], ids=["small steps", "one step"])
@pytest.mark.parametrize("layout", HYBRIDS, **by_layout)
def test_hole_begins_at_the_last_tails_before_what_is_missing(
    layout: PagedLayout, num_tokens: int, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ends of three turns have tails. Rows of the second turn are missing."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    with engine_of(layout, max_num_batched_tokens=num_tokens, is_async=is_async) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        prompt = tokens(random.Random(layout.name), 6 * chunk_tokens)
        for num_chunks in (2, 4, 6):
            turn = prompt[: num_chunks * chunk_tokens]
            serve(engine, plan_of(f"turn-{num_chunks}", turn, max_tokens=1))
        assert engine.reset()
        missing = (3 * chunk_tokens, 4 * chunk_tokens)
        make_holes(engine, missing)
        tails = [e.piece.end_tokens for e in engine.entries if e.piece.kind is Kind.TAILS]
        computed = watch_computed(engine)
        serve(engine, plan_of("last", [*prompt, *tokens(random.Random(1), 20)]))
        first_tokens = max(tokens for tokens in tails if tokens <= missing[0])
        assert first_tokens
        assert computed_holes(computed) == [(first_tokens, missing[1])]
        assert computed["last"][0][0] == max(tails)
        check_nothing_is_left(engine)


@pytest.mark.vllm(">=0.30")
def test_blocks_that_only_a_hole_has_are_zeroed_as_others_are(
    mocker: MockerFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If caches have different dtypes, old bytes of another group may be NaN in this one."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    with zeroing(), engine_of(GPT_OSS) as engine:
        chunk_tokens = engine.tier.geometry.chunk_tokens
        prompt = tokens(random.Random(3), 6 * chunk_tokens)
        for num_chunks in (2, 4, 6):
            turn = prompt[: num_chunks * chunk_tokens]
            serve(engine, plan_of(f"turn-{num_chunks}", turn, max_tokens=1))
        make_holes(engine, (3 * chunk_tokens, 4 * chunk_tokens))
        allocated = mocker.spy(BlockReferences, "allocate")
        lacking: list[int] = []

        def look(step: Any) -> None:
            new = {block.block_id for block in allocated.spy_return or ()}
            lacking.extend(new - set(step.new_block_ids_to_zero or ()))
            allocated.spy_return = None

        watch(engine.scheduler, "schedule", look)
        serve(engine, plan_of("last", [*prompt, *tokens(random.Random(1), 20)]))
        assert allocated.call_count and not lacking


@pytest.mark.parametrize("layout", [WINDOW, DEEPSEEK_V4_EAGLE], **by_layout)
def test_models_without_rows_or_with_drafts_and_windows_stop_at_the_first_hole(
    layout: PagedLayout,
) -> None:
    with engine_of(layout) as engine:
        assert not engine.side.computes_holes


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_drafts_behind_a_hole_are_those_of_nobody(is_async: bool) -> None:
    """Workers draft behind rows of holes, too. The request itself begins behind its holes."""
    options = {"drafter": Drafter.EAGLE, "num_draft_tokens": 3}
    with engine_of(FULL_EAGLE, is_async=is_async, **options) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=20))
        make_holes(engine, (64, 96), (160, 192))
        computed = watch_computed(engine)
        serve(engine, replace(SECOND, max_tokens=20))
        assert computed_holes(computed) == [(64, 96), (160, 192)]
        check_nothing_is_left(engine)


@pytest.mark.parametrize(
    ("num_draft_tokens", "num_prefill_lookahead", "num_slots", "reason"),
    [
        (FULL.unit_tokens, 1, 0, None),
        (FULL.unit_tokens + 1, 1, 0, f"{FULL.unit_tokens + 1} places for drafts"),
        (3, 2, 0, "several MTP modules"),
        (3, 1, 1, "a model of its own"),
    ],
)
def test_holes_beside_draft_layers_are_refused_with_a_reason(
    num_draft_tokens: int,
    num_prefill_lookahead: int,
    num_slots: int,
    reason: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        scheduler, "_prefill_lookahead_tokens", lambda upstream: num_prefill_lookahead
    )
    monkeypatch.setattr(SpeculativeConfig, "max_num_new_slots_for_drafting", num_slots)
    options = {"drafter": Drafter.EAGLE, "num_draft_tokens": num_draft_tokens}
    with engine_of(FULL_EAGLE, **options) as engine:
        assert engine.side.computes_holes is (reason is None)
    assert reason is None or reason in caplog.text


def test_adapters_stop_at_the_first_hole() -> None:
    with engine_of(FULL) as engine:
        serve(engine, replace(plan_of("first", PROMPT), adapter="adapter-0"))
        make_holes(engine, (64, 96))
        serve(engine, replace(SECOND, adapter="adapter-0"))
        assert engine.side.counters.hole_tokens == 0
        assert engine.side.counters.hit_tokens == 64


# Holes beside other requests, resets and aborts.


def step_until_only_a_hole_is_missing(engine: SimulatedEngine) -> None:
    engine.add_request(SECOND)
    while not engine.side.holes or engine.held.loading_ids:
        engine.step()


@pytest.mark.parametrize("is_paused", [False, True], ids=["unpaused", "paused"])
def test_a_request_that_waits_for_its_holes_is_restarted_by_a_reset(is_paused: bool) -> None:
    """The load of the request has ended, so only steps of the scheduler write to its blocks."""
    with engine_with_holes((64, 192), max_num_batched_tokens=16) as engine:
        step_until_only_a_hole_is_missing(engine)
        if is_paused:
            # ``pause_generation("keep")`` resets caches in the same way when the engine is idle.
            engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
            while engine.has_work():
                engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        outputs = [output for step in steps_of(engine, "second") for output in step.outputs]
        assert [token for _, found, _ in outputs for token in found] == SECOND.expected_output()


def test_the_prefix_cache_can_be_reset_after_an_abort_of_a_request_with_holes() -> None:
    with engine_with_holes((64, 192), max_num_batched_tokens=16) as engine:
        step_until_only_a_hole_is_missing(engine)
        engine.abort("second")
        assert engine.reset()


def test_no_request_has_the_id_of_a_row() -> None:
    with engine_with_holes((64, 192)) as engine:
        other = plan_of("second-hole-1", tokens(random.Random(3), 20), max_tokens=40)
        serve(engine, other, SECOND)


@pytest.mark.parametrize("drafts", [False, True], ids=["prompt", "drafts"])
def test_requests_decode_beside_holes_and_the_prompt_of_another(drafts: bool) -> None:
    rng = random.Random(4)
    options: dict[str, Any] = {"long_prefill_tokens": 24}
    decoding = {f"decoding-{number}" for number in range(4 if drafts else 1)}
    if drafts:
        options = {"drafter": Drafter.NGRAM, "num_draft_tokens": 3}
    with engine_with_holes((64, 320), max_num_batched_tokens=64, **options) as engine:
        if not drafts:
            engine.add_request(plan_of("long", tokens(rng, 800)))
        for request_id in sorted(decoding):
            engine.add_request(plan_of(request_id, tokens(rng, 10), max_tokens=40))
        engine.step()
        engine.add_request(SECOND)
        for step in steps_of(engine, "second" if drafts else "decoding-0"):
            scheduled = {request.request_id for request in step.scheduled}
            assert decoding & engine.scheduler.requests.keys() <= scheduled


def test_the_first_request_answers_before_the_holes_of_all_are_computed() -> None:
    rng = random.Random(6)
    prompts = [tokens(rng, len(PROMPT)) for _ in range(8)]
    with engine_of(FULL, max_num_batched_tokens=128) as engine:
        serve(engine, *(plan_of(f"first-{n}", prompt) for n, prompt in enumerate(prompts)))
        make_holes(engine, (64, 192))
        for number, prompt in enumerate(prompts):
            engine.add_request(plan_of(f"second-{number}", prompt, max_tokens=1))
        steps: dict[str, int] = {}
        for number, step in enumerate(steps_of(engine, "second-7")):
            for request_id, *_ in step.outputs:
                steps.setdefault(request_id, number)
        # A step has room for one hole, or for the ends of eight holes.
        assert steps["second-0"] < steps["second-7"] / 2, steps


def steps_of(engine: SimulatedEngine, request_id: str) -> Iterator[Any]:
    """The steps that are made while a request is there."""
    while request_id in engine.scheduler.requests:
        yield engine.step()


def test_steps_without_holes_do_not_count_what_is_running() -> None:
    """Such a count takes time in proportion to the requests."""
    with engine_of(FULL) as engine:
        with mock.patch.object(hole_steps, "budget_of_holes", side_effect=AssertionError):
            serve(engine, plan_of("first", PROMPT))
            serve(engine, SECOND)
        make_holes(engine, (64, 192))
        serve(engine, plan_of("third", PROMPT))
        assert engine.side.counters.hole_tokens


@pytest.mark.parametrize("looks_at_prompts", [False, True], ids=["copied", "looked at"])
def test_tokens_of_a_request_are_read_once_for_all_its_rows(looks_at_prompts: bool) -> None:
    """The rows belong to many steps. The harness's model runner compares their tokens."""
    found: list[Any] = []
    read: list[Any] = []
    holes = (64, 192), (256, 320)
    with engine_with_holes(*holes, max_num_batched_tokens=48) as engine:
        execute = engine.runner.execute

        def watch(output: Any) -> Any:
            new = output.scheduled_new_reqs
            found.extend(each.prompt_token_ids for each in new if "-hole-" in each.req_id)
            if request := engine.scheduler.requests.get("second"):
                read.append(RequestState.of(request).token_ids)
            return execute(output)

        of_model = type(engine.scheduler.vllm_config.model_config)
        with (
            mock.patch.object(engine.runner, "execute", watch),
            mock.patch.object(of_model, "uses_mrope", looks_at_prompts),
        ):
            serve(engine, SECOND)
        assert len(found) > 3
        assert {type(each) for each in found} == {list if looks_at_prompts else array}
        assert len({id(each) for each in read if each is not None}) == (not looks_at_prompts)


@pytest.mark.parametrize("hole_reuse", [False, True], ids=["no-holes", "holes"])
def test_a_request_that_has_loaded_does_not_wait_for_itself(hole_reuse: bool) -> None:
    """The reset takes the request's blocks before it runs.

    Its own load still counts as expected.
    """
    options = offloading(FULL, hole_reuse=hole_reuse)
    with engine_with_holes(offloading=options, caching=True) as engine:
        engine.add_request(plan_of("second", PROMPT, max_tokens=20))
        while "second" not in engine.scheduler.finished_recving_kv_req_ids:
            engine.step()
        assert engine.reset(reset_running_requests=True)
        serve(engine)
