# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The questions that a model is asked before its segments are reused, and how they are judged."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest

from vllm_ascend_kvext.errors import BlendingError
from vllm_ascend_kvext.segments.keys.key_check import MIN_PAIRS, find_pairs
from vllm_ascend_kvext.segments.model_gate import (
    MIN_LIMITS,
    NUM_MOVED,
    NUM_SEGMENTS,
    Answer,
    GatePrompts,
    GateQuestion,
    GateReply,
    Heads,
    InPlace,
    ModelGate,
    Moved,
    difference,
    judge,
)
from vllm_ascend_kvext.token_range import TokenRange

SINK = (1, 2)
VOCABULARY_TOKENS = 1000
PAGE_TOKENS = 16
HEADS = Heads(16, 0)
WITH_WINDOWS = Heads(16, 63)

# The questions.


def prompts(repaired: int = 16, min_reused: int = 32, room: int = 4096) -> GatePrompts:
    gate = ModelGate(FakeEngine(), Heads(repaired, 0), SINK, min_reused, PAGE_TOKENS, room)
    return gate.make_prompts(VOCABULARY_TOKENS)


def test_segments_stand_in_place_behind_the_sink_and_elsewhere_in_other_orders() -> None:
    found = prompts()
    assert found == prompts(), "the questions must be the same each time"
    assert len(set(found.segments)) == NUM_SEGMENTS
    assert all(len(find_pairs(segment)) >= MIN_PAIRS for segment in found.segments)
    for prompt, segment in zip(found.in_place, found.segments, strict=True):
        (place,) = prompt.segments
        assert prompt.token_ids[: place.end_tokens] == SINK + segment
    assert len(found.moved) == NUM_MOVED == len({prompt.token_ids for prompt in found.moved})
    for prompt in found.moved:
        placed = [prompt.token_ids[slice(*place)] for place in prompt.segments]
        assert sorted(placed) == sorted(found.segments)
        assert prompt.segments[0].first_tokens > len(SINK)
    assert len({prompt.token_ids[slice(*prompt.segments[0])] for prompt in found.moved}) > 1
    ids = {token for segment in found.segments for token in segment} | set(found.others)
    assert min(ids) >= VOCABULARY_TOKENS // 4 and max(ids) < VOCABULARY_TOKENS * 3 // 4


@pytest.mark.parametrize(("repaired", "min_reused"), [(16, 500), (300, 1), (0, 1)])
def test_something_of_each_segment_would_be_reused(repaired: int, min_reused: int) -> None:
    for segment in prompts(repaired, min_reused).segments:
        assert len(segment) >= max(repaired + min_reused, 2 * repaired)


def test_tokens_are_replaced_where_it_is_said() -> None:
    found = prompts()
    prompt = found.in_place[0]
    runs = [TokenRange(5, 20), TokenRange(30, 40)]
    expected = list(prompt.token_ids)
    for place in (place for run in runs for place in range(*run)):
        expected[place] = found.others[place]
    assert list(prompt.without(runs, found.others)) == expected


def test_with_little_room_fewer_segments_stand_together() -> None:
    found = prompts(room=150)
    assert {len(prompt.segments) for prompt in found.moved} == {1}
    assert max(len(prompt.token_ids) for prompt in (*found.in_place, *found.moved)) <= 150
    with pytest.raises(BlendingError, match="a segment of 96 is reused, found room for 100"):
        prompts(room=100)


# The order of the questions, and the engine that gets them.


class FakeEngine:
    """An engine that gives the same answer to every question, unless a test has set another.

    Attributes:
        asked: The questions that were computed together, in order. None stands for an emptied
        cache.
    """

    def __init__(self) -> None:
        self.asked: list[list[GateQuestion] | None] = []
        self.heads = HEADS
        self.answer: Callable[[GateQuestion], Answer] = lambda question: ALONE
        self.reused_share = 1.0
        self.keys_are_checked = True
        self.why_no_reuse = ""

    def ask(self, questions: Sequence[GateQuestion]) -> list[GateReply]:
        self.asked.append(list(questions))
        return [(self.answer(question), self._params(question)) for question in questions]

    def forget_cached(self) -> None:
        self.asked.append(None)

    def compute_heads(self, heads: Heads) -> None:
        self.heads = heads

    def _params(self, question: GateQuestion) -> dict[str, object]:
        num_stored = (len(question.token_ids) - len(SINK)) * question.stores
        runs = [self.heads.reused(segment) for segment in question.segments]
        num_reused = sum(run.num_tokens for run in runs if run is not None)
        return {
            "kvext_stored_tokens": num_stored,
            "kvext_reused_tokens": int(num_reused * self.reused_share),
        }

    @property
    def questions(self) -> list[GateQuestion]:
        return [question for questions in self.asked for question in questions or ()]


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def check(engine: FakeEngine, heads: Heads = HEADS, page_tokens: int = PAGE_TOKENS) -> str:
    gate = ModelGate(engine, heads, SINK, 32, page_tokens, 4096)
    return gate.check(VOCABULARY_TOKENS, "float32")


def test_what_is_reused_lies_in_several_pages(engine: FakeEngine) -> None:
    """If a segment lay in one page, faults of page tables would not show."""
    check(engine, page_tokens=128)
    for segment in (each for question in engine.questions for each in question.segments):
        run = HEADS.reused(segment)
        assert run is not None and run.num_tokens > 128


