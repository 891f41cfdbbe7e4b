# SPDX-License-Identifier: Apache-2.0
"""Segments that no client stores, on the real engine: they are worth what a client's are."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import blending_models
import pytest
import served
from blending_workload import LEARNING, STORED_LENGTHS

SAME_TOLERANCE = 1e-4
"""Log-probabilities, fp32."""
DIFFERENT = 1e-2
"""What is approximate differs from what is exact by more."""
HEAD_TOKENS = 16

Reports = Mapping[str, dict[str, Any]]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Of an engine that learns, of one whose clients store, and of one where nobody does."""
    folder = tmp_path_factory.mktemp("learning")
    blending_models.WRITERS["llama"](folder)
    engines = {
        "learns": ({"learn_segments": True}, False),
        "is told": ({}, True),
        "does nothing": ({}, False),
    }
    plans = {
        name: {
            "model": str(folder),
            "scenarios": ["learned", *(["asleep"] if name == "learns" else [])],
            "stores": stores,
            "blending": blending,
            "engine": {},
        }
        for name, (blending, stores) in engines.items()
    }
    plans_path, report_path = folder / "plans.json", folder / "report.json"
    plans_path.write_text(json.dumps(plans))
    ended = served.run("blending_workload.py", [str(report_path), str(plans_path)], {}, most_s=300)
    assert not ended.exit_code, ended.log[-6000:]
    found: dict[str, dict[str, Any]] = json.loads(report_path.read_text())
    for name, report in found.items():
        assert "error" not in report, f"{name}: {report['error']}"
    return found


def reused_tokens(report: Mapping[str, Any]) -> list[int]:
    return [
        (answer["params"] or {}).get("kvext_reused_tokens", 0)
        for answer in report["asked"]["learned"]
    ]


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[float]:
    """By prompt: the largest difference of a log-probability of the first token of the answer."""
    found = []
    for mine, theirs in zip(one["asked"]["learned"], other["asked"]["learned"], strict=True):
        assert mine["prompt"] == theirs["prompt"]
        step, other_step = mine["logprobs"][0], theirs["logprobs"][0]
        least = min(other_step.values())
        found.append(
            max(abs(logprob - other_step.get(token, least)) for token, logprob in step.items())
        )
    return found


def test_what_two_prompts_have_had_is_stored_and_reused(reports: Reports) -> None:
    popular = [documents for _, documents in LEARNING]
    learned = [each[0] for each in reports["learns"]["facts"]["counts"]]
    assert learned[0] == 0
    assert [after - before for before, after in pairwise(learned)] == [len(p) for p in popular[1:]]
    expected = []
    stored: set[int] = set()
    for (order, _), new in zip(LEARNING, popular, strict=True):
        expected.append(sum(STORED_LENGTHS[i] - HEAD_TOKENS for i in order if i in stored))
        stored.update(new)
    assert reused_tokens(reports["learns"]) == expected
    assert expected[2] and expected[3]


def test_answers_are_those_after_a_client_has_stored_the_same(reports: Reports) -> None:
    learns, told, alone = (reports[name] for name in ("learns", "is told", "does nothing"))
    assert reused_tokens(learns) == reused_tokens(told)
    for one, other in zip(learns["asked"]["learned"], told["asked"]["learned"], strict=True):
        assert one["reply"] == other["reply"]
    assert max(differences(learns, told)) <= SAME_TOLERANCE
    assert reused_tokens(alone) == [0] * len(LEARNING)
    apart = differences(learns, alone)
    assert max(apart[:2]) <= SAME_TOLERANCE
    assert min(apart[2:]) > DIFFERENT


def test_nobody_is_answered_who_has_not_asked(reports: Reports) -> None:
    facts = reports["learns"]["facts"]
    assert facts["answers to nobody"] == 0
    assert facts["sent"] == len(LEARNING)


def test_sleep_ends_what_is_computed_and_queued(reports: Reports) -> None:
    facts = reports["learns"]["facts"]
    assert facts["before sleep"] == [1, True]
    assert facts["asleep"] == [0, False, {"cancelled": 2}]
    assert facts["learned after sleep"] == 2


@pytest.mark.parametrize("name", ["learns", "is told", "does nothing"])
def test_nothing_is_left_when_all_is_done(reports: Reports, name: str) -> None:
    assert set(reports[name]["left"].values()) == {0}
