# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Ranges of consecutive tokens of a request: a chunk, a hole, a segment, or computed tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TokenRange(NamedTuple):
    """A half-open range of tokens.

    Attributes:
        first_tokens: The number of tokens before the range.
        end_tokens: The number of tokens up to its end.
    """

    first_tokens: int
    end_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


def union(runs: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Join runs that touch or overlap. The runs may have any order; the result ascends."""
    united: list[TokenRange] = []
    for run in sorted(runs):
        if united and run.first_tokens <= united[-1].end_tokens:
            first_tokens, end_tokens = united[-1]
            united[-1] = TokenRange(first_tokens, max(end_tokens, run.end_tokens))
        else:
            united.append(run)
    return tuple(united)


def without(runs: Iterable[TokenRange], taken: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """The parts of some runs that are not in the runs of ``taken``.

    Both lists ascend, and the runs of ``taken`` do not overlap.
    """
    left: list[TokenRange] = []
    num_behind = 0  # The number of taken runs that end before the current run.
    for first_tokens, end_tokens in runs:
        while num_behind < len(taken) and taken[num_behind].end_tokens <= first_tokens:
            num_behind += 1
        for index in range(num_behind, len(taken)):
            run = taken[index]
            if end_tokens <= run.first_tokens:
                break
            if first_tokens < run.first_tokens:
                left.append(TokenRange(first_tokens, run.first_tokens))
            first_tokens = run.end_tokens
        if first_tokens < end_tokens:
            left.append(TokenRange(first_tokens, end_tokens))
    return tuple(left)
