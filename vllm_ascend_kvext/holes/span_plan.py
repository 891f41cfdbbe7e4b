# SPDX-License-Identifier: Apache-2.0
"""Which spans of a prompt are computed, and which are read from the cache.

Block hashes are chained: a block behind a hole that has the right hash holds what this prompt
needs. So only the holes are computed. A computed span reads what lies before it: all rows of full
attention, and, where the model has windows or states, those of its first token. A span can begin
only where these are cached, or where the span before it ends. So a hole may begin earlier than
what is missing::

    rows               [cached    ][hole ][cached        ][hole ][cached   ]
    windows            ^0                      ^                          ^
    computed           [=================]     [================]         [=]

Pure functions of lengths. Lengths are numbers of tokens; runs are half-open, ascending, not empty,
and do not touch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.holes.errors import HoleError


class Run(NamedTuple):
    """Consecutive tokens.

    Attributes:
        first_tokens: Tokens before it.
        end_tokens: Tokens up to its end.
    """

    first_tokens: int
    end_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.end_tokens - self.first_tokens


@dataclass(frozen=True, slots=True)
class SpanPlan:
    """The computed spans of a prompt; all others are read from the cache.

    Attributes:
        num_tokens: Of the prompt.
        computed: Ascending; the last one ends with the prompt.
    """

    num_tokens: int
    computed: tuple[Run, ...]

    @property
    def computed_tokens(self) -> int:
        return sum(run.num_tokens for run in self.computed)

    @property
    def cached(self) -> tuple[Run, ...]:
        """What is not computed."""
        return tuple(_complement(self.computed, self.num_tokens))

    @property
    def saved_tokens(self) -> int:
        """Tokens behind the first computed span that are not computed."""
        return self.num_tokens - self.computed[0].first_tokens - self.computed_tokens


def plan_spans(
    num_tokens: int,
    unit_tokens: int,
    rows: Iterable[Run],
    starts: Sequence[int] | None = None,
    least_run_tokens: int = 0,
) -> SpanPlan:
    """Plan a prompt. Never computes more than a prompt that stops at the first missing token does.

    Each span begins as late as it can.

    Args:
        num_tokens: Of the prompt. The last token is always computed: its output is wanted.
        unit_tokens: Spans begin and end at multiples of it, but for the end of the prompt.
        rows: Tokens whose rows are cached in all groups of full attention.
        starts: Multiples of the unit, ascending, at which windows and states are cached; the
            first token needs none. None if the model has no windows or states: a span then begins
            anywhere.
        least_run_tokens: A cached run behind a hole that is shorter is computed with the hole.

    Raises:
        HoleError: If there is no token, or no unit.
    """
    if num_tokens < 1 or unit_tokens < 1:
        raise HoleError(
            "span plan: expected at least one token and a unit of at least one, found "
            f"num_tokens={num_tokens}, unit_tokens={unit_tokens}"
        )
    last_end_tokens = (num_tokens - 1) // unit_tokens * unit_tokens
    cached = _whole_units(rows, unit_tokens, last_end_tokens)
    computed: list[Run] = []
    for hole in _complement(cached, num_tokens):
        after_tokens = computed[-1].end_tokens if computed else 0
        first_tokens = hole.first_tokens
        if starts is not None:
            place = bisect.bisect_right(starts, first_tokens)
            first_tokens = max(after_tokens, starts[place - 1] if place else 0)
        if computed and first_tokens - after_tokens < max(1, least_run_tokens):
            first_tokens = computed.pop().first_tokens
        computed.append(Run(first_tokens, hole.end_tokens))
    return SpanPlan(num_tokens, tuple(computed))


def union(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs in any order, which may touch or overlap, as runs that do not."""
    united: list[Run] = []
    for run in sorted(runs):
        if united and run.first_tokens <= united[-1].end_tokens:
            first_tokens, end_tokens = united[-1]
            united[-1] = Run(first_tokens, max(end_tokens, run.end_tokens))
        else:
            united.append(run)
    return tuple(united)


def without(runs: Iterable[Run], taken: Sequence[Run]) -> tuple[Run, ...]:
    """What is left of some runs. All ascend, and those that are taken do not touch."""
    left: list[Run] = []
    num_behind = 0  # Of those taken: that end before what is looked at.
    for first_tokens, end_tokens in runs:
        while num_behind < len(taken) and taken[num_behind].end_tokens <= first_tokens:
            num_behind += 1
        for index in range(num_behind, len(taken)):
            run = taken[index]
            if end_tokens <= run.first_tokens:
                break
            if first_tokens < run.first_tokens:
                left.append(Run(first_tokens, run.first_tokens))
            first_tokens = run.end_tokens
        if first_tokens < end_tokens:
            left.append(Run(first_tokens, end_tokens))
    return tuple(left)


def _whole_units(runs: Iterable[Run], unit_tokens: int, last_end_tokens: int) -> Iterable[Run]:
    for first_tokens, end_tokens in runs:
        first_tokens = -(-first_tokens // unit_tokens) * unit_tokens
        end_tokens = min(end_tokens - end_tokens % unit_tokens, last_end_tokens)
        if first_tokens < end_tokens:
            yield Run(first_tokens, end_tokens)


def _complement(runs: Iterable[Run], num_tokens: int) -> Iterable[Run]:
    position = 0
    for run in runs:
        if position < run.first_tokens:
            yield Run(position, run.first_tokens)
        position = run.end_tokens
    if position < num_tokens:
        yield Run(position, num_tokens)
