# SPDX-License-Identifier: Apache-2.0
"""What a question is compared with, and what becomes of its scores."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from support.connector.small_engine import Pool, Request, SmallEngine, full_only

from vllm_ascend_kvext.blending.segment_rows import SegmentLayout
from vllm_ascend_kvext.connector.blend_counters import BlendCounters
from vllm_ascend_kvext.connector.engine import Engine
from vllm_ascend_kvext.connector.load_jobs import _joined
from vllm_ascend_kvext.connector.messages import WorkerLayout
from vllm_ascend_kvext.connector.options import Selector
from vllm_ascend_kvext.connector.questions import (
    MOST_PROBED_TOKENS,
    QuestionOptions,
    Questions,
)
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit, PlacedRows

ONE, OTHER, THIRD = (object.__new__(Entry) for _ in range(3))
HIT = Hit(
    prefix=None,  # type: ignore[arg-type]  # of no meaning here
    after_tokens=0,
    boundary_tokens=100,
    entries=(),
    shortfall=None,
    holes=((0, 20), (50, 70)),
    placed=(
        PlacedRows(ONE, 20, 42, 8),
        PlacedRows(OTHER, 42, 50, 30),
        PlacedRows(THIRD, 70, 100, 10),
    ),
    heads=(PlacedRows(ONE, 12, 20, 0), PlacedRows(THIRD, 60, 70, 0)),
)
"""A segment of two entries that begins at token 12, and another that begins at token 60."""


def questions_of(ratio: float = 0.0, **engine: Any) -> tuple[Questions, BlendCounters]:
    counters = BlendCounters()
    parts = Engine({}, [], Pool(), 10, 4, **({"step_tokens": 1000} | engine))
    return Questions(parts, QuestionOptions(ratio, 8), counters), counters


def request_of(num_tokens: int) -> Request:
    return Request("a", "x" * num_tokens, num_tokens)


def test_the_first_pass_computes_what_is_in_no_segment_and_the_question() -> None:
    questions, _ = questions_of()
    plan = questions.begin(request_of(130), HIT)
    assert plan is not None
    assert plan.run == Run(100, 130)
    assert plan.missing == (Run(0, 12), Run(50, 60))
    assert questions.scored("a") == (Run(12, 50), Run(60, 100))


@pytest.mark.parametrize(
    ("num_tokens", "engine", "expected"),
    [
        (1000, {}, MOST_PROBED_TOKENS),
        (1000, {"step_tokens": 64}, 32),
        (1000, {"step_tokens": 1}, 1),
        (130, {"most_request_tokens": 130}, 29),
        (101, {}, 1),
    ],
)
def test_a_question_is_no_longer_than_there_is_room_for(
    num_tokens: int, engine: dict[str, int], expected: int
) -> None:
    questions, _ = questions_of(**engine)
    plan = questions.begin(request_of(num_tokens), HIT)
    assert plan is not None
    assert plan.run.num_tokens == expected


def test_prompt_that_fills_the_context_is_not_looked_at() -> None:
    questions, _ = questions_of(most_request_tokens=101)
    assert questions.begin(request_of(101), HIT) is None


def test_what_has_the_highest_scores_is_chosen_behind_heads() -> None:
    questions, counters = questions_of()
    questions.begin(request_of(130), HIT)
    scores = np.zeros(78, np.float32)
    scores[0], scores[38] = 9, 9  # of heads
    scores[45 - 12], scores[38 + 99 - 60] = 1, 1
    assert questions.choose("a", scores) == (Run(44, 50), Run(94, 100))
    assert (counters.scored_probes, counters.lost_probes) == (1, 0)


@pytest.mark.parametrize("value", [None, np.nan, np.inf])
def test_scores_that_say_nothing_choose_nothing(value: float | None) -> None:
    questions, counters = questions_of(ratio=1.0)
    questions.begin(request_of(130), HIT)
    scores = None if value is None else np.full(78, value, np.float32)
    assert questions.choose("a", scores) == ()
    assert (counters.scored_probes, counters.lost_probes) == (0, 1)


def test_rows_of_one_entry_are_read_as_one() -> None:
    assert _joined((*HIT.placed, *HIT.heads)) == [
        PlacedRows(ONE, 12, 42, 0),
        PlacedRows(OTHER, 42, 50, 30),
        PlacedRows(THIRD, 60, 100, 0),
    ]
    apart = [PlacedRows(ONE, 0, 5, 0), PlacedRows(ONE, 5, 9, 0)]
    assert _joined(apart) == apart


@pytest.mark.parametrize("refusal", ["", "it is compiled. Serve with --enforce-eager."])
def test_one_worker_that_cannot_compare_leaves_it_at_heads(
    refusal: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    engine = SmallEngine(full_only, blending=True, blend_selector=Selector.QUESTION)
    workers = [
        WorkerLayout(full_only(), "f", 1 << 20, SegmentLayout((64,), "f"), "", each)
        for each in ("", refusal)
    ]
    caplog.clear()
    engine.side.set_workers(workers)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.getMessage() for record in warnings] == (
        [f"KvextConnector: blend_selector is heads: worker 1: {refusal}"] if refusal else []
    )
    blending = engine.side._parts.blending
    assert (blending.requests._questions is None) == bool(refusal)
