# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The keys that a question is compared with, and the use of its scores."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pytest_mock import MockerFixture

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.holes.load_plan import Span, with_holes
from vllm_ascend_kvext.retention.offload_boundaries import OffloadBoundaries
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.messages import SegmentsOfWorker
from vllm_ascend_kvext.segments.options import SegmentOptions, Selector
from vllm_ascend_kvext.segments.scheduler import make_segments
from vllm_ascend_kvext.segments.scheduler.blended_loads import _joined
from vllm_ascend_kvext.segments.scheduler.blended_plan import BlendedPlan
from vllm_ascend_kvext.segments.scheduler.questions import (
    MAX_PROBED_TOKENS,
    Questions,
)
from vllm_ascend_kvext.segments.segment_tokens import NO_SEGMENT_TOKENS
from vllm_ascend_kvext.segments.token_rows import SegmentLayout
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.token_range import TokenRange

ONE, OTHER, THIRD = (object.__new__(Entry) for _ in range(3))
LOADED = (
    Span(12, 20, ONE, 0, is_computed=True),
    Span(20, 42, ONE, 8),
    Span(42, 50, OTHER, 30),
    Span(60, 70, THIRD, 0, is_computed=True),
    Span(70, 100, THIRD, 10),
)
"""A segment of two entries that begins at token 12, and one that begins at token 60."""

PLAN = BlendedPlan(
    prefix=None,  # type: ignore[arg-type]  # of no meaning here
    after_tokens=0,
    boundary_tokens=100,
    spans=tuple(with_holes(0, LOADED, 100)),
    tails={},
    first_blended_tokens=0,
    segments_end_tokens=0,
    window_blocks=0,
)


def questions_of(ratio: float = 0.0, **engine: Any) -> tuple[Questions, SegmentCounters]:
    counters = SegmentCounters()
    parts = SchedulerView(
        {}, [], None, 10, 4, OffloadBoundaries, **({"max_num_batched_tokens": 1000} | engine)
    )  # type: ignore[arg-type]
    return Questions(parts, ratio, counters), counters


def request_of(num_tokens: int) -> Any:
    return SimpleNamespace(request_id="a", num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("num_tokens", "engine", "expected"),
    [
        (1000, {}, MAX_PROBED_TOKENS),
        (1000, {"max_num_batched_tokens": 64}, 32),
        (1000, {"max_num_batched_tokens": 1}, 1),
        (130, {"max_model_len": 130}, 29),
        (101, {}, 1),
        (101, {"max_model_len": 101}, None),  # The prompt fills the context.
    ],
)
def test_a_question_is_no_longer_than_there_is_room_for(
    num_tokens: int, engine: dict[str, int], expected: int | None
) -> None:
    questions, _ = questions_of(**engine)
    plan = questions.begin(request_of(num_tokens), PLAN)
    assert (plan and plan.run.num_tokens) == expected


@pytest.mark.parametrize(
    ("segments_end_tokens", "num_tokens", "expected"),
    [
        (100, 130, (100, 130)),
        (120, 130, (120, 130)),  # The last segment is not stored, but is not the question.
        (130, 130, (100, 130)),
        (500, 130, (100, 130)),
        (100, 400, (100, 356)),
        (390, 400, (346, 356)),  # The question's end counts as right behind the segments.
    ],
)
def test_the_question_stands_behind_the_last_segment(
    segments_end_tokens: int, num_tokens: int, expected: tuple[int, int]
) -> None:
    questions, _ = questions_of()
    plan = dataclasses.replace(PLAN, segments_end_tokens=segments_end_tokens)
    probe = questions.begin(request_of(num_tokens), plan)
    assert probe is not None and probe.run == (100, min(num_tokens, 356))
    assert questions.queries("a", probe.run) == expected


@pytest.mark.parametrize("value", [None, np.nan, np.inf])
def test_scores_that_say_nothing_choose_nothing(value: float | None) -> None:
    questions, counters = questions_of(ratio=1.0)
    questions.begin(request_of(130), PLAN)
    scores = None if value is None else np.full(78, value, np.float32)
    assert questions.choose("a", scores) == ()
    assert (counters.scored_probes, counters.lost_probes) == (0, 1)


