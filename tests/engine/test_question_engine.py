# SPDX-License-Identifier: Apache-2.0
"""Segments are reused but for what the question attends to, on the real engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import connector_models
import pytest
import served
from question_workload import (
    CROWD,
    HEAD_TOKENS,
    MISSING,
    ORDERS,
    QUESTION_TOKENS,
    RATIO,
    STEP_TOKENS,
    SYSTEM_TOKENS,
    Prompts,
)
from support.sample import IS_SAMPLE

TOLERANCE = 1e-4
"""Log-probabilities, fp32."""
SCORE_TOLERANCE = 1e-3
SINK = [7, 8, 9]
RUN_TOKENS = 8
CHECK_LAYERS = {"full": 2} if IS_SAMPLE else {"full": 2, "alternating": 3}
ASKED = Prompts()
Report = dict[str, Any]


@pytest.fixture(scope="module", params=CHECK_LAYERS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / request.param
    folder.mkdir()
    connector_models.WRITERS[request.param](folder)
    return folder


@pytest.fixture(scope="module")
def report(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Report:
    path = tmp_path_factory.mktemp("report") / "report.json"
    arguments = [str(path), str(model), str(CHECK_LAYERS[model.name])]
    ended = served.run("question_workload.py", arguments, {}, most_s=500)
    assert not ended.exit_code, ended.output[-5000:]
    loaded: Report = json.loads(path.read_text())
    return loaded


def distance(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of log-probabilities of two answers; infinite if tokens differ."""
    if one["reply"] != other["reply"]:
        return float("inf")
    return max(
        abs(logprob - of_other[token])
        for of_one, of_other in zip(one["logprobs"], other["logprobs"], strict=True)
        for token, logprob in of_one.items()
        if token in of_other
    )


def distances(report: Report, label: str, other: str, places: Any) -> list[float]:
    answers = report["answers"]
    return [
        distance(answer, answers[other][place])
        for answer, place in zip(answers[label], places, strict=True)
    ]


ALL = range(len(ORDERS))


def test_with_all_computed_the_answer_is_that_of_a_plain_request(report: Report) -> None:
    assert max(distances(report, "everything", "cold", ALL)) < TOLERANCE
    for answer, prompt in zip(report["answers"]["everything"], ASKED.prompts, strict=True):
        assert answer["params"]["kvext_reused_tokens"] == 0
        assert sum(answer["params"].values()) == len(prompt)
        assert answer["hit_tokens"] == answer["params"]["kvext_exact_tokens"]


def test_what_is_reused_changes_the_answer(report: Report) -> None:
    """Without it, tests that compare answers would say nothing."""
    assert min(distances(report, "solo", "cold", ALL)) > 0.01
    assert min(distances(report, "no scores", "solo", ALL)) > 0.01


@pytest.mark.parametrize("label", ["crowd", "async", "async again"])
def test_requests_at_once_answer_as_alone(report: Report, label: str) -> None:
    assert max(distances(report, label, "solo", CROWD)) < TOLERANCE
    for answer, place in zip(report["answers"][label], CROWD, strict=True):
        solo = report["answers"]["solo"][place]
        assert answer["params"] == solo["params"]


def test_plain_requests_never_see_it(report: Report) -> None:
    assert max(distances(report, "plain", "cold", ALL)) < TOLERANCE


def behind_heads(place: int) -> list[list[int]]:
    """Stored tokens of a prompt that `heads` would reuse."""
    return [
        [first + HEAD_TOKENS, end]
        for (first, end), number in zip(ASKED.segments[place], ORDERS[place], strict=True)
        if number != MISSING
    ]


def test_answers_say_what_was_reused(report: Report) -> None:
    answers = report["answers"]
    for place in ALL:
        heads_tokens = sum(end - first for first, end in behind_heads(place))
        without = answers["no scores"][place]
        assert without["params"]["kvext_reused_tokens"] == heads_tokens
        solo = answers["solo"][place]
        runs_tokens = sum(end - first for first, end in solo["probe"]["runs"])
        assert solo["params"]["kvext_reused_tokens"] == heads_tokens - runs_tokens
        for answer in (without, solo):
            assert sum(answer["params"].values()) == len(ASKED.prompts[place])
            hit_tokens = (
                answer["params"]["kvext_reused_tokens"] + answer["params"]["kvext_exact_tokens"]
            )
            assert answer["hit_tokens"] == hit_tokens


