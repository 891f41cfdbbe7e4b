# SPDX-License-Identifier: Apache-2.0
"""As shipped, a step of a decode does no more than what changes. Counted, not timed."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import pytest
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.run import run
from support.scheduler.transcript import Step
from support.scheduler.workload import RequestPlan, Workload

from vllm_ascend_kvext.activation import survey, wanted_features
from vllm_ascend_kvext.patches.fast_prefix_cache.kv_cache_manager import steps_of
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.prefix_cache.steps import StepCounts
from vllm_ascend_kvext.settings import (
    FAST_PREFIX_CACHE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    Mode,
    Settings,
)

FULL = Group(Attention.FULL, 16)
WINDOWS = (
    Layout("gpt-oss", (FULL, Group(Attention.WINDOW, 16, 40))),
    Layout("gemma", (FULL, *[Group(Attention.WINDOW, 16, 40)] * 5)),
    Layout("two-sizes", (Group(Attention.FULL, 32), Group(Attention.WINDOW, 16, 40))),
)
STATES = (
    Layout("mamba", (FULL, Group(Attention.MAMBA, 16))),
    Layout("mamba-window", (FULL, Group(Attention.MAMBA, 16), Group(Attention.WINDOW, 16, 40))),
)
ENVIRONMENTS = {
    "fast": {FAST_PREFIX_CACHE_VARIABLE: "1"},
    "interval-0": {RETENTION_INTERVAL_VARIABLE: "0"},
    "interval-64": {RETENTION_INTERVAL_VARIABLE: "64"},
    "adaptive": {RETENTION_VARIABLE: "adaptive"},
}
"""What a user sets; each of them brings the fast path along."""

NUM_REQUESTS = 3
PROMPT_TOKENS = 40
NEW_TOKENS = 160


@functools.cache
def plans() -> dict[str, FeaturePlan]:
    """Made once: checking all fingerprints takes longer than a workload."""
    return {plan.feature: plan for plan in survey(Settings(mode=Mode.STRICT)).plans}


@contextmanager
def in_effect(names: tuple[str, ...]) -> Iterator[None]:
    fitting = [name for name in names if plans()[name].fits]
    for name in fitting:
        BOOK.apply(plans()[name])
    try:
        yield
    finally:
        for name in reversed(fitting):
            BOOK.revert(name)


def counts_of(layout: Layout, environment: dict[str, str], **options: object) -> StepCounts:
    """Steps of a few requests with long outputs, with all that these variables bring."""
    counts: list[StepCounts] = []

    def note(engine: SchedulerEngine, step: Step) -> None:
        steps = steps_of(engine.scheduler.kv_cache_manager)
        assert steps is not None
        counts[:] = [steps.counts]

    workload = Workload(
        name="decode",
        layout=layout,
        options=EngineOptions(num_blocks=1000, events=False, **options),  # type: ignore[arg-type]
        requests=tuple(
            RequestPlan(
                request_id=f"decode-{number}",
                arrival_step=number,
                prompt=tuple(range(number, number + PROMPT_TOKENS)),
                max_tokens=NEW_TOKENS,
            )
            for number in range(NUM_REQUESTS)
        ),
    )
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, environment))
        stack.enter_context(in_effect(wanted_features(Settings.from_environ(environment))))
        result = run(workload, [note])
    assert not result.wrong_outputs(workload)
    (last,) = counts
    return last


@pytest.mark.parametrize("layout", WINDOWS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_most_steps_of_a_decode_are_quiet(
    layout: Layout, environment: dict[str, str], is_async: bool
) -> None:
    counts = counts_of(layout, environment, is_async=is_async)
    num_steps = counts.quiet + counts.partial + counts.upstream
    assert num_steps >= NUM_REQUESTS * NEW_TOKENS
    # Every 16 tokens a block begins, one is full, and one leaves the windows.
    assert counts.quiet >= 12 / 16 * num_steps
    # Prompts, and nothing else.
    assert counts.upstream <= 2 * NUM_REQUESTS


@pytest.mark.parametrize("layout", STATES, ids=lambda layout: layout.name)
@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_most_steps_of_a_decode_with_states_are_quiet(
    layout: Layout, environment: dict[str, str], is_async: bool
) -> None:
    counts = counts_of(layout, environment, is_async=is_async)
    # Per 16 tokens a block begins, one is full, a state goes and a block leaves the window, which
    # with a step in flight happens a step later.
    assert counts.quiet >= 10 / 16 * (counts.quiet + counts.upstream)
    assert not counts.partial


@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_with_drafts_no_step_of_a_decode_is_left_to_upstream(
    environment: dict[str, str], is_async: bool
) -> None:
    counts = counts_of(
        WINDOWS[1].with_eagle(5), environment, is_async=is_async, drafter=Drafter.EAGLE
    )
    assert counts.quiet >= (counts.quiet + counts.partial) / 3
    assert counts.upstream <= 2 * NUM_REQUESTS
