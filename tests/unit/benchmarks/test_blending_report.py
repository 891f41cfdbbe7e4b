# SPDX-License-Identifier: Apache-2.0
"""From answers to a table."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from blending import report
from blending.answers import Answer, Answers
from blending.metrics import divergence
from blending.modes import FULL, HEADS_16, HEADS_16_TEXT, MODES, PLAIN, PREFIX_CACHING
from blending.prompts import Prompt, Workload
from blending.questions import Kind

RED, BLUE, DOT = 1, 2, 3
TEXTS = {RED: " red", BLUE: " blue", DOT: "."}


def decode(tokens: Sequence[int]) -> str:
    return "".join(TEXTS[token] for token in tokens)


def an_answer(said: int, seconds: float, computed: int, **marks: int) -> Answer:
    other = BLUE if said == RED else RED
    top = [{said: -0.2, other: -2.0}, {DOT: -0.1}, {said: -0.1}]
    return Answer([said, DOT, RED], top, seconds, computed, **marks)


@pytest.fixture
def workload() -> Workload:
    kinds = [Kind.FACT, Kind.REFERENCE, Kind.FACT, Kind.FACT]
    prompts = [Prompt((0,) * 100, ((0, 80),), kind, n // 2, "red") for n, kind in enumerate(kinds)]
    return Workload(((0,) * 80,), tuple(prompts))


@pytest.fixture
def found() -> dict[str, Answers]:
    marks = {"exact_tokens": 5, "reused_tokens": 64, "recomputed_tokens": 16}
    return {
        FULL.name: Answers(FULL.name, [], [an_answer(RED, 4.0, 100) for _ in range(4)]),
        PREFIX_CACHING.name: Answers(
            PREFIX_CACHING.name, [], [an_answer(RED, 3.0, 95) for _ in range(4)]
        ),
        PLAIN.name: Answers(
            PLAIN.name,
            [0.5],
            [an_answer(said, 1.0, 20) for said in (BLUE, RED, BLUE, BLUE)],
        ),
        HEADS_16.name: Answers(
            HEADS_16.name,
            [0.5],
            [an_answer(said, 1.5, 36, **marks) for said in (RED, RED, RED, BLUE)],
        ),
    }


def test_rows_are_by_mode_and_missing_documents(
    workload: Workload, found: dict[str, Answers]
) -> None:
    rows = {(row.mode, row.num_missing): row for row in report.rows(workload, found, decode)}
    assert len(rows) == 12  # With those of all prompts.
    assert rows[HEADS_16.name, None].num_prompts == 4
    assert rows[HEADS_16.name, None].exact == 0.75
    heads = rows[HEADS_16.name, 1]
    assert heads.num_prompts == 2
    assert heads.exact == 0.5
    assert heads.exact_difference.mean == -0.5
    assert heads.computed_share == pytest.approx(0.36)
    assert heads.segment_share == pytest.approx(0.2)
    assert heads.exact_recovered is not None
    assert heads.exact_recovered.mean == 0.5
    assert heads.p50_s == 1.5
    assert rows[HEADS_16.name, 0].exact_recovered.mean == 1.0
    assert rows[PLAIN.name, 0].exact_of_kind == {"fact": 0.0, "reference": 1.0}
    assert rows[PLAIN.name, 0].segment_share is None


def test_only_the_answer_is_compared_with_full_recompute(
    workload: Workload, found: dict[str, Answers]
) -> None:
    """Of three tokens, the first is the answer; behind it the model goes on with something else."""
    assert report.answer_length([RED, DOT, BLUE], decode) == 1
    assert report.answer_length([RED, BLUE, DOT], decode) == 2
    rows = {(row.mode, row.num_missing): row for row in report.rows(workload, found, decode)}
    assert rows[FULL.name, 0].divergence == pytest.approx(0.0)
    assert rows[FULL.name, 0].same_top == 1.0
    assert rows[PLAIN.name, 0].same_top == 0.5
    # Of the two answers of one token, one differs.
    differing = divergence({RED: -0.2, BLUE: -2.0}, {BLUE: -0.2, RED: -2.0})
    assert rows[PLAIN.name, 0].divergence == pytest.approx(differing / 2)


def test_verdicts_say_what_is_missed(workload: Workload, found: dict[str, Answers]) -> None:
    lines = list(report.verdicts(list(report.rows(workload, found, decode))))
    words = {line[9:]: line.startswith("met") for line in lines}
    of_all = {text: is_met for text, is_met in words.items() if "all missing" in text}
    assert list(of_all.values()) == [False, True, True, True]
    assert {text: words[text] for text in words if text not in of_all} == {
        "heads 16, 0 missing: recovers 100% [100%, 100%] of exact match": True,
        "heads 16, 0 missing: computes 20.0% of what is stored": True,
        "heads 16, 0 missing: first token 2.7 x sooner than full recompute": True,
        "heads 16, 0 missing: first token 2.0 x sooner than prefix caching alone": True,
        "heads 16, 1 missing: recovers 50% [0%, 100%] of exact match": False,
        "heads 16, 1 missing: computes 20.0% of what is stored": True,
        "heads 16, 1 missing: first token 2.7 x sooner than full recompute": True,
        "heads 16, 1 missing: first token 2.0 x sooner than prefix caching alone": True,
    }


def test_a_line_has_a_cell_for_every_column(workload: Workload, found: dict[str, Answers]) -> None:
    bars = [place for place, letter in enumerate(report.HEAD) if letter == "|"]
    for row in report.rows(workload, found, decode):
        line = report.line(row)
        assert [line[place] for place in bars] == ["|"] * len(bars)
        assert json.loads(json.dumps(row.to_json()))["mode"] == row.mode


def test_storing_is_shown(workload: Workload, found: dict[str, Answers]) -> None:
    line = report.storing(workload, found[PLAIN.name])
    assert line == "stored before: 1 documents, 80 tokens, in 0.5 s (160 tokens/s)"


def test_answers_are_the_same_when_they_are_read(found: dict[str, Answers], tmp_path: Path) -> None:
    for answers in found.values():
        answers.write(tmp_path / "answers.json")
        assert Answers.read(tmp_path / "answers.json") == answers


def test_modes_differ_in_what_the_connector_is_told() -> None:
    assert FULL.kv_transfer_config(1.0) is None
    told = {
        name: json.dumps(
            mode.kv_transfer_config(1.0, (1, 2) if mode.has_text_sink else None), sort_keys=True
        )
        for name, mode in MODES.items()
        if mode.blends
    }
    assert len(set(told.values())) == len(told) == 10
    extra = MODES["question 5 %"].kv_transfer_config(2.0)["kv_connector_extra_config"]
    assert extra == {
        "host_memory_gib": 2.0,
        "blending": True,
        "blend_selector": "question",
        "blend_ratio": 0.05,
    }
    behind_text = HEADS_16_TEXT.kv_transfer_config(2.0, (1, 2))["kv_connector_extra_config"]
    assert behind_text == {
        "host_memory_gib": 2.0,
        "blending": True,
        "blend_selector": "heads",
        "blend_head_tokens": 16,
        "segment_sink": [1, 2],
    }
