# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""When the requests of a trace arrive: at fixed times, or some time after another request ends."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from retention.traces import Trace


class Arrivals:
    """The requests of a trace that have not arrived.

    An object is true while some arrival is known.
    """

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
        """The step in which the next request arrives."""
        return self._pending[0][0]

    def take(self, step: int) -> Iterator[int]:
        """The numbers of the requests that arrive up to a step, in order."""
        while self._pending and self._pending[0][0] <= step:
            yield heapq.heappop(self._pending)[1]

    def note_end(self, number: int, step: int) -> None:
        """Note that a request has ended in a step. The requests that follow it arrive later."""
        for follower in self._followers.pop(number, ()):
            heapq.heappush(self._pending, (step + 1 + self._delays_steps[follower], follower))
