# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which reused tokens are computed again because the question attends to them."""

from __future__ import annotations

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st

from vllm_ascend_kvext.segments.question_selection import select_runs
from vllm_ascend_kvext.token_range import TokenRange

LENGTHS = ((0, 6), (1, 40), (0, 3))
"""Lengths of a segment's head, of its reused part, and of the part that is not stored."""
Prompt = tuple[list[TokenRange], list[TokenRange], np.ndarray]


def tokens_of(runs: tuple[TokenRange, ...]) -> set[int]:
    return {token for run in runs for token in range(*run)}


@st.composite
def prompts(draw: st.DrawFn) -> Prompt:
    """Segments, the reused part of each, and scores. Many of the scores are equal."""
    segments: list[TokenRange] = []
    reused: list[TokenRange] = []
    position = draw(st.integers(0, 5))
    for _ in range(draw(st.integers(0, 5))):
        first, head, body, rest = position, *(draw(st.integers(*of)) for of in LENGTHS)
        segments.append(TokenRange(first, first + head + body + rest))
        if draw(st.booleans()):
            reused.append(TokenRange(first + head, first + head + body))
        position = segments[-1].end_tokens + draw(st.integers(0, 3))
    num_tokens = sum(run.num_tokens for run in segments)
    scores = draw(st.lists(st.integers(0, 4), min_size=num_tokens, max_size=num_tokens))
    return segments, reused, np.array(scores, np.float32)


TOUCHING = [TokenRange(0, 16), TokenRange(16, 32)]


@given(prompts(), st.floats(0, 1), st.integers(4, 16))
@example((TOUCHING, TOUCHING, np.array([9] * 8 + [8] * 24, np.float32)), 0.25, 4)
@example(([TokenRange(0, 12)], [TokenRange(4, 12)], np.array([9] * 4 + [1] * 8)), 0.0, 8)
def test_as_tried_one_after_the_other(prompt: Prompt, ratio: float, run_tokens: int) -> None:
    """The best run of each segment is chosen, then the best other runs.

    Of equal runs, the first.
    """
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
    everything = select_runs(segments, scores, reused, 1.0, run_tokens)
    assert tokens_of(everything) == tokens_of(tuple(reused))


def test_scores_of_many_tokens_are_as_exact_as_those_of_few() -> None:
    segments = [TokenRange(0, 1 << 16)]
    scores = np.full(1 << 16, 1e6, np.float32)
    scores[8 * 6001] += 1
    assert select_runs(segments, scores, segments, 0.0, 8) == (TokenRange(48008, 48016),)
