# SPDX-License-Identifier: Apache-2.0
"""Which spans of a prompt are computed, and which are read from the cache.

Block hashes are chained: a block behind a hole that has the right hash holds what this prompt
needs. So only the holes are computed. Each computed span reads what lies before it: all rows of
full attention, the window before its first token, a state at its first token. Where these are
missing, it begins earlier::

    full attention   [cached    ][hole ][cached        ][hole ][cached   ]
    window           [cached    ][hole ]      [cached  ][hole ][cached   ]
    window is gone   [cached    ][hole ][cached ]    [ ][hole ][cached   ]
                                                ^ the second span begins here

Pure functions of lengths. Lengths are numbers of tokens; runs are half-open, ascending, not empty,
and do not touch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.groups.model import GroupKind
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
class CachedRows:
    """What is cached of a prompt in a group of full attention, a window, or attention chunks.

    Attributes:
        kind: FULL, WINDOW or CHUNKED.
        runs: Tokens whose rows are there.
        window_tokens: Of the group; 0 for full attention.
    """

    kind: GroupKind
    runs: Sequence[Run]
    window_tokens: int = 0

    def __post_init__(self) -> None:
        has_window = self.kind in (GroupKind.WINDOW, GroupKind.CHUNKED)
        if has_window is not (self.window_tokens > 0) or not (
            has_window or self.kind is GroupKind.FULL
        ):
            raise HoleError(
                "span plan: expected full attention, or a window or chunk of at least one token, "
                f"found kind {self.kind.value} with window_tokens={self.window_tokens}; compute "
                "prompts of such models from their first missing token on"
            )


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
    groups: Sequence[CachedRows],
    least_run_tokens: int = 0,
) -> SpanPlan:
    """Plan a prompt. Never computes more than a prompt that stops at the first missing token does.

    Each span begins as late as it can; nothing is computed only to complete the window of another.

    Args:
        num_tokens: Of the prompt. The last token is always computed: its output is wanted.
        unit_tokens: Spans begin and end at multiples of it, but for the end of the prompt.
        groups: All KV cache groups.
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
    cached = [Run(0, last_end_tokens)] if last_end_tokens else []
    windows = []
    for group in groups:
        if group.kind is GroupKind.FULL:
            cached = _intersection(cached, _whole_units(group.runs, unit_tokens))
        else:
            windows.append(_Window(group))
    # A model without full attention reads nothing but windows.
    computed: list[Run] = []
    for hole in _complement(cached, num_tokens):
        after_tokens = computed[-1].end_tokens if computed else 0
        first_tokens = _start(hole.first_tokens, after_tokens, unit_tokens, windows)
        if computed and first_tokens - after_tokens < max(1, least_run_tokens):
            first_tokens = computed.pop().first_tokens
        computed.append(Run(first_tokens, hole.end_tokens))
        for window in windows:
            window.add(computed[-1])
    return SpanPlan(num_tokens, tuple(computed))


class _Window:
    """What is there of a window group: what is cached, and what earlier spans compute."""

    def __init__(self, group: CachedRows) -> None:
        self._group = group
        self._runs = list(group.runs)

    def add(self, span: Run) -> None:
        """Runs that touch become one."""
        runs = self._runs
        first = bisect.bisect_left(runs, span.first_tokens, key=lambda run: run.end_tokens)
        end = bisect.bisect_right(runs, span.end_tokens, key=lambda run: run.first_tokens)
        joined = [span, *runs[first:end]]
        runs[first:end] = [
            Run(min(run.first_tokens for run in joined), max(run.end_tokens for run in joined))
        ]

    def latest_start(self, tokens: int) -> int:
        """The last boundary, not after this one, whose window is there; 0 needs none."""
        window_tokens = self._group.window_tokens
        if self._group.kind is GroupKind.CHUNKED:
            chunk_first = tokens - tokens % window_tokens
            run = self._last_run(chunk_first)
            return max(chunk_first, min(tokens, run.end_tokens))
        while tokens > 0 and window_tokens > 1:
            run = self._last_run(tokens - 1)
            tokens = min(tokens, run.end_tokens)
            if run.first_tokens <= max(0, tokens - window_tokens + 1):
                return tokens
            # Earlier boundaries of this run read as far before it.
            tokens = run.first_tokens
        return tokens

    def _last_run(self, tokens: int) -> Run:
        """The last one that begins at a token or before it; an empty one if there is none."""
        place = bisect.bisect_right(self._runs, tokens, key=lambda run: run.first_tokens)
        return self._runs[place - 1] if place else Run(0, 0)


def _start(tokens: int, after_tokens: int, unit_tokens: int, windows: Sequence[_Window]) -> int:
    """Where a span begins that has to compute what lies behind ``tokens``.

    Returns:
        The last boundary at which all windows are there; ``after_tokens`` at the least, where the
        span before it ends.
    """
    while tokens > after_tokens:
        found = min((window.latest_start(tokens) for window in windows), default=tokens)
        found -= found % unit_tokens
        if found == tokens:
            return tokens
        tokens = found
    return after_tokens


def _whole_units(runs: Iterable[Run], unit_tokens: int) -> Iterable[Run]:
    for first_tokens, end_tokens in runs:
        first_tokens = -(-first_tokens // unit_tokens) * unit_tokens
        end_tokens -= end_tokens % unit_tokens
        if first_tokens < end_tokens:
            yield Run(first_tokens, end_tokens)


def _intersection(runs: Sequence[Run], others: Iterable[Run]) -> list[Run]:
    found = []
    place = 0
    for other in others:
        while place < len(runs) and runs[place].end_tokens <= other.first_tokens:
            place += 1
        for run in runs[place:]:
            if run.first_tokens >= other.end_tokens:
                break
            found.append(
                Run(
                    max(run.first_tokens, other.first_tokens), min(run.end_tokens, other.end_tokens)
                )
            )
    return found


def _complement(runs: Iterable[Run], num_tokens: int) -> Iterable[Run]:
    position = 0
    for run in runs:
        if position < run.first_tokens:
            yield Run(position, run.first_tokens)
        position = run.end_tokens
    if position < num_tokens:
        yield Run(position, num_tokens)
