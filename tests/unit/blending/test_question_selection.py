# SPDX-License-Identifier: Apache-2.0
"""Which reused tokens are computed because the question attends to them."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.blending.question_selection import select_runs
from vllm_ascend_kvext.holes.span_plan import Run


def tokens_of(runs: tuple[Run, ...]) -> set[int]:
    return {token for run in runs for token in range(*run)}


def scores_at(scored: list[Run], *peaks: tuple[int, float]) -> np.ndarray:
    """Zeros but for some tokens of the prompt."""
    tokens = [token for run in scored for token in range(*run)]
    found = np.zeros(len(tokens), np.float32)
    for token, score in peaks:
        found[tokens.index(token)] = score
    return found


SEGMENTS = [Run(10, 50), Run(60, 100)]
REUSED = [Run(18, 50), Run(68, 100)]


def test_the_runs_with_the_highest_scores_are_chosen() -> None:
    scores = scores_at(SEGMENTS, (27, 5), (75, 1), (92, 3), (33, 2))
    assert select_runs(SEGMENTS, scores, REUSED, 0.25, 8) == (Run(26, 34), Run(92, 100))
    assert select_runs(SEGMENTS, scores, REUSED, 0.5, 8) == (
        *(Run(18, 34), Run(68, 76)),
        Run(92, 100),
    )


def test_scores_of_heads_choose_nothing() -> None:
    scores = scores_at(SEGMENTS, (10, 99), (17, 99), (60, 99), (40, 1), (80, 1))
    assert select_runs(SEGMENTS, scores, REUSED, 0.0, 4) == (Run(38, 42), Run(80, 84))


def test_each_segment_has_a_run_whatever_the_ratio() -> None:
    scores = scores_at(SEGMENTS, (20, 9), (28, 8), (36, 7))
    assert select_runs(SEGMENTS, scores, REUSED, 0.0, 8) == (Run(18, 26), Run(68, 76))
    assert select_runs(SEGMENTS, scores, REUSED, 0.25, 8) == (Run(18, 26), Run(68, 76))
    assert select_runs(SEGMENTS, scores, REUSED, 0.375, 8) == (Run(18, 34), Run(68, 76))


def test_segments_that_touch_have_a_run_each() -> None:
    segments = [Run(0, 16), Run(16, 32)]
    scores = scores_at(segments, (0, 9), (8, 8), (20, 1))
    assert select_runs(segments, scores, segments, 0.25, 4) == (Run(0, 4), Run(20, 24))


def test_the_last_run_of_a_segment_is_what_is_left() -> None:
    segments = [Run(0, 10)]
    assert select_runs(segments, scores_at(segments, (9, 1)), segments, 0.0, 8) == (Run(8, 10),)


def test_equal_scores_choose_what_comes_first() -> None:
    scores = np.ones(80, np.float32)
    assert select_runs(SEGMENTS, scores, REUSED, 0.375, 8) == (Run(18, 34), Run(68, 76))


def test_nothing_reused_is_nothing_chosen() -> None:
    assert select_runs([], np.zeros(0, np.float32), [], 0.5, 8) == ()


@st.composite
def prompts(draw: st.DrawFn) -> tuple[list[Run], list[Run], np.ndarray]:
    """Segments, what of each is reused, and scores with many that are equal."""
    segments: list[Run] = []
    reused: list[Run] = []
    position = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(1, 5))):
        first, head, body, rest = position, *(draw(st.integers(*of)) for of in LENGTHS)
        segments.append(Run(first, first + head + body + rest))
        if draw(st.booleans()):
            reused.append(Run(first + head, first + head + body))
        position = segments[-1].end_tokens + draw(st.integers(0, 3))
    num_tokens = sum(run.num_tokens for run in segments)
    scores = draw(st.lists(st.integers(0, 4), min_size=num_tokens, max_size=num_tokens))
    return segments, reused, np.array(scores, np.float32)


LENGTHS = ((0, 6), (1, 40), (0, 3))


@given(prompts(), st.floats(0, 1), st.integers(4, 16))
def test_as_tried_one_after_the_other(
    prompt: tuple[list[Run], list[Run], np.ndarray], ratio: float, run_tokens: int
) -> None:
    segments, reused, scores = prompt
    score_of = dict(
        zip((token for run in segments for token in range(*run)), scores.tolist(), strict=True)
    )
    pieces = []
    for number, run in enumerate(reused):
        for first in range(run.first_tokens, run.end_tokens, run_tokens):
            tokens = range(first, min(first + run_tokens, run.end_tokens))
            pieces.append((-sum(score_of[token] for token in tokens), first, number, tokens))
    pieces.sort(key=lambda piece: piece[:2])
    chosen: set[int] = set()
    seen: set[int] = set()
    others = []
    for piece in pieces:
        if piece[2] in seen:
            others.append(piece)
        else:
            seen.add(piece[2])
            chosen.update(piece[3])
    budget = int(ratio * sum(run.num_tokens for run in reused))
    for *_, tokens in others:
        if len(chosen) + len(tokens) <= budget:
            chosen.update(tokens)
    found = select_runs(segments, scores, reused, ratio, run_tokens)
    assert tokens_of(found) == chosen
    assert sum(run.num_tokens for run in found) == len(chosen)
    assert list(found) == sorted(found)


@given(prompts(), st.integers(4, 16))
def test_a_ratio_of_one_computes_everything(
    prompt: tuple[list[Run], list[Run], np.ndarray], run_tokens: int
) -> None:
    segments, reused, scores = prompt
    found = select_runs(segments, scores, reused, 1.0, run_tokens)
    assert tokens_of(found) == tokens_of(tuple(reused))


def test_scores_of_many_tokens_are_as_exact_as_those_of_few() -> None:
    rng = random.Random(0)
    segments = [Run(0, 1 << 16)]
    scores = np.full(1 << 16, 1e6, np.float32)
    best = rng.randrange(1 << 13)
    scores[8 * best] += 1
    assert select_runs(segments, scores, segments, 0.0, 8) == (Run(8 * best, 8 * best + 8),)
