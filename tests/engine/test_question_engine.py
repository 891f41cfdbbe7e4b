# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""On the real engine, segments are reused except for what the question attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.blending.oracle import Oracle
from support.blending.scores import MAX_TOKENS, SCORE_TOLERANCE, behind_heads, score_errors
from support.sample import IS_LONG, IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE as TOLERANCE
from support.scenarios.answers import Answer, errors
from support.scenarios.processes import Plan
from support.scenarios.question import (
    CROWD,
    HEAD_TOKENS,
    ORDERS,
    PROMPTS,
)
from tiny_models import WINDOW_TOKENS

SINK = [7, 8, 9]
ALL_CHECK_LAYERS = {"full": 2, "alternating": 3}
CHECK_LAYERS = {
    model: layer
    for model, layer in ALL_CHECK_LAYERS.items()
    if IS_LONG or (model == "full") == IS_SAMPLE
}
"""By model. Each version has one of them, unless all tests run."""


class Report:
    """The answers by label, and the facts, of all engines of a model."""

    def __init__(self, model: str, folder: Path, reports: processes.Reports) -> None:
        self.folder, self.check_layer = folder, CHECK_LAYERS[model]
        # Windows reach from a segment into the text before it.
        self.head_tokens = HEAD_TOKENS if model == "full" else WINDOW_TOKENS - 1
        served = [reports[name] for name in ("cold", "blends", "asynchronous")]
        self.answers = {label: each.answers(label) for each in served for label in each.labels}
        self.facts: dict[str, Any] = {}
        for each in served:
            each.check_nothing_is_left()
            self.facts |= each.report["facts"]

    def errors(self, label: str, other: str, places: Sequence[int]) -> list[float]:
        """For each answer, the largest difference between its log-probabilities and the other's."""
        return errors(self.answers[label], self._of(other, places))

    def worst(self, label: str, other: str, places: Sequence[int]) -> float:
        """The largest of these differences. The answers must have the same tokens."""
        replies = [answer.reply for answer in self.answers[label]]
        assert replies == [answer.reply for answer in self._of(other, places)]
        return max(self.errors(label, other, places))

    def _of(self, label: str, places: Sequence[int]) -> list[Answer]:
        return [self.answers[label][place] for place in places]


@pytest.fixture(scope="module", params=CHECK_LAYERS)
def report(
    request: pytest.FixtureRequest,
    model_folder: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Report:
    model = model_folder(request.param)
    blending = processes.blending(
        head_tokens=HEAD_TOKENS,
        selector="question",
        check_layer=CHECK_LAYERS[request.param],
        sink=SINK,
    )
    synchronous = {"async_scheduling": False}
    asynchronous = {"async_scheduling": True, "enforce_eager": False}
    plans = {
        "cold": Plan(model, ["cold"], "question", synchronous),
        "blends": Plan(model, ["reused"], "question", blending | synchronous),
        "asynchronous": Plan(model, ["interrupted"], "question", blending | asynchronous),
    }
    return Report(request.param, model, processes.serve(tmp_path_factory, plans, {}))


ALL = range(len(ORDERS))


def test_with_all_computed_the_answer_is_that_of_a_plain_request(report: Report) -> None:
    assert report.worst("everything", "cold", ALL) < TOLERANCE
    for answer, prompt in zip(report.answers["everything"], PROMPTS, strict=True):
        assert answer.params is not None and answer.reused_tokens == 0
        assert sum(answer.params.values()) == len(prompt.token_ids)
        assert answer.hit_tokens == answer.exact_tokens


def test_what_is_reused_changes_the_answer(report: Report) -> None:
    """If reuse changed no answer, tests that compare answers would say nothing."""
    assert min(report.errors("solo", "cold", ALL)) > 0.01
    assert min(report.errors("no scores", "solo", ALL)) > 0.01


@pytest.mark.parametrize("label", ["crowd", "async", "async again"])
def test_requests_at_once_answer_as_alone(report: Report, label: str) -> None:
    """A compiled model does so, too."""
    assert report.facts["compiled graphs"] >= 1
    assert report.worst(label, "solo", CROWD) < TOLERANCE
    for answer, place in zip(report.answers[label], CROWD, strict=True):
        assert answer.params == report.answers["solo"][place].params


def test_plain_requests_never_see_it(report: Report) -> None:
    assert report.worst("plain", "cold", ALL) < TOLERANCE


def test_answers_say_what_was_reused(report: Report) -> None:
    for place in ALL:
        heads_tokens = sum(end - first for first, end in behind_heads(place, report.head_tokens))
        without, solo = report.answers["no scores"][place], report.answers["solo"][place]
        assert solo.probe is not None
        runs_tokens = sum(end - first for first, end in solo.probe["runs"])
        assert without.reused_tokens == heads_tokens
        assert solo.reused_tokens == heads_tokens - runs_tokens
        for answer in (without, solo):
            assert answer.params is not None
            assert sum(answer.params.values()) == answer.prompt_tokens
            assert answer.hit_tokens == answer.reused_tokens + answer.exact_tokens


def test_nothing_is_left_after_an_abort_and_a_reset(report: Report) -> None:
    assert report.facts["aborted"] and report.facts["reset"] == [True]
    for when in ("left after aborted", "left after reset"):
        assert not any(report.facts[when].values()), report.facts[when]


def test_scores_are_those_of_an_oracle(report: Report) -> None:
    oracle = Oracle(report.folder, [(0, SINK)], MAX_TOKENS)
    for place in ALL:
        probe = report.answers["solo"][place].probe
        error, control = score_errors(oracle, probe, place, report.head_tokens, report.check_layer)
        assert error < SCORE_TOLERANCE and control > 10 * SCORE_TOLERANCE
