# SPDX-License-Identifier: Apache-2.0
"""Blended requests on the emulated NPU answer what plain torch says of their segments.

Keys are turned by the angles of vLLM-Ascend's own rotary classes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import random_models
from support.blending.oracle import Oracle
from support.blending.reused import Reused
from support.sample import IS_SAMPLE

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from blended_prompts import SEPARATOR, STORED_LENGTHS
from emulated_run import run_plans
from served import PLUGIN_OFF

WORKLOAD = "blended_workload.py"
TOLERANCE = 1e-3
WRONG = 0.1
MIN_TOKENS = 32
MOST_TOKENS = 1200
HEAD_TOKENS = 16
MODELS_AND_WINDOWS: dict[str, tuple[Callable[[], Any], int]] = {
    "full attention": (random_models.MODELS["full attention"], 0),
    "windows": (partial(random_models.windows, 120), 120),
    "sinks, windows, experts": (random_models.MODELS["sinks, windows, experts"], 128),
}
"""Models that blend, and their windows: shorter than most of the documents."""
MODELS = tuple(MODELS_AND_WINDOWS)[:1] if IS_SAMPLE else tuple(MODELS_AND_WINDOWS)
EXACT = ("exact: long heads", "exact: in place")
CONTROLS = ("wrong: not rotated", "wrong: swapped", "wrong: zeroed keys")

Blended = Callable[[str], tuple[dict[str, Any], dict[str, Any], Path]]


@pytest.fixture(scope="module")
def blended(tmp_path_factory: pytest.TempPathFactory) -> Blended:
    """The report of an engine that blends, answers without the package, and the model."""

    @cache
    def serve(model: str) -> tuple[dict[str, Any], dict[str, Any], Path]:
        folder = tmp_path_factory.mktemp("model")
        random_models.write(folder, MODELS_AND_WINDOWS[model][0]())
        engine = {"num_gpu_blocks_override": 200}
        plan = {
            "model": str(folder),
            "scenarios": ["orders", "exact", "controls"],
            "heads": [HEAD_TOKENS],
            "blending": {"segment_separator": SEPARATOR},
            "engine": engine,
        }
        found = run_plans(WORKLOAD, {model: plan}, tmp_path_factory.mktemp("blended"), {})[model]
        prompts = {
            label: ([answer["prompt"] for answer in found["asked"][label]], 8) for label in EXACT
        }
        plain = {
            "model": str(folder),
            "scenarios": ["plain"],
            "prompts": prompts,
            "engine": engine | {"enable_prefix_caching": False},
        }
        plains = run_plans(WORKLOAD, {model: plain}, tmp_path_factory.mktemp("plain"), PLUGIN_OFF)
        return found, plains[model], folder

    return serve


def reused_of(answer: Mapping[str, Any], window_tokens: int) -> list[Reused]:
    """What is to be reused; the missing document has a length of its own."""
    found = []
    for first, end in answer["segments"]:
        begin = max(
            first + max(HEAD_TOKENS, window_tokens - 1), answer["params"]["kvext_exact_tokens"]
        )
        if end - first in STORED_LENGTHS and end - begin >= MIN_TOKENS:
            found.append(Reused(begin, end, (first, end)))
    return found


def oracle_error(oracle: Oracle, answer: Mapping[str, Any], reused: list[Reused]) -> float:
    expected = oracle.log_probabilities(answer["prompt"], answer["reply"], reused)
    return max(
        abs(float(of_token[int(token)]) - logprob)
        for of_token, step in zip(expected, answer["logprobs"], strict=True)
        for token, logprob in step.items()
    )


@pytest.mark.parametrize("model", MODELS)
def test_blended_answers_are_those_of_the_oracle(
    blended: Blended, report_cell: Any, model: str
) -> None:
    report, _, folder = blended(model)
    oracle = Oracle(folder, report["facts"]["sink"], MOST_TOKENS)
    _, window_tokens = MODELS_AND_WINDOWS[model]
    errors, untouched = [], []
    for answer in report["asked"][f"heads {HEAD_TOKENS}"]:
        if answer["params"] is None:  # No segment is longer than the window.
            continue
        reused = reused_of(answer, window_tokens)
        num_tokens = sum(each.end_tokens - each.first_tokens for each in reused)
        assert answer["params"]["kvext_reused_tokens"] == num_tokens > 0
        errors.append(oracle_error(oracle, answer, reused))
        untouched.append(oracle_error(oracle, answer, []))
    wrong = []
    for label in CONTROLS:
        (answer,) = report["asked"][label]
        wrong.append(oracle_error(oracle, answer, reused_of(answer, window_tokens)))
    report_cell("blending", model, max(errors), min(wrong))
    assert max(errors) <= TOLERANCE
    assert min(untouched) > WRONG, "it could be told from full recompute"
    assert min(wrong) > WRONG


@pytest.mark.parametrize("model", MODELS)
def test_what_is_in_place_is_exact(blended: Blended, model: str) -> None:
    report, plain, _ = blended(model)
    largest = 0.0
    for label in EXACT:
        for one, other in zip(report["asked"][label], plain["asked"][label], strict=True):
            assert one["reply"] == other["reply"]
            for step, expected in zip(one["logprobs"], other["logprobs"], strict=True):
                for token, value in step.items():
                    difference = abs(value - expected.get(token, min(expected.values())))
                    largest = max(largest, difference)
    assert largest <= TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left(blended: Blended, model: str) -> None:
    left = blended(model)[0]["left"]
    assert set(left.values()) == {0}, left
