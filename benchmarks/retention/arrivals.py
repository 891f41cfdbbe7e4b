# SPDX-License-Identifier: Apache-2.0
"""When the requests of a trace arrive: some at a time, others a while after one has ended."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from retention.traces import Trace


class Arrivals:
    """The requests of a trace that have not arrived. True while the arrival of some is known."""

    def __init__(self, trace: Trace) -> None:
        self._delays_steps = [traced.delay_steps for traced in trace.requests]
        self._pending: list[tuple[int, int]] = []
        self._followers: dict[int, list[int]] = {}
        for number, traced in enumerate(trace.requests):
            if traced.after is None:
                heapq.heappush(self._pending, (traced.delay_steps, number))
            else:
                self._followers.setdefault(traced.after, []).append(number)

    def __bool__(self) -> bool:
        return bool(self._pending)

    @property
    def next_step(self) -> int:
        """When the next one arrives."""
        return self._pending[0][0]

    def take(self, step: int) -> Iterator[int]:
        """The numbers of those that arrive up to a step, in order."""
        while self._pending and self._pending[0][0] <= step:
            yield heapq.heappop(self._pending)[1]

    def note_end(self, number: int, step: int) -> None:
        """A request has ended in a step: those that follow it arrive after it."""
        for follower in self._followers.pop(number, ()):
            heapq.heappush(self._pending, (step + 1 + self._delays_steps[follower], follower))
