# SPDX-License-Identifier: Apache-2.0
"""What of a prompt of `scenarios.blending` is to be reused, and what an oracle says of it."""

from __future__ import annotations

from collections.abc import Sequence

from support.blending.oracle import Oracle, Reused
from support.scenarios import answers
from support.scenarios.answers import Answer
from support.scenarios.documents import STORED_LENGTHS

MIN_TOKENS = 32
"""Shorter parts of a segment are always computed."""
MAX_TOKENS = 1200
"""Of a prompt with its reply."""


def expected_reuse(
    answer: Answer,
    head_tokens: int,
    window_tokens: int = 0,
    beginning: Sequence[int] | None = None,
) -> list[Reused]:
    """What is to be reused behind the exact beginning; the missing document has its own length.

    Behind the ``beginning`` that segments were computed behind, one has no head.
    """
    found = []
    for num_before, (first, end) in enumerate(answer.segments):
        if end - first not in STORED_LENGTHS or end - first < 2 * head_tokens:
            continue
        is_exact = beginning is not None and [*answer.prompt[:first]] == [*beginning]
        num_first = 0 if is_exact else max(head_tokens, window_tokens - 1, 0)
        begin = max(first + num_first, answer.exact_tokens)
        if end - begin >= MIN_TOKENS:
            found.append(Reused(begin, end, (first, end), num_before))
    return found


def num_tokens(reused: Sequence[Reused]) -> int:
    return sum(each.end_tokens - each.first_tokens for each in reused)


def oracle_error(oracle: Oracle, answer: Answer, reused: Sequence[Reused]) -> float:
    """The largest difference of a top-5 log-probability from the oracle's."""
    expected = oracle.log_probabilities(answer.prompt, answer.reply, reused)
    return answers.oracle_error(expected, answer)
