# SPDX-License-Identifier: Apache-2.0
"""Consecutive tokens of a request: cached or computed ones, a hole, a segment, those of a chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple


class TokenRange(NamedTuple):
    """A half-open range: how many tokens lie before it, and up to its end."""

    first_tokens: int
    end_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


def union(runs: Iterable[TokenRange]) -> tuple[TokenRange, ...]:
    """Runs in any order, which may touch or overlap, as runs that do not."""
    united: list[TokenRange] = []
    for run in sorted(runs):
        if united and run.first_tokens <= united[-1].end_tokens:
            first_tokens, end_tokens = united[-1]
            united[-1] = TokenRange(first_tokens, max(end_tokens, run.end_tokens))
        else:
            united.append(run)
    return tuple(united)


def without(runs: Iterable[TokenRange], taken: Sequence[TokenRange]) -> tuple[TokenRange, ...]:
    """What is left of some runs. All ascend, and those that are taken do not overlap."""
    left: list[TokenRange] = []
    num_behind = 0  # Of those taken: that end before what is looked at.
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