def test_nothing_that_is_asked_is_found_in_the_prefix_cache(engine: FakeEngine) -> None:
    check(engine, WITH_WINDOWS)
    computed: set[tuple[str, tuple[int, ...]]] = set()
    for questions in engine.asked:
        if questions is None:
            computed.clear()
            continue
        of_batch = {(each.cache_salt, each.token_ids[:PAGE_TOKENS]) for each in questions}
        assert any(each.segments for each in questions) or not (computed & of_batch)
        computed |= of_batch
    of_segments = {each.cache_salt for each in engine.questions if each.segments}
    assert of_segments == {each.cache_salt for each in engine.questions if each.stores}
    of_others = {each.cache_salt for each in engine.questions if not (each.segments or each.stores)}
    assert of_segments.isdisjoint(of_others)


@pytest.mark.parametrize("helps", [True, False])
def test_models_with_windows_are_asked_whether_repair_helps(
    engine: FakeEngine, helps: bool
) -> None:
    far = Heads(0, 0) if helps else WITH_WINDOWS
    engine.answer = lambda question: (
        FAR if len(question.segments) > 1 and engine.heads == far else ALONE
    )
    with nullcontext() if helps else pytest.raises(BlendingError, match="nearer"):
        check(engine, WITH_WINDOWS)
    assert len([each for each in engine.questions if len(each.segments) > 1]) == 2 * NUM_MOVED
    assert engine.heads == WITH_WINDOWS


def test_wrong_keys_end_it(engine: FakeEngine) -> None:
    engine.why_no_reuse = "keys differ"
    with pytest.raises(BlendingError, match="keys differ"):
        check(engine)
    assert all(question.stores for question in engine.questions)


@pytest.mark.parametrize(
    ("attribute", "value", "expected"),
    [
        ("reused_share", 0.5, "to be reused, found"),
        ("keys_are_checked", False, "keys of stored segments to be compared"),
    ],
)
def test_what_cannot_be_asked_is_said(
    engine: FakeEngine, attribute: str, value: Any, expected: str
) -> None:
    setattr(engine, attribute, value)
    with pytest.raises(BlendingError, match=expected):
        check(engine)


# The judgement of the answers.

ALONE = {5: -0.5, 6: -1.5, 7: -2.5}
FAR = {5: -2.5, 6: -3.5, 7: -4.5}
INF = math.inf


def in_place(reused: float = 0.0, noise: float = 0.0, other: float = 2.0) -> InPlace:
    return reused, noise, other


def moved(*differences: tuple[float, float]) -> list[Moved]:
    return list(differences)


NOISE = in_place(0.03, noise=0.01)
CASES: dict[str, tuple[list[InPlace], list[Moved], str, str]] = {
    "what differs is shown": ([in_place(0.0002)], [], "float32", "by 0.0002 where segments are"),
    "other tokens, too": ([in_place()], [], "float32", "by 2 with other tokens"),
    "noise of two runs without reuse": ([NOISE], [], "float32", "by 0.01 between two runs"),
    "more than noise": (
        [NOISE, in_place(0.05)],
        [],
        "float32",
        "expected reuse in place to change them by at most 0.04",
    ),
    "an unknown type is the coarsest": ([in_place(0.05)], [], "float8_e4m3fn", "by 0.05 where"),
    "other tokens make no difference": (
        *([in_place(), in_place(other=0.0005)], [], "float32"),
        "the limit is 0.001, which says nothing",
    ),
    "repair helps": (
        *([in_place()], moved((0.8, 0.3), (0.6, 0.4)), "float32"),
        "moved, by 0.7 as stored and 0.35 repaired",
    ),
    "repair sometimes helps": (
        *([in_place()], moved((0.3, 0.8), (0.8, 0.4), (0.3, 0.4)), "float32"),
        "moved, by 0.47 as stored and 0.53 repaired",
    ),
    "repair does harm": (
        *([in_place()], moved((0.3, 0.8), (0.4, 0.8), (0.2, 0.8)), "float32"),
        "expected that computing the first tokens of segments brings answers nearer",
    ),
    "no numbers": ([in_place(INF)], [], "float32", "expected reuse in place"),
    # The limit may be NaN, too.
    "no numbers anywhere": ([(INF, INF, INF)], [], "float32", "expected reuse in place"),
    **{
        f"moved, no numbers {number}": (
            *([in_place()], moved((0.8, 0.3), each), "float32"),
            "expected that computing",
        )
        for number, each in enumerate(((INF, 0.0), (0.0, INF), (INF, INF)))
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_model_passes_or_the_message_says_what_was_expected(name: str) -> None:
    *asked, words = CASES[name]
    if "expected" in words:
        with pytest.raises(BlendingError, match=words):
            judge(*asked)
    else:
        assert words in judge(*asked)


@pytest.mark.parametrize("dtype", MIN_LIMITS)
def test_what_is_reused_in_place_answers_the_same_within_the_types_rounding(dtype: str) -> None:
    limit = MIN_LIMITS[dtype]
    judge([in_place(0.9 * limit)], [], dtype)
    with pytest.raises(BlendingError, match="expected reuse in place to change them by at most"):
        judge([in_place(), in_place(1.1 * limit)], [], dtype)


@pytest.mark.parametrize("wrong", [{}, {5: math.nan, 6: 0.0, 7: 0.0}, {5: INF, 6: 0.0, 7: 0.0}])
def test_answers_that_are_no_numbers_differ_by_infinity(wrong: Answer) -> None:
    assert difference(ALONE, wrong) == difference(wrong, ALONE) == difference(wrong, wrong) == INF


def test_tokens_that_are_missing_or_never_answered() -> None:
    assert difference({1: -1.0, 2: -3.0}, {1: -1.0, 3: -2.0}) == pytest.approx(0.5)
    never = {**ALONE, 8: -math.inf}
    assert difference(never, never) == 0
    assert difference(never, ALONE) == math.inf
