# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""States with drafts on the emulated NPU: hits change no answer.

The model is Qwen3-Next with drafts of its own layer. vLLM-Ascend's own scheduler, runner, proposer
and rejection sampler serve it, also asynchronously. Answers are compared with those of an engine
without the plugin, prefix caching and drafts. `support.scenarios.states` has the prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import connector
from support.sample import IS_SAMPLE
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.processes import (
    ADAPTIVE,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
)
from support.scenarios.states import MTP, NO_DRAFTS, plan

pytestmark = pytest.mark.timeout(1800)

MODEL = "states, MTP"
UNIT_TOKENS = 128
ENGINE = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 500}
CONTROLS = ("zeroed states, host", "foreign states, host", "loads of nothing")

CELLS: dict[str, tuple[bool, Mapping[str, str], Mapping[str, Any]]] = {
    "asynchronous, both": (True, ADAPTIVE, connector()),
    "synchronous, both": (False, ADAPTIVE, connector()),
    "asynchronous, default": (True, {}, {}),
    "asynchronous, connector": (True, {}, connector()),
}
"""Whether scheduling is asynchronous, the environment, and the arguments of engines, by name."""

NAMES = list(CELLS)[:1] if IS_SAMPLE else list(CELLS)


@pytest.fixture(scope="module")
def reports(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    of_model = partial(
        plan, partial(folder_of, MODEL), ["sightings", "controls"], unit_tokens=UNIT_TOKENS
    )
    reference = of_model(NO_DRAFTS, True, **ENGINE, **NO_PREFIX_CACHING)
    started = [(PLUGIN_OFF, {"reference": reference})]
    for name in NAMES:
        is_async, environ, engine = CELLS[name]
        started.append((environ, {name: of_model(MTP, is_async, **ENGINE, **engine)}))
    return LazyReports(tmp_path_factory, started, NPU)


@pytest.fixture(params=NAMES)
def served(request: pytest.FixtureRequest, reports: LazyReports) -> Served:
    return reports[request.param]


def test_hits_change_no_answer(
    served: Served, reports: LazyReports, record_property: Callable[[str, Any], None]
) -> None:
    right = [label for label in served.labels if label.startswith("before")]
    right += [label for label in served.labels if "states" not in label and "loads" not in label]
    largest = served.check_equal(reports["reference"], dict.fromkeys(right), NPU_TOLERANCE)
    record_property("largest error", largest)
    print(f"\nlargest error {largest:.1e}")
    assert sum(served.hit_tokens("device")) >= 8 * UNIT_TOKENS
    assert served.counted_in_all("accepted draft tokens") > 0
    served.check_nothing_is_left()


def test_wrong_states_from_the_host_show(served: Served, reports: LazyReports) -> None:
    if "own" not in served.report:
        pytest.skip("no connector")
    errors = {label: served.logprob_error(label, reports["reference"]) for label in CONTROLS}
    print(f"\n{errors}")
    assert min(errors.values()) > WRONG
    assert served.report["own"]["host_hit_requests"] > 0


def test_states_of_accepted_drafts_are_stored_behind_their_copies(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """vLLM-Ascend ends the connector's part of a step before it saves the step's states."""
    of_model = partial(plan, partial(folder_of, MODEL), ["crossings"], unit_tokens=UNIT_TOKENS)
    interval = {"VLLM_PREFIX_CACHE_RETENTION_INTERVAL": str(UNIT_TOKENS)}
    found = LazyReports(
        tmp_path_factory,
        [
            (PLUGIN_OFF, {"reference": of_model(NO_DRAFTS, False, **ENGINE, **NO_PREFIX_CACHING)}),
            (interval, {"served": of_model(MTP, False, **ENGINE, **connector())}),
        ],
        NPU,
    )
    served = found["served"]
    labels = dict.fromkeys(served.labels)
    largest = served.check_equal(found["reference"], labels, NPU_TOLERANCE)
    assert sum(served.hit_tokens("behind the crossing")) >= 8 * 2 * UNIT_TOKENS
    print(f"\nlargest error {largest:.1e}")
