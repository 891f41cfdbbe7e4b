# SPDX-License-Identifier: Apache-2.0
"""Learns when chunks are asked for again, and how much it pays to keep them until then.

A place in the tier should bring the most hits for the time that it is taken. So the value of a
chunk is its hit density: its expected hits, divided by the time that it would have to stay::

    density  =  P(asked for again)  /  E(time until then, or until it is given up)

This is the rule of LHD (N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by
maximizing hit density", NSDI 2018). Eviction by the latest use keeps chunks that are not needed any
more, and loses everything if not everything fits: if ten conversations continue in turn, each of
them is evicted before its next turn. The hit density keeps some of them.

Time is counted in uses, see ``HostTier.next_use``. After a chunk was asked for, it waits. Its age
is the time that it has waited. Ages are grouped by powers of two, as stages::

    stage   0   1     2       3
    age     1   2-3   4-7     8-15 uses ...

For each stage, the module counts how long chunks waited in it, and how many of them were asked for
in it. The quotient is the hazard: the probability that the next use asks for such a chunk. Chunks
that still wait count, so chunks that never come back are counted, too. Evicted chunks also count.
Otherwise the module would learn only from chunks that are kept anyway. Chunks of different classes
come back at different rates, see `_Chunk`.

The module knows keys, but no entries and no places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

NUM_STAGES = 15
"""The number of stages. The last stage has no end."""

NUM_ORIGINS = 3
"""The number of origins, see `_Chunk`."""

MAX_TIMES = 4
"""Chunks that were asked for this many times or more are in one class."""

NUM_CLASSES = NUM_ORIGINS * MAX_TIMES

LEARNING_SHARE = 1 / 16
"""The densities are computed again when this share of the known chunks has been asked for."""

PRIOR_REQUESTS = 0.5
"""The weight of the assumed hazard: it counts as much as the chunks of this many requests."""

_MAX_HAZARD = 0.999

Table = list[list[float]]
"""Numbers by class and stage."""


@dataclass(slots=True)
class _Chunk:
    """What is known of a chunk.

    Attributes:
        origin: What stood before the chunk when it was computed. 0: no known chunk. 1: a prompt
            that came back for the first time. 2: a prompt that had come back before.
        asked_at: The latest use that asked for the chunk.
        num_asked: The number of requests that asked for it, the first request included.
    """

    origin: int
    asked_at: int
    num_asked: int = 1

    @property
    def class_index(self) -> int:
        """The class of the chunk. Chunks of a class are expected to come back at the same rate."""
        return self.origin * MAX_TIMES + min(self.num_asked, MAX_TIMES) - 1


class Reuse:
    """Counts the reuse of all chunks, stored or not, and computes densities from the counts.

    A request costs a constant number of steps per chunk. Learning costs one step for each request
    whose chunks still wait.

    Args:
        max_keys: The most chunks that are known. The chunk that was asked for longest ago is
            forgotten first.

    Attributes:
        came_back: The number of chunks that were asked for again, by class and stage.
        densities: The expected hits per use, by class and stage.
    """

    def __init__(self, max_keys: int) -> None:
        self._max_keys = max_keys
        self.clear()

    def clear(self) -> None:
        """Forget everything."""
        self._chunks: OrderedDict[bytes, _Chunk] = OrderedDict()
        # The number of chunks that still wait, by the use that asked for them, and by class.
        self._cohorts: dict[int, dict[int, int]] = {}
        # How long chunks waited, by class and stage. Chunks that still wait are not included.
        self._waited = _zeros()
        self.came_back = _zeros()
        self._num_asked = 0
        self._num_requests = 0
        self._num_since_learned = 0
        self.densities: Table = [[1.0] * NUM_STAGES for _ in range(NUM_CLASSES)]

    def density(self, key: bytes, use: int, now: int) -> float:
        """The expected hits per use of a chunk from now on.

        Args:
            key: The key of the chunk.
            use: The latest use of its entry, by a load or a store.
            now: The latest use of all.
        """
        chunk = self._chunks.get(key)
        if chunk is None:
            return self.densities[0][_stage_of(now + 1 - use)]
        age = now + 1 - max(use, chunk.asked_at)
        return self.densities[chunk.class_index][_stage_of(age)]

    def note_ended(self, asked: Iterable[bytes], answered: Iterable[bytes], now: int) -> None:
        """Count the chunks of a request that has ended.

        Args:
            asked: The keys of the chunks of its prompt, in order.
            answered: The keys of the chunks behind the prompt.
            now: The use of its end, which is later than all uses before.
        """
        self._num_requests += 1
        before: _Chunk | None = None
        for key in asked:
            self._num_asked += 1
            self._num_since_learned += 1
            chunk = self._chunks.get(key)
            if chunk is None:
                self._add(key, _Chunk(_origin_behind(before), now))
                continue
            if chunk.asked_at != now:
                self.came_back[chunk.class_index][_stage_of(now - chunk.asked_at)] += 1
                self._leave(chunk, now)
                chunk.num_asked += 1
                chunk.asked_at = now
                self._add(key, chunk)
            before = chunk
        for key in answered:
            if key not in self._chunks:
                self._add(key, _Chunk(_origin_behind(before), now))
        while len(self._chunks) > self._max_keys:
            self._leave(self._chunks.popitem(last=False)[1], now)
        if self._num_since_learned >= LEARNING_SHARE * len(self._chunks):
            self._num_since_learned = 0
            self._learn(now)

    def _add(self, key: bytes, chunk: _Chunk) -> None:
        """Note that a chunk begins to wait."""
        self._chunks[key] = chunk
        self._chunks.move_to_end(key)
        cohort = self._cohorts.setdefault(chunk.asked_at, {})
        cohort[chunk.class_index] = cohort.get(chunk.class_index, 0) + 1

    def _leave(self, chunk: _Chunk, now: int) -> None:
        """Note that a chunk does not wait any more."""
        class_index = chunk.class_index
        waited = self._waited[class_index]
        for stage, num_uses in _stages_until(now - chunk.asked_at):
            waited[stage] += num_uses
        cohort = self._cohorts[chunk.asked_at]
        cohort[class_index] -= 1
        if not cohort[class_index]:
            del cohort[class_index]
            if not cohort:
                del self._cohorts[chunk.asked_at]

    def waited(self, now: int) -> Table:
        """The number of uses for which chunks have waited, by class and stage."""
        waited = [list(row) for row in self._waited]
        num_in_stage = _zeros()
        in_last_stage = _zeros()
        for asked_at, cohort in self._cohorts.items():
            age = now - asked_at
            stage = _stage_of(age)
            num_uses = age + 1 - (1 << stage)
            for class_index, num_chunks in cohort.items():
                num_in_stage[class_index][stage] += num_chunks
                in_last_stage[class_index][stage] += num_uses * num_chunks
        for class_index, row in enumerate(waited):
            num_beyond = 0.0  # The number of chunks that have waited through the whole stage.
            for stage in reversed(range(NUM_STAGES)):
                row[stage] += in_last_stage[class_index][stage] + num_beyond * (1 << stage)
                num_beyond += num_in_stage[class_index][stage]
        return waited

    def _learn(self, now: int) -> None:
        prior_hits = max(1.0, PRIOR_REQUESTS * self._num_asked / self._num_requests)
        hazards = learned_hazards(self.waited(now), self.came_back, prior_hits)
        self.densities = [densities(row) for row in hazards]


def learned_hazards(waited: Table, came_back: Table, prior_hits: float) -> Table:
    """The probability that the next use asks for a chunk, by class and stage.

    If there are few observations, the mean of the class and the mean of the stage decide.

    Args:
        waited: The number of uses for which chunks waited, by class and stage.
        came_back: How many of these uses asked for the chunk.
        prior_hits: The weight of the assumed hazard, in hits.
    """
    all_waited = [sum(column) for column in zip(*waited, strict=True)]
    all_came_back = [sum(column) for column in zip(*came_back, strict=True)]
    mean = (sum(all_came_back) + 1) / (sum(all_waited) + 100)
    prior = prior_hits / mean
    of_stage = [
        (hits + prior_hits) / (uses + prior)
        for hits, uses in zip(all_came_back, all_waited, strict=True)
    ]
    hazards = []
    for class_hits, class_uses in zip(came_back, waited, strict=True):
        usual = sum(uses * h / mean for uses, h in zip(class_uses, of_stage, strict=True))
        factor = (sum(class_hits) + prior_hits) / (usual + prior) / mean
        seen = zip(class_hits, class_uses, of_stage, strict=True)
        hazards.append(
            [
                min(_MAX_HAZARD, (hits + prior * h * factor) / (uses + prior))
                for hits, uses, h in seen
            ]
        )
    return hazards


def densities(hazards: list[float]) -> list[float]:
    """The hits per use from the beginning of each stage to the end of the last stage."""
    found = []
    num_hits = 0.0
    num_uses = 0.0
    for stage in reversed(range(NUM_STAGES)):
        width = 1 << stage
        within = 1 - (1 - hazards[stage]) ** width
        num_hits = within + (1 - within) * num_hits
        num_uses = width * (1 - within / 2) + (1 - within) * num_uses
        found.append(num_hits / num_uses)
    return found[::-1]


def _zeros() -> Table:
    return [[0.0] * NUM_STAGES for _ in range(NUM_CLASSES)]


def _stage_of(age: int) -> int:
    return min(max(1, age).bit_length(), NUM_STAGES) - 1


def _stages_until(age: int) -> Iterator[tuple[int, int]]:
    """The stages of a wait up to an age, each with the number of uses in it."""
    last = _stage_of(age)
    for stage in range(last):
        yield stage, 1 << stage
    yield last, age + 1 - (1 << last)


def _origin_behind(chunk: _Chunk | None) -> int:
    """The origin of a chunk that is computed behind a chunk that has just been asked for."""
    if chunk is None:
        return 0
    return min(chunk.num_asked, NUM_ORIGINS) - 1
