# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prefill steps of models with states: they come to an end, and cache no state that is not there.

A step may end inside a block of states, if the next one ends with that block. The tests run vLLM's
real scheduler and vLLM-Ascend's, with images, thresholds and budgets that are too small for a
block, and with all features of this package that end steps. Every step checks what requests read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import family
from support.installed import installed, repairs_installed
from support.retention.checkpoints import adaptive_retention
from support.sample import sampled
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.model_runner import ReadCheck, WrongKVError
from support.scheduler.options import Drafter, EngineOptions, ExternalLoad
from support.scheduler.run import Run, run
from support.scheduler.token_stream import VOCAB_SIZE, Image
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan, Workload
from support.upstream_version import IS_SINCE_0_30
from vllm.config import SpeculativeConfig, VllmConfig

FEATURE = "aligned-steps"
BLOCK_TOKENS = 32
PROMPT_TOKENS = 200
MAX_IDLE_STEPS = 3
"""The maximum number of consecutive idle steps with requests: asynchronous outputs are awaited."""
IS_ASCEND_0_30 = family.IS_ASCEND and IS_SINCE_0_30


def states(block_tokens: int, full_block_tokens: int | None = None) -> Layout:
    full = Group(Attention.FULL, full_block_tokens or block_tokens)
    return Layout("states", (full, Group(Attention.MAMBA, block_tokens)))


def tokens_of(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple((number * 7 + place * (number + 1)) % VOCAB_SIZE for place in range(num_tokens))


class Progress:
    """A `support.scheduler.run.Check`: while there are requests, some request makes progress."""

    def __init__(self) -> None:
        self.num_idle_steps = 0

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        self.num_idle_steps = 0 if step.scheduled or step.outputs else self.num_idle_steps + 1
        if engine.scheduler.requests and not engine.runner.is_transferring:
            assert self.num_idle_steps <= MAX_IDLE_STEPS, "it stands still"


def served(layout: Layout, *plans: RequestPlan, **options: Any) -> Run:
    """Serve requests, and check what they read and answer.

    Raises:
        AssertionError: Requests stand still, or read or answer what is not their own.
    """
    chosen = {"num_blocks": 300, "max_num_batched_tokens": 256, **options}
    workload = Workload(
        name="states", layout=layout, options=EngineOptions(**chosen), requests=plans
    )
    result = run(workload, [Progress()], ReadCheck.ALL)
    assert not result.wrong_outputs(workload)
    return result


def ends_of(result: Run, request_id: str) -> list[int]:
    """The tokens after each step of a request."""
    return [
        scheduled.num_computed_tokens + scheduled.num_tokens
        for step in result.transcript.steps
        for scheduled in step.scheduled
        if scheduled.request_id == request_id
    ]


IMAGES = (Image("one", 5, 40), Image("another", 50, 40))
"""The encoder's cache has room for one image."""
TOO_SHORT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "before an image": ({"images": IMAGES}, {}),
    "threshold": ({}, {"long_prefill_tokens": 20}),
    "threshold of one token": ({}, {"long_prefill_tokens": 1}),
    "budget": ({}, {"max_num_batched_tokens": BLOCK_TOKENS - 1}),
    "before an image, asynchronous": ({"images": IMAGES}, {"is_async": True}),
}
"""The settings of a request and of an engine that make a step shorter than a block, by name."""


def request(number: int = 0, **values: Any) -> RequestPlan:
    chosen = {"prompt": tokens_of(1, PROMPT_TOKENS), "max_tokens": 4, "arrival_step": 0, **values}
    return RequestPlan(request_id=f"request-{number}", **chosen)


@pytest.mark.vllm("<0.30")
@pytest.mark.parametrize("name", TOO_SHORT)
def test_stock_stands_still(name: str) -> None:
    of_request, of_engine = TOO_SHORT[name]
    with pytest.raises(AssertionError, match="it stands still"):
        served(states(BLOCK_TOKENS), request(**of_request), **of_engine)


