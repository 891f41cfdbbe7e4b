# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention beside ``--prefix-match-unit`` on the emulated NPU: hits change no answer.

Hits end inside blocks. vLLM-Ascend's own scheduler, runner and copies of blocks serve Qwen3-Next,
with and without drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import IS_0_23, connector
from support.sample import IS_SAMPLE
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.processes import (
    ADAPTIVE,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)
from support.scenarios.states import MTP, NO_DRAFTS, plan

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(IS_0_23, reason="vLLM 0.23.0 has no hits inside blocks"),
]

MODEL = "states, MTP"
BLOCK_TOKENS = 128
UNIT_TOKENS = 32
ENGINE = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 500}
INSIDE = ENGINE | {"prefix_match_unit": UNIT_TOKENS}
CONTROLS = ("zeroed states", "foreign states")

CELLS: dict[str, tuple[str, bool, Mapping[str, Any]]] = {
    "drafts, asynchronous, connector": (MTP, True, connector()),
    "drafts, synchronous, connector": (MTP, False, connector()),
    "no drafts, asynchronous": (NO_DRAFTS, True, {}),
}
"""Where drafts come from, whether scheduling is asynchronous, and arguments, by name.

Engines with drafts have a connector. Without one, vLLM-Ascend's lookup leaves a single token of a
prompt to compute, and a step of one token answers wrong if the engine has drafts, also without this
package.
"""
NAMES = list(CELLS)[:1] if IS_SAMPLE else list(CELLS)


@pytest.fixture(scope="module")
def reports(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    def of_model(drafts: str, is_async: bool, **engine: Any) -> Plan:
        made = plan(
            partial(folder_of, MODEL),
            ["sightings", "siblings", "controls"],
            drafts,
            is_async,
            BLOCK_TOKENS,
            **engine,
        )
        options = {**made.options, "match_unit_tokens": UNIT_TOKENS}
        return Plan(made.model, made.scenarios, "states", made.engine, options)

    reference = of_model(NO_DRAFTS, True, **ENGINE, **NO_PREFIX_CACHING)
    plans = {
        name: of_model(drafts, is_async, **INSIDE, **engine)
        for name, (drafts, is_async, engine) in CELLS.items()
        if name in NAMES
    }
    started = [(PLUGIN_OFF, {"reference": reference}), (ADAPTIVE, plans)]
    return LazyReports(tmp_path_factory, started, NPU)


@pytest.fixture(params=NAMES)
def served(request: pytest.FixtureRequest, reports: LazyReports) -> Served:
    return reports[request.param]


def test_hits_change_no_answer(served: Served, reports: LazyReports) -> None:
    right = [label for label in served.labels if label.startswith("before")]
    right += [label for label in served.labels if "states" not in label and "loads" not in label]
    largest = served.check_equal(reports["reference"], dict.fromkeys(right), NPU_TOLERANCE)
    hits = [answer.hit_tokens for label in right for answer in served.answers(label)]
    num_inside = sum(tokens % BLOCK_TOKENS > 0 for tokens in hits)
    print(f"\nlargest error {largest:.1e}, {sum(hits)} tokens hit, {num_inside} hits inside blocks")
    assert num_inside > 10
    served.check_nothing_is_left()


def test_wrong_states_show(served: Served, reports: LazyReports) -> None:
    errors = {label: served.logprob_error(label, reports["reference"]) for label in CONTROLS}
    assert min(errors.values()) > WRONG
