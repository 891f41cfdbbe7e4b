# SPDX-License-Identifier: Apache-2.0
"""After how many requests chunks are asked for again: counted for all keys, stored or not.

Time is counted in requests that have ended. Since a chunk was asked for last, it waits; how long
it has waited is its age, and ages are told apart by powers of two, as stages::

    stage   0   1     2       3
    age     1   2-3   4-7     8-15 requests ...

For each stage it is counted how many chunks waited in it at each request, and how many of these
requests asked for them. The quotient is how likely the next request asks for such a chunk: its
hazard. Chunks that are still waiting count, so that what never comes back is seen as well. What was
evicted counts, too: else only what is kept anyway would be learned from.

Chunks of different classes come back differently: see `class_of`. Keys that wait since the same
request move on together, so that a request costs a constant number of steps, and each of its chunks
a constant number besides. The number of keys is bounded: what was asked for longest ago goes.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from dataclasses import dataclass

NUM_STAGES = 14
"""The last one has no end."""

NUM_ORIGINS = 3
MOST_TIMES = 4
NUM_CLASSES = NUM_ORIGINS * MOST_TIMES

_Counts = list[int]
"""By class."""


@dataclass(slots=True)
class Chunk:
    """What is known of a chunk's key.

    Attributes:
        origin: See `class_of`.
        asked_at: The latest request that asked for it.
        num_asked: By how many requests, the first included.
        num_expected: How many others were expected to, going by the hazard of its classes.
    """

    origin: int
    asked_at: int
    num_asked: int = 1
    num_expected: float = 0.0

    @property
    def class_index(self) -> int:
        return class_of(self.origin, self.num_asked)


def class_of(origin: int, num_asked: int) -> int:
    """Chunks of one class are expected to come back alike.

    Args:
        origin: What the chunk was written behind: 0 for nothing that was known, 1 for a prompt that
            came back for the first time, 2 for one that had done so before.
        num_asked: By how many requests.
    """
    return origin * MOST_TIMES + min(num_asked, MOST_TIMES) - 1


def stage_of(age: int) -> int:
    """Of an age of 1 or more."""
    return min(age.bit_length(), NUM_STAGES) - 1


class ReuseTimes:
    """Counts.

    Args:
        most_keys: How many keys are known.

    Attributes:
        now: How many requests have ended.
        num_chunks: How many chunks they asked for.
        waited: By class and stage: how many chunks waited, summed over requests.
        came_back: How many of these were asked for.
    """

    __slots__ = (
        "_chunks",
        "_cohorts",
        "_ends",
        "_most_keys",
        "_waiting",
        "came_back",
        "now",
        "num_chunks",
        "waited",
    )

    def __init__(self, most_keys: int) -> None:
        self._most_keys = most_keys
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self.now = self.num_chunks = 0
        self.waited = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self.came_back = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self._chunks: OrderedDict[bytes, Chunk] = OrderedDict()
        self._waiting = [[0] * NUM_CLASSES for _ in range(NUM_STAGES)]
        self._cohorts: dict[int, _Counts] = {}
        # Of each stage but the last, the requests whose chunks may wait in it, ascending.
        self._ends: list[deque[int]] = [deque() for _ in range(NUM_STAGES - 1)]

    def __len__(self) -> int:
        return len(self._chunks)

    def get(self, key: bytes) -> Chunk | None:
        return self._chunks.get(key)

    def next_stage(self, chunk: Chunk) -> int:
        """In which the next request finds it."""
        return stage_of(self.now + 1 - chunk.asked_at)

    def note_ended(
        self, asked: Iterable[bytes], answered: Iterable[bytes], expected: list[list[float]]
    ) -> None:
        """A request has ended.

        Args:
            asked: The keys of its prompt's chunks, in order.
            answered: Those behind them.
            expected: By class and stage: how often a chunk was asked for until then on average.
        """
        self._advance()
        before: Chunk | None = None
        for key in asked:
            self.num_chunks += 1
            chunk = self._chunks.get(key)
            if chunk is None:
                self._add(key, Chunk(_origin_behind(before), self.now))
            else:
                self._note_asked(key, chunk, expected)
                before = chunk
        for key in answered:
            if key not in self._chunks:
                self._add(key, Chunk(_origin_behind(before), self.now))
        while len(self._chunks) > self._most_keys:
            self._leave(self._chunks.popitem(last=False)[1])

    def _advance(self) -> None:
        """A request later: chunks move on to the stage in which it finds them, and are counted."""
        self.now += 1
        for stage, ends in enumerate(self._ends):
            while ends and stage_of(self.now - ends[0]) > stage:
                self._move(ends.popleft(), stage)
        for stage, counts in enumerate(self._waiting):
            for index, count in enumerate(counts):
                self.waited[index][stage] += count
        self._ends[0].append(self.now)
        self._cohorts[self.now] = [0] * NUM_CLASSES

    def _move(self, asked_at: int, stage: int) -> None:
        cohort = self._cohorts.get(asked_at)
        if cohort is None:
            return
        if not any(cohort):
            del self._cohorts[asked_at]
            return
        for index, count in enumerate(cohort):
            self._waiting[stage][index] -= count
            self._waiting[stage + 1][index] += count
        if stage + 1 < len(self._ends):
            self._ends[stage + 1].append(asked_at)

    def _note_asked(self, key: bytes, chunk: Chunk, expected: list[list[float]]) -> None:
        if chunk.asked_at == self.now:
            return
        index, stage = chunk.class_index, stage_of(self.now - chunk.asked_at)
        self.came_back[index][stage] += 1
        self._leave(chunk)
        chunk.num_asked += 1
        chunk.num_expected += expected[index][stage]
        chunk.asked_at = self.now
        self._add(key, chunk)

    def _add(self, key: bytes, chunk: Chunk) -> None:
        """It begins to wait."""
        self._chunks[key] = chunk
        self._chunks.move_to_end(key)
        self._cohorts[self.now][chunk.class_index] += 1
        self._waiting[0][chunk.class_index] += 1

    def _leave(self, chunk: Chunk) -> None:
        """It waits no longer."""
        index = chunk.class_index
        cohort = self._cohorts[chunk.asked_at]
        cohort[index] -= 1
        self._waiting[stage_of(max(1, self.now - chunk.asked_at))][index] -= 1
        if chunk.asked_at != self.now and not any(cohort):
            del self._cohorts[chunk.asked_at]


def _origin_behind(chunk: Chunk | None) -> int:
    """Of what is written behind a chunk that has just been asked for."""
    if chunk is None:
        return 0
    return min(chunk.num_asked, NUM_ORIGINS) - 1