@pytest.mark.parametrize("name", TOO_SHORT)
def test_a_prompt_is_computed_in_steps_shorter_than_a_block(name: str) -> None:
    """Every state that is cached with a block's end is also found, and is right."""
    of_request, of_engine = TOO_SHORT[name]
    prompt = tokens_of(1, PROMPT_TOKENS)
    branches = [
        request(
            number,
            prompt=prompt[:shared_tokens] + tokens_of(number + 2, 20),
            arrival_step=400 * number,
            images=tuple(
                image
                for image in of_request.get("images", ())
                if image.offset_tokens + image.length_tokens <= shared_tokens
            ),
        )
        for number, shared_tokens in enumerate(range(BLOCK_TOKENS, PROMPT_TOKENS, BLOCK_TOKENS), 1)
    ]
    with installed(FEATURE):
        result = served(states(BLOCK_TOKENS), request(**of_request), *branches, **of_engine)
    ends = [0, *ends_of(result, "request-0")]
    assert any(end % BLOCK_TOKENS for end in ends if end < PROMPT_TOKENS)
    for start, end in pairwise(ends):
        if start % BLOCK_TOKENS and start < PROMPT_TOKENS - 1:
            assert end <= -(-start // BLOCK_TOKENS) * BLOCK_TOKENS
    assert result.transcript.counts["hits"] >= 3


def test_a_step_waits_where_others_have_taken_its_tokens() -> None:
    """A later step with more drafts is no shorter than a block."""
    plans = [request(), request(1, prompt=tokens_of(9, 2 * BLOCK_TOKENS + 5))]
    options = {"max_num_batched_tokens": 3 * BLOCK_TOKENS - 8}
    stock = served(states(BLOCK_TOKENS), *plans, **options)
    with installed(FEATURE):
        repaired = served(states(BLOCK_TOKENS), *plans, **options)
    assert [step.scheduled for step in repaired.transcript.steps] == [
        step.scheduled for step in stock.transcript.steps
    ]


@pytest.mark.skipif(family.IS_ASCEND, reason="vLLM-Ascend has another configuration")
@pytest.mark.vllm("<0.30")
def test_an_engine_starts_whose_threshold_is_shorter_than_a_block() -> None:
    engine = SchedulerEngine(
        states(BLOCK_TOKENS), EngineOptions(num_blocks=9, long_prefill_tokens=20)
    )
    config: VllmConfig = engine.scheduler.vllm_config
    with pytest.raises(AssertionError):
        config.validate_block_size()
    with installed(FEATURE):
        config.validate_block_size()
        assert config.scheduler_config.long_prefill_token_threshold == 20
        config.scheduler_config.max_num_batched_tokens = 20
        with pytest.raises(AssertionError, match="must be <= max_num_batched_tokens"):
            config.validate_block_size()
        assert config.scheduler_config.long_prefill_token_threshold == 20
    engine.shutdown()


def branches_served(layout: Layout, **options: Any) -> Run:
    """A prompt in steps of 80 tokens, and other prompts that share a beginning up to a block."""
    prompt = tokens_of(1, 9 * BLOCK_TOKENS + 12)
    shared = range(len(prompt) // BLOCK_TOKENS * BLOCK_TOKENS, 0, -BLOCK_TOKENS)
    plans = [
        request(
            number,
            prompt=prompt[:num_tokens] + tokens_of(number + 2, 30),
            arrival_step=30 * number,
        )
        for number, num_tokens in enumerate(shared)
    ]
    return served(layout, *plans, max_num_batched_tokens=80, **options)


WRONG_UPSTREAM: dict[str, tuple[Callable[[], Layout], dict[str, Any]]] = {
    "smaller blocks of another group": (lambda: states(BLOCK_TOKENS, 8), {}),
    "connector that reads": (
        lambda: states(BLOCK_TOKENS),
        {"external_load": ExternalLoad.NEVER},
    ),
}
IN_EFFECT = [
    pytest.param("smaller blocks of another group", marks=pytest.mark.vllm(">=0.30")),
    *(["connector that reads"] if IS_ASCEND_0_30 else []),
]


@pytest.mark.parametrize("name", IN_EFFECT)
@pytest.mark.vllm(">=0.30")
def test_stock_caches_states_from_within_a_block_as_those_of_its_end(name: str) -> None:
    make_layout, options = WRONG_UPSTREAM[name]
    with pytest.raises(WrongKVError, match="mamba"):
        branches_served(make_layout(), **options)


@pytest.mark.parametrize("name", IN_EFFECT)
@pytest.mark.vllm(">=0.30")
def test_states_are_those_of_the_ends_of_their_blocks(name: str) -> None:
    make_layout, options = WRONG_UPSTREAM[name]
    with installed(FEATURE):
        result = branches_served(make_layout(), **options)
    assert result.transcript.counts["hits"] >= 3


LOOKAHEAD_TOKENS = 3


@pytest.fixture
def several_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drafts come from MTP modules, which read tokens beyond the end of a prefill step."""
    monkeypatch.setattr(SpeculativeConfig, "use_multi_module_mtp", lambda config: True)


def served_with_drafts(full_block_tokens: int) -> list[Run]:
    """The prompts end shortly behind a block. Some of their steps do, too."""
    full = Group(Attention.FULL, full_block_tokens, is_eagle=True)
    state = Group(Attention.MAMBA, BLOCK_TOKENS, draft_blocks=LOOKAHEAD_TOKENS)
    results = []
    for num_tokens in range(2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS + 5):
        for max_step_tokens in range(BLOCK_TOKENS, BLOCK_TOKENS + 8):
            workload = Workload(
                name="drafts",
                layout=Layout("drafts", (full, state)),
                options=EngineOptions(
                    num_blocks=300,
                    drafter=Drafter.EAGLE,
                    num_draft_tokens=LOOKAHEAD_TOKENS,
                    max_num_batched_tokens=max_step_tokens,
                ),
                requests=(request(prompt=tokens_of(1, num_tokens)),),
            )
            result = run(workload, [Progress()])
            assert not result.wrong_outputs(workload)
            results.append(result)
    return results


@pytest.mark.vllm(">=0.30")
@pytest.mark.usefixtures("several_modules")
def test_stock_stands_still_where_a_block_ends_in_what_drafts_read() -> None:
    with pytest.raises(AssertionError, match="it stands still"):
        served_with_drafts(BLOCK_TOKENS)


@pytest.mark.vllm(">=0.30")
@pytest.mark.usefixtures("several_modules")
@pytest.mark.parametrize("full_block_tokens", [BLOCK_TOKENS, 8])
def test_a_step_may_end_with_a_block_in_what_drafts_read(full_block_tokens: int) -> None:
    with installed(FEATURE):
        results = served_with_drafts(full_block_tokens)
        engine = results[0].engine
        assert engine.replaced_methods.count("_reserve_prefill_lookahead") == 1
    assert "_reserve_prefill_lookahead" not in engine.replaced_methods
    # Among the last tokens of a prompt, steps end only with blocks.
    for result in results:
        num_tokens = len(result.engine.plans["request-0"].prompt)
        ends = [end for end in ends_of(result, "request-0") if end < num_tokens]
        assert all(num_tokens - end >= LOOKAHEAD_TOKENS for end in ends if end % BLOCK_TOKENS)


@pytest.mark.vllm(">=0.30")
def test_steps_before_drafts_of_one_module_are_left_alone() -> None:
    with installed(FEATURE):
        results = served_with_drafts(8)
    assert "_reserve_prefill_lookahead" not in results[0].engine.replaced_methods


IN_PLACE: dict[str, Callable[[], AbstractContextManager[None]]] = {
    "repairs": repairs_installed,
    "adaptive": adaptive_retention,
}
if IS_SINCE_0_30 and not IS_ASCEND_0_30:
    IN_PLACE["stock"] = nullcontext


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """The prompts share beginnings, and have images. Many of their steps are too short."""
    block_tokens = draw(st.sampled_from((8, 16, 24, 48)))
    layout = states(block_tokens)
    if draw(st.booleans()):
        window = Group(Attention.WINDOW, block_tokens, draw(st.integers(2, 3 * block_tokens)))
        layout = replace(layout, groups=(*layout.groups, window))
    lengths = st.integers(1, 5 * block_tokens) | st.integers(1, 5).map(block_tokens.__mul__)
    root = tokens_of(0, 5 * block_tokens)
    plans = []
    step = 0
    for number in range(draw(st.integers(1, 6))):
        prompt = root[: draw(lengths)] + tokens_of(number, draw(lengths))
        images, offset = [], draw(st.integers(0, 40))
        while len(images) < 4 and draw(st.booleans()):
            length = draw(st.integers(1, 60))
            if offset + length > len(prompt):
                break
            # The name of an image says how long it is.
            images.append(Image(f"{draw(st.integers(0, 3))} of {length}", offset, length))
            offset += length + draw(st.integers(0, 40))
        plans.append(
            RequestPlan(
                request_id=f"request-{number}",
                arrival_step=step,
                prompt=prompt,
                max_tokens=draw(st.integers(1, 20)),
                images=tuple(images),
                checkpoint_tokens=tuple(draw(st.lists(st.integers(1, len(prompt)), max_size=2))),
            )
        )
        step += draw(st.sampled_from((0, 0, 1, 5, 100)))
    options = EngineOptions(
        num_blocks=400,
        max_num_seqs=draw(st.integers(1, 4)),
        max_num_batched_tokens=draw(st.integers(4, 3 * block_tokens)),
        long_prefill_tokens=draw(st.just(0) | st.integers(1, 2 * block_tokens)),
        is_async=draw(st.booleans()),
        external_load=ExternalLoad.NEVER if IS_ASCEND_0_30 and draw(st.booleans()) else None,
    )
    return Workload(name="random", layout=layout, options=options, requests=tuple(plans))


@pytest.mark.parametrize("name", IN_PLACE)
@settings(
    max_examples=sampled(200),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(workload=workloads())
def test_no_prompt_stands_still_or_reads_another_state(name: str, workload: Workload) -> None:
    with IN_PLACE[name]():
        result = run(workload, [Progress()], ReadCheck.ALL)
        assert not result.wrong_outputs(workload)
