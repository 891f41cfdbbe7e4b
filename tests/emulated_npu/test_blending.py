# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blended requests on the emulated NPU answer as plain torch computes from their segments.

Keys are rotated by the angles of vLLM-Ascend's own rotary classes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import RUNNERS
from support.blending.oracle import Oracle
from support.blending.served import MAX_TOKENS, expected_reuse, num_tokens, oracle_error
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.documents import SEPARATOR
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, PLUGIN_OFF, Plan, Reports

HEAD_TOKENS = 16
POOL = {"num_gpu_blocks_override": 200}
WINDOWS_TOKENS = {
    "full attention": 0,
    "windows of 120 tokens": 120,
    "sinks, windows, experts": 128,
}
"""Windows of the models that blend. They are shorter than most documents."""
MODELS = tuple(WINDOWS_TOKENS)[:1] if IS_SAMPLE else tuple(WINDOWS_TOKENS)
EXACT = ("exact: long heads", "exact: in place")
CONTROLS = ("wrong: not rotated", "wrong: swapped", "wrong: zeroed keys")


@pytest.fixture(scope="module", params=RUNNERS)
def blended(
    request: pytest.FixtureRequest,
    folder_of: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Reports:
    engine = processes.blending(separator=SEPARATOR, learn=False) | POOL
    scenarios, options = ("orders", "exact", "controls"), {"heads": [HEAD_TOKENS]}
    plans = {
        model: Plan(folder_of(model), scenarios, "blending", engine, options) for model in MODELS
    }
    return serve_each(tmp_path_factory, plans, RUNNERS[request.param])


def serve_each(
    tmp_path_factory: pytest.TempPathFactory, plans: Mapping[str, Plan], environ: Mapping[str, str]
) -> Reports:
    """Serve each model in its own process.

    The first engine of a process decides whether vLLM-Ascend expects experts.
    """
    reports = Reports()
    for model, plan in plans.items():
        reports |= processes.serve(tmp_path_factory, {model: plan}, environ, NPU)
    return reports


@pytest.mark.parametrize("model", MODELS)
def test_blended_answers_are_those_of_the_oracle(
    blended: Reports, folder_of: Callable[[str], Path], record_property: Any, model: str
) -> None:
    served = blended[model]
    oracle = Oracle(folder_of(model), served.report["facts"]["sinks"], MAX_TOKENS)
    window_tokens = WINDOWS_TOKENS[model]
    errors = []
    untouched = []
    for answer in served.answers(f"heads {HEAD_TOKENS}"):
        if answer.params is None:  # No segment is longer than the window.
            continue
        reused = expected_reuse(answer, HEAD_TOKENS, window_tokens)
        assert answer.reused_tokens == num_tokens(reused) > 0
        errors.append(oracle_error(oracle, answer, reused))
        untouched.append(oracle_error(oracle, answer, []))
    wrong = wrong_errors(oracle, served, window_tokens)
    record_property("largest error, control", (max(errors), min(wrong)))
    assert max(errors) <= NPU_TOLERANCE
    assert min(untouched) > WRONG, "it could be told from full recompute"
    assert min(wrong) > WRONG
    served.check_nothing_is_left()


def wrong_errors(oracle: Oracle, served: Served, window_tokens: int = 0) -> list[float]:
    """Controls: KV that was loaded wrong on purpose changes answers."""
    answers = [answer for label in CONTROLS for answer in served.answers(label)]
    assert len(answers) == len(CONTROLS)
    return [
        oracle_error(oracle, answer, expected_reuse(answer, HEAD_TOKENS, window_tokens))
        for answer in answers
    ]


def test_what_is_in_place_is_exact(
    blended: Reports, folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    plans = {}
    for model in MODELS:
        prompts = {
            label: ([answer.prompt for answer in blended[model].answers(label)], 8)
            for label in EXACT
        }
        engine = POOL | NO_PREFIX_CACHING
        options = {"prompts": prompts}
        plans[model] = Plan(folder_of(model), ["plain"], "blending", engine, options)
    plain = serve_each(tmp_path_factory, plans, PLUGIN_OFF)
    for model in MODELS:
        blended[model].check_equal(plain[model], EXACT, NPU_TOLERANCE)