def test_what_is_exact_is_compared_and_never_chosen() -> None:
    questions, _ = questions_of(ratio=1.0)
    exact = [each._replace(is_exact=each.entry is THIRD) for each in PLAN.spans]
    questions.begin(request_of(130), dataclasses.replace(PLAN, spans=tuple(exact)))
    assert questions.scored("a") == (TokenRange(12, 50), TokenRange(60, 100))
    assert questions.choose("a", np.ones(78, np.float32)) == (TokenRange(20, 50),)


def test_rows_of_one_entry_are_read_as_one() -> None:
    assert [span[:4] for span in _joined(LOADED)] == [
        (12, 42, ONE, 0),
        (42, 50, OTHER, 30),
        (60, 100, THIRD, 0),
    ]
    apart = [Span(0, 5, ONE), Span(5, 9, ONE)]
    assert _joined(apart) == apart


@pytest.mark.parametrize("selector", [None, Selector.QUESTION])
@pytest.mark.parametrize("refusal", ["", "it is compiled. Serve with --enforce-eager."])
def test_one_worker_that_cannot_compare_leaves_it_at_heads(
    refusal: str, selector: Selector | None, mocker: MockerFixture
) -> None:
    logger = mocker.patch.object(make_segments, "logger")
    layout = mocker.Mock(tokens_per_page={0: 4}, **{"window_pages.return_value": {}})
    engine = mocker.Mock(
        managers=[],
        has_draft_layers=False,
        has_other_connectors=False,
        num_data_parallel=1,
        max_model_len=64,
    )
    place = mocker.Mock(view=engine, layout=layout, computes_holes=True)
    options = SegmentOptions(selector=selector)
    layout = SegmentLayout((64,))
    workers = [
        WorkerLayout(None, 0, SegmentsOfWorker(layout, probe_refusal=each))  # type: ignore[arg-type]
        for each in ("", refusal)
    ]
    found = make_segments.make_segments(place, options, False, NO_SEGMENT_TOKENS, workers)
    logged = [(call.args[0], call.args[1] % call.args[2:]) for call in logger.log.mock_calls]
    level = logging.INFO if selector is None else logging.WARNING
    message = f"KvextConnector: segments: selector is heads: worker 1: {refusal}"
    assert logged == ([(level, message)] if refusal else [])
    assert found is not None and (found.questions is None) == bool(refusal)
    assert found.blended.options.head_tokens == (16 if refusal else 4)
    assert found.learning is not None and not found.learning.learns_new


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (SegmentLayout((64, 32)), "worker 1 has other bytes per token than worker 0"),
        (SegmentLayout((64,), num_sections=2), "worker 1 is on a host with 2 different contents"),
    ],
    ids=["row bytes", "sections"],
)
def test_workers_that_differ_turn_segments_off(
    other: SegmentLayout, says: str, mocker: MockerFixture
) -> None:
    logger = mocker.patch.object(make_segments, "logger")
    engine = mocker.Mock(has_draft_layers=False)
    place = mocker.Mock(view=engine, computes_holes=True)
    workers = [
        WorkerLayout(None, 0, SegmentsOfWorker(each))  # type: ignore[arg-type]
        for each in (SegmentLayout((64,)), other)
    ]
    options = SegmentOptions()
    assert make_segments.make_segments(place, options, False, NO_SEGMENT_TOKENS, workers) is None
    (call,) = logger.warning.mock_calls
    assert (call.args[0] % call.args[1]).startswith(f"KvextConnector: segments are off: {says}")


def test_the_first_pass_computes_what_is_in_no_segment_and_the_question() -> None:
    questions, _ = questions_of()
    plan = questions.begin(request_of(130), PLAN)
    assert plan is not None
    assert plan.run == TokenRange(100, 130)
    assert plan.missing == (TokenRange(0, 12), TokenRange(50, 60))
    assert questions.scored("a") == (TokenRange(12, 50), TokenRange(60, 100))


def test_what_has_the_highest_scores_is_chosen_behind_heads() -> None:
    questions, counters = questions_of()
    questions.begin(request_of(130), PLAN)
    scores = np.zeros(78, np.float32)
    scores[0], scores[38] = 9, 9  # Scores of heads.
    scores[45 - 12], scores[38 + 99 - 60] = 1, 1
    assert questions.choose("a", scores) == (TokenRange(44, 50), TokenRange(94, 100))
    assert (counters.scored_probes, counters.lost_probes) == (1, 0)
