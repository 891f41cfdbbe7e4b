# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""With the defaults, a step of a decode only does what changes. Steps are counted, not timed."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
from support.installed import installed
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import Drafter, EngineOptions
from support.scheduler.run import run
from support.scheduler.workload import RequestPlan, Workload

from vllm_ascend_kvext.activation import wanted_features
from vllm_ascend_kvext.prefix_cache.steps import StepCounts
from vllm_ascend_kvext.settings import (
    FAST_PREFIX_CACHE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    Settings,
)
from vllm_ascend_kvext.upstream_state import BlockManagerState

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
"""Settings of a user. Each of them also turns on the fast path."""

NUM_REQUESTS = 3
PROMPT_TOKENS = 40
NEW_TOKENS = 160


def counts_of(layout: Layout, environment: dict[str, str], **options: object) -> StepCounts:
    """Counts of steps of a few requests with long outputs, with what these variables turn on."""
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
    features = wanted_features(Settings.from_environ(environment))
    with patch.dict(os.environ, environment), installed(*features):
        result = run(workload)
        assert not result.wrong_outputs(workload)
        steps = BlockManagerState.of(result.engine.scheduler.kv_cache_manager).steps
    assert steps is not None
    return steps.counts


CASES = {
    # Every 16 tokens, a block begins, a block becomes full, and a block leaves the windows.
    **{layout.name: (layout, None, 12 / 16) for layout in WINDOWS},
    # A state leaves, too. With a step in flight, a block leaves the window one step later.
    **{layout.name: (layout, None, 10 / 16) for layout in STATES},
    "drafts": (WINDOWS[1].with_eagle(5), Drafter.EAGLE, 1 / 3),
}
"""The layout, the drafter, and the minimum share of quiet steps."""


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("environment", ENVIRONMENTS.values(), ids=ENVIRONMENTS)
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_most_steps_of_a_decode_are_quiet(
    name: str, environment: dict[str, str], is_async: bool
) -> None:
    layout, drafter, min_share = CASES[name]
    counts = counts_of(layout, environment, is_async=is_async, drafter=drafter)
    num_steps = counts.quiet + counts.partial + counts.upstream
    assert counts.quiet >= min_share * num_steps
    if layout in STATES:
        assert not counts.partial
        return
    assert counts.upstream <= 2 * NUM_REQUESTS, (
        "upstream's function has run for more than the prompts"
    )
    assert drafter or num_steps >= NUM_REQUESTS * NEW_TOKENS
