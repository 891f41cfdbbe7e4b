# SPDX-License-Identifier: Apache-2.0
"""Gaps in what any connector has matched: which requests with gaps go into which step.

A connector may say that some tokens within what it has matched have no KV. What it loads between
steps has its gaps computed when the load has ended, as the holes of `HoleQueue`. What it loads
within a step lies in the request's pages only from that step on; so all gaps of the request are
computed in that step, too, beside the request's own tokens behind the last gap::

    step           n                n + 1
    request     asked: later     asked: now    admitted, loaded, [gap][gap][tokens behind]
    budget                       without what the gaps take

Budgets are known before a step is planned, and gaps while it is planned: a request whose gaps are
new is asked again in the next step, for which its tokens and rows are set aside.

Lengths are numbers of tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from vllm_ascend_kvext.holes.errors import HoleError
from vllm_ascend_kvext.holes.span_plan import Run, union

MOST_PATIENCE_S = 10.0
"""How long a request waits for a step that has room for its gaps, before it does without."""


class Answer(enum.Enum):
    """What becomes of a request with gaps that are loaded within a step."""

    NOW = "now"
    """It can be admitted: this step has room for its gaps."""

    LATER = "later"
    """It has to be asked again in a later step."""

    NEVER = "never"
    """No step has room for all of its gaps, or it has waited for one for too long."""


def gaps_within(
    gaps: Sequence[tuple[int, int]], first_tokens: int, end_tokens: int
) -> tuple[Run, ...]:
    """Gaps of a request, as far as they lie in what was matched for it.

    Args:
        gaps: First tokens and ends, in any order.
        first_tokens: What lies before is on the device.
        end_tokens: What lies behind is computed in any case.

    Raises:
        HoleError: If a gap is empty, or begins before the first token.
    """
    for first, end in gaps:
        if not 0 <= first < end:
            raise HoleError(
                "get_computed_token_gaps: expected pairs of a first token and an end behind it, "
                f"found ({first}, {end})"
            )
    within = (Run(max(first, first_tokens), min(end, end_tokens)) for first, end in gaps)
    return union(run for run in within if run.num_tokens > 0)


@dataclass(frozen=True, slots=True)
class Room:
    """Tokens and rows of a step."""

    num_tokens: int
    num_rows: int

    def plus(self, num_tokens: int, num_rows: int) -> Room:
        return Room(self.num_tokens + num_tokens, self.num_rows + num_rows)

    def holds(self, other: Room) -> bool:
        return other.num_tokens <= self.num_tokens and other.num_rows <= self.num_rows


@dataclass(slots=True)
class _Waiting:
    """A request that is to be admitted with its gaps.

    Attributes:
        gaps: What its gaps take.
        own_tokens: Behind its gaps, that the step has to compute at least.
        since_s: When it was asked first.
    """

    gaps: Room
    own_tokens: int
    since_s: float

    @property
    def needs(self) -> Room:
        """With the row of the request itself."""
        return self.gaps.plus(self.own_tokens, 1)


@dataclass(slots=True)
class GapsInSteps:
    """Requests of one engine whose gaps are computed in the step that loads what is around them.

    Those that were asked first come first.
    """

    _waiting: dict[str, _Waiting] = field(default_factory=dict)
    _granted: dict[str, Room] = field(default_factory=dict)

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._waiting)

    def begin_step(self, has: Room) -> Room:
        """Set aside what the gaps of waiting requests need.

        Args:
            has: The step for requests that do not run yet.

        Returns:
            What their gaps take of the step; the requests themselves are not counted.
        """
        self._granted.clear()
        of_all = of_gaps = Room(0, 0)
        for request_id, waiting in self._waiting.items():
            with_this = of_all.plus(waiting.needs.num_tokens, waiting.needs.num_rows)
            if has.holds(with_this):
                of_all = with_this
                of_gaps = of_gaps.plus(waiting.gaps.num_tokens, waiting.gaps.num_rows)
                self._granted[request_id] = waiting.needs
        return of_gaps

    def ask(
        self, request_id: str, gaps: Sequence[Run], own_tokens: int, most: Room, now_s: float
    ) -> Answer:
        """Whether a request can be admitted in the step that is being planned.

        Args:
            gaps: Of what was matched for it.
            own_tokens: Behind them, that the step has to compute at least.
            most: Of a step in which nothing else is.
            now_s: Of a clock that only grows.
        """
        of_gaps = Room(sum(gap.num_tokens for gap in gaps), len(gaps))
        waiting = _Waiting(of_gaps, own_tokens, now_s)
        granted = self._granted.get(request_id)
        if granted is not None and granted.holds(waiting.needs):
            return Answer.NOW
        if request_id in self._waiting:
            waiting.since_s = self._waiting[request_id].since_s
        self._waiting[request_id] = waiting
        if not most.holds(waiting.needs) or now_s - waiting.since_s >= MOST_PATIENCE_S:
            self.drop(request_id)
            return Answer.NEVER
        return Answer.LATER

    def drop(self, request_id: str) -> None:
        """A request has been admitted, has ended, or has no gaps any more."""
        self._waiting.pop(request_id, None)
        self._granted.pop(request_id, None)