def test_what_is_chosen_lies_behind_heads_and_within_the_budget(report: Report) -> None:
    for place in ALL:
        reused = behind_heads(place)
        runs = report["answers"]["solo"][place]["probe"]["runs"]
        budget = RATIO * sum(end - first for first, end in reused)
        assert budget - RUN_TOKENS < sum(end - first for first, end in runs) <= budget
        for first, end in reused:
            assert any(first <= run[0] and run[1] <= end for run in runs)
        assert all(any(first <= run[0] and run[1] <= end for first, end in reused) for run in runs)


def test_counters_agree_with_answers(report: Report) -> None:
    counters, answers = report["facts"]["counters"], report["answers"]
    blended = [*answers["everything"], *answers["solo"], *answers["crowd"], *answers["no scores"]]
    reused_tokens = sum(answer["params"]["kvext_reused_tokens"] for answer in blended)
    assert counters["blend_tokens.reused"] == reused_tokens
    assert counters["blend_probes.scored"] == len(blended) - len(ORDERS)
    assert counters["blend_probes.lost"] == len(ORDERS)
    # What is missing and the question, in each first pass.
    places = [*ALL, *ALL, *CROWD, *ALL]
    assert counters["blend_probed_tokens"] == sum(map(first_pass_tokens, places))


def first_pass_tokens(place: int) -> int:
    loaded = sum(end - first + HEAD_TOKENS for first, end in behind_heads(place))
    before_question = ASKED.segments[place][-1][1]
    return before_question - loaded + min(QUESTION_TOKENS[place], STEP_TOKENS // 2)


@pytest.mark.parametrize(
    "when", ["left", "left after abort", "left after reset", "left at the end"]
)
def test_nothing_is_left(report: Report, when: str) -> None:
    assert report["facts"]["aborted"] and report["facts"]["reset"] == [True]
    assert not any(report["facts"][when].values()), report["facts"][when]


def test_scores_are_those_of_a_model_in_torch(report: Report, model: Path) -> None:
    if model.name != "full":
        pytest.skip("the model in torch has full attention")
    oracle = Oracle(model)
    for place in ALL:
        expected = oracle.scores(place)
        probe = report["answers"]["solo"][place]["probe"]
        assert probe["scored"] == expected["scored"]
        worst = max(abs(a - b) for a, b in zip(probe["scores"], expected["scores"], strict=True))
        assert worst < SCORE_TOLERANCE
        assert max(expected["scores"]) > 0.5
        unturned = oracle.scores(place, is_unturned=True)["scores"]
        assert max(abs(a - b) for a, b in zip(probe["scores"], unturned, strict=True)) > 0.1


class Oracle:
    """The first pass in transformers: segments computed alone, and turned to their places."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def scores(self, place: int, is_unturned: bool = False) -> dict[str, list[Any]]:
        """Of all stored segments of a prompt.

        Args:
            is_unturned: Whether their keys are not turned: what must not be equal.
        """
        import torch
        from transformers import DynamicCache

        prompt, segments = ASKED.prompts[place], ASKED.segments[place]
        cache = DynamicCache()
        scored = []
        with torch.no_grad():
            self._compute(cache, prompt[:SYSTEM_TOKENS])
            for (first, end), number in zip(segments, ORDERS[place], strict=True):
                self._compute(cache, prompt[cache.get_seq_length() : first])
                if number == MISSING:
                    self._compute(cache, prompt[first:end])
                    continue
                alone = DynamicCache()
                self._compute(alone, [*SINK, *prompt[first:end]])
                scored.append([first, end])
                shift = 0 if is_unturned else first - len(SINK)
                for index, layer in enumerate(alone.layers):
                    keys = self._turned(layer.keys[:, :, len(SINK) :], shift)
                    cache.update(keys, layer.values[:, :, len(SINK) :], index)
            question = prompt[-min(QUESTION_TOKENS[place], STEP_TOKENS // 2) :]
            attentions = self._compute(cache, question)
        summed = attentions[CHECK_LAYERS["full"]][0].sum(dim=(0, 1))
        scores = [float(summed[token]) for first, end in scored for token in range(first, end)]
        return {"scored": scored, "scores": scores}

    def _compute(self, cache: Any, tokens: list[int]) -> Any:
        """Go on behind what is in a cache."""
        import torch

        if not tokens:
            return None
        first = cache.get_seq_length()
        positions = torch.arange(first, first + len(tokens))[None]
        return self._model(
            torch.tensor([tokens]),
            past_key_values=cache,
            position_ids=positions,
            output_attentions=True,
        ).attentions

    def _turned(self, keys: Any, shift_tokens: int) -> Any:
        import torch

        cos, sin = self._model.model.rotary_emb(keys, torch.tensor([[shift_tokens]]))
        one, other = keys.chunk(2, dim=-1)
        return keys * cos[:, None] + torch.cat([-other, one], dim=-1) * sin[:, None]
