# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The expected reuse of a prompt of `scenarios.blending`, and the answer of an oracle."""

from __future__ import annotations

from collections.abc import Sequence

from support.blending.oracle import Oracle, Reused
from support.scenarios import answers
from support.scenarios.answers import Answer
from support.scenarios.documents import STORED_LENGTHS

MIN_TOKENS = 32
"""The minimum length of a segment's reused part. Shorter parts are always computed."""
MAX_TOKENS = 1200
"""The maximum number of tokens of a prompt with its reply."""


def expected_reuse(
    answer: Answer,
    head_tokens: int,
    window_tokens: int = 0,
    beginning: Sequence[int] | None = None,
) -> list[Reused]:
    """The expected reuse behind the exact beginning. Only the missing document has its length.

    If a segment stands behind the ``beginning`` with which it was computed, it has no head.
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
