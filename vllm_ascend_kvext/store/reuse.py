# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Learns when chunks are asked for again, and how much it pays to keep them until then.

A place in the tier should bring the most hits for the time that it is taken. So the value of a
chunk is its hit density: its expected hits, divided by the time that it would have to stay::

    density  =  P(asked for again)  /  E(time until then, or until it is given up)

This is the rule of LHD (N. Beckmann, H. Chen and A. Cidon, "LHD: improving cache hit rate by
maximizing hit density", NSDI 2018). Eviction by the latest use keeps chunks that are not needed any
more, and loses everything if not everything fits: if ten conversations continue in turn, each of
them is evicted before its next turn. The hit density keeps some of them.

Time is counted in uses, see ``HostTier.next_use``. After a chunk was asked for, it waits. Its age
is the time that it has waited. Ages are grouped as stages. From age 4 on, four stages of equal
length lead from one power of two to the next, so that it is seen when conversations have ended::

    stage   0-6   7     8       9       10      11
    age     1-7   8-9   10-11   12-13   14-15   16-19 uses ...

For each stage, the module counts how long chunks waited in it, and how many of them were asked for
in it. The quotient is the hazard: the probability that the next use asks for such a chunk. Chunks
that still wait count, so chunks that never come back are counted, too. Evicted chunks also count.
Otherwise the module would learn only from chunks that are kept anyway. Chunks of different classes
come back at different rates, see `_Run`. A chunk is as small as what can be evicted by itself: a
cut of `TierGeometry`.

The module knows keys, but no entries and no places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

_STAGES_PER_OCTAVE = 4

_FIRST_AGES = (
    *range(1, _STAGES_PER_OCTAVE),
    *(
        (_STAGES_PER_OCTAVE + number) << octave
        for octave in range(12)
        for number in range(_STAGES_PER_OCTAVE)
    ),
    1 << 14,
)
"""The first age of each stage."""

NUM_STAGES = len(_FIRST_AGES)
"""The number of stages. The last stage has no end."""

_WIDTHS = (*(end - first for first, end in pairwise(_FIRST_AGES)), _FIRST_AGES[-1])
"""The number of ages in each stage. The last stage counts as long as all ages before it."""

NUM_ORIGINS = 8
"""The number of origins. Chunks of prompts have the first `NUM_CHUNK_ORIGINS`, see `_Run`. Tails
have those of ``resumes``."""

NUM_CHUNK_ORIGINS = 3

MAX_TIMES = 4
"""Chunks that were asked for this many times or more are in one class."""

NUM_CLASSES = NUM_ORIGINS * MAX_TIMES

_ANSWERS_INDEX = -1
"""Answers that no prompt has had are counted behind all classes."""

LEARNING_SHARE = 1 / 16
"""The densities are computed again when this share of the known chunks has been asked for."""

PRIOR_REQUESTS = 0.5
"""The weight of the assumed hazard: it counts as much as the chunks of this many requests."""

_ASSUMED_HITS = 1
"""The hits that count as observed before any is."""

_ASSUMED_USES = 100
"""The uses in which `_ASSUMED_HITS` count as observed."""

_MAX_HAZARD = 0.999

Table = list[list[float]]
"""Numbers by class and stage."""


@dataclass(slots=True, eq=False)
class _Run:
    """Chunks of a prompt that have been asked for by the same requests.

    Attributes:
        keys: The keys of the chunks, in the order of the prompt.
        origin: What stood before the chunks when they were computed. 0: no known chunk. 1: a prompt
            that came back for the first time. 2: a prompt that had come back before.
        asked_at: The latest use that asked for the chunks.
        num_asked: The number of requests that asked for them, the first request included.
        is_answer: Whether the chunks were first seen in an answer.
    """

    keys: Sequence[bytes]
    origin: int
    asked_at: int
    num_asked: int = 1
    is_answer: bool = False

    @property
    def class_index(self) -> int:
        """The class of the chunks. Chunks of a class are expected to come back at the same rate."""
        return self.origin * MAX_TIMES + min(self.num_asked, MAX_TIMES) - 1

    @property
    def counted_index(self) -> int:
        """The class in which the chunks are counted. Answers that no prompt has had count apart."""
        return _ANSWERS_INDEX if self.is_answer and self.num_asked == 1 else self.class_index


class Reuse:
    """Counts the reuse of all chunks, stored or not, and computes densities from the counts.

    Chunks that were asked for together are counted together, as a run. So a request costs a step
    per run, and few machine instructions per chunk. Learning costs one step for each request whose
    chunks still wait.

    Args:
        max_keys: The most chunks that are known. The chunk that was asked for longest ago is
            forgotten first.
        num_origins: Chunks have origins below this number.

    Attributes:
        came_back: The number of chunks that were asked for again, by class and stage.
        densities: The expected hits per use, by class and stage.
    """

    def __init__(self, max_keys: int, num_origins: int = NUM_ORIGINS) -> None:
        self._max_keys = max_keys
        self._num_classes = num_origins * MAX_TIMES
        self.clear()

    @property
    def num_keys(self) -> int:
        """The number of chunks that are known."""
        return len(self._run_of)

    def clear(self) -> None:
        """Forget everything."""
        self._run_of: dict[bytes, _Run] = {}
        # All runs. The run that was asked for longest ago comes first.
        self._runs: OrderedDict[_Run, None] = OrderedDict()
        # The number of chunks that still wait, by the use that asked for them, and by class.
        self._cohorts: dict[int, dict[int, int]] = {}
        # How long chunks waited, by class and stage. Chunks that still wait are not included.
        self._waited = _zeros(self._num_classes)
        self.came_back = _zeros(self._num_classes)
        self._changed = _zeros(self._num_classes)  # The number of chunks that got another origin.
        self._num_asked = 0
        self._num_requests = 0
        self._num_since_learned = 0
        self.densities: Table = [[1.0] * NUM_STAGES for _ in range(self._num_classes)]

    def density(self, key: bytes, use: int, now: int) -> float:
        """The expected hits per use of a chunk from now on.

        Args:
            key: The key of the chunk.
            use: The latest use of its entry, by a load or a store.
            now: The latest use of all.
        """
        run = self._run_of.get(key)
        if run is None:
            return self.densities[0][_stage_of(now + 1 - use)]
        age = now + 1 - max(use, run.asked_at)
        return self.densities[run.class_index][_stage_of(age)]

    def note_ended(self, asked: Sequence[bytes], answered: Sequence[bytes], now: int) -> None:
        """Count the chunks of a request that has ended.

        Args:
            asked: The keys of the chunks of its prompt, in order.
            answered: The keys of the chunks behind the prompt.
            now: The use of its end, which is later than all uses before.
        """
        self._num_requests += 1
        self._num_asked += len(asked)
        self._num_since_learned += len(asked)
        before: _Run | None = None
        for run, keys in self._runs_of(asked):
            if run is None:
                self._add(_Run(keys, _origin_behind(before), now))
                continue
            if run.asked_at != now:
                asked_run = self._part_of(run, keys)
                self.came_back[run.counted_index][_stage_of(now - run.asked_at)] += len(keys)
                self._leave(asked_run, len(keys), now)
                asked_run.num_asked += 1
                asked_run.asked_at = now
                self._add(asked_run)
                before = asked_run
            else:
                before = run
        for run, keys in self._runs_of(answered):
            if run is None:
                self._add(_Run(keys, _origin_behind(before), now, is_answer=True))
        self._forget_oldest(now)
        if self._num_since_learned >= LEARNING_SHARE * self.num_keys:
            self._num_since_learned = 0
            self._learn(now)

    def note_new(self, key: bytes, origin: int, now: int) -> None:
        """Note a chunk of a given origin. A chunk that is known stays as it is."""
        if key not in self._run_of:
            self._add(_Run((key,), origin, now))
            self._forget_oldest(now)

    def change_origin(
        self, keys: Iterable[bytes], before: Collection[int], origin: int, now: int
    ) -> None:
        """Count chunks as chunks of another origin from now on. They wait anew.

        What they have waited until now stays where it was counted: it says as much of those that
        still wait there. Of a run, all chunks change. A chunk that was noted by `note_new` is a run
        of its own.

        Args:
            keys: The keys of some chunks. Unknown chunks stay unknown.
            before: The origins of the chunks that change.
            origin: Their new origin, none of ``before``.
            now: The latest use of all.
        """
        for run in filter(None, map(self._run_of.get, keys)):
            if run.origin in before:
                self._changed[run.counted_index][_stage_of(now - run.asked_at)] += len(run.keys)
                self._leave(run, len(run.keys), now)
                run.origin = origin
                run.asked_at = now
                self._add(run)

    def num_until_known(self, keys: Sequence[bytes]) -> int:
        """The number of keys up to the last one that is known."""
        if self._run_of.keys().isdisjoint(keys):
            return 0
        return next(
            number for number in range(len(keys), 0, -1) if keys[number - 1] in self._run_of
        )

    def num_asked(self, key: bytes) -> int:
        """The number of requests that asked for a chunk, the first one included; 0 if unknown."""
        run = self._run_of.get(key)
        return 0 if run is None else run.num_asked

    def _runs_of(self, keys: Sequence[bytes]) -> Iterator[tuple[_Run | None, Sequence[bytes]]]:
        """The runs of some chunks, None for unknown chunks, and the chunks of each run."""
        first = 0
        for run, group in groupby(map(self._run_of.get, keys)):
            end = first + len(list(group))
            yield run, keys[first:end]
            first = end

    def _part_of(self, run: _Run, keys: Sequence[bytes]) -> _Run:
        """Split a run. Returns a run of the keys, which are all keys of the run or some of them."""
        if len(keys) == len(run.keys):
            return run
        removed = set(keys)
        run.keys = [key for key in run.keys if key not in removed]
        part = _Run(keys, run.origin, run.asked_at, run.num_asked, run.is_answer)
        self._run_of.update(dict.fromkeys(keys, part))
        return part

    def _add(self, run: _Run) -> None:
        """Note that the chunks of a run begin to wait."""
        if run.num_asked == 1:
            self._run_of.update(dict.fromkeys(run.keys, run))
        self._runs[run] = None
        self._runs.move_to_end(run)
        cohort = self._cohorts.setdefault(run.asked_at, {})
        class_index = run.counted_index
        cohort[class_index] = cohort.get(class_index, 0) + len(run.keys)

    def _leave(self, run: _Run, num_chunks: int, now: int) -> None:
        """Note that some chunks of a run do not wait any more."""
        class_index = run.counted_index
        waited = self._waited[class_index]
        for stage, num_uses in _stages_until(now - run.asked_at):
            waited[stage] += num_uses * num_chunks
        cohort = self._cohorts[run.asked_at]
        cohort[class_index] -= num_chunks
        if not cohort[class_index]:
            del cohort[class_index]
            if not cohort:
                del self._cohorts[run.asked_at]

    def _forget_oldest(self, now: int) -> None:
        """Forget the chunks that were asked for longest ago, if too many are known."""
        while self.num_keys > self._max_keys:
            run = next(iter(self._runs))
            forgotten = run.keys[: self.num_keys - self._max_keys]
            self._leave(run, len(forgotten), now)
            for key in forgotten:
                del self._run_of[key]
            run.keys = run.keys[len(forgotten) :]
            if not run.keys:
                del self._runs[run]

    def waited(self, now: int) -> Table:
        """The number of uses for which chunks have waited, by class and stage."""
        waited = [list(row) for row in self._waited]
        num_in_stage = _zeros(self._num_classes)
        in_last_stage = _zeros(self._num_classes)
        for asked_at, cohort in self._cohorts.items():
            age = now - asked_at
            stage = _stage_of(age)
            num_uses = age + 1 - _FIRST_AGES[stage]
            for class_index, num_chunks in cohort.items():
                num_in_stage[class_index][stage] += num_chunks
                in_last_stage[class_index][stage] += num_uses * num_chunks
        for class_index, row in enumerate(waited):
            num_beyond = 0.0  # The number of chunks that have waited through the whole stage.
            for stage in reversed(range(NUM_STAGES)):
                row[stage] += in_last_stage[class_index][stage] + num_beyond * _WIDTHS[stage]
                num_beyond += num_in_stage[class_index][stage]
        return waited

    def _learn(self, now: int) -> None:
        prior_hits = max(1.0, PRIOR_REQUESTS * self._num_asked / self._num_requests)
        # Whether answers come back is learned apart, see `answers`.
        waited = self.waited(now)[:-1]
        hazards = learned_hazards(waited, self.came_back[:-1], prior_hits)
        changes = [
            [number / (uses + 1) for number, uses in zip(*row, strict=True)]
            for row in zip(self._changed[:-1], waited, strict=True)
        ]
        self.densities = [densities(*row) for row in zip(hazards, changes, strict=True)]


def learned_hazards(waited: Table, came_back: Table, prior_hits: float) -> Table:
    """The probability that the next use asks for a chunk, by class and stage.

    If there are few observations, the mean of the class and the mean of the stage decide. The same
    hazard is assumed of all ages, so that age tells nothing before it was observed. With a hazard
    that falls with age, conversations lose their chunks before their next turn, as with LRU.

    Args:
        waited: The number of uses for which chunks waited, by class and stage.
        came_back: How many of these uses asked for the chunk.
        prior_hits: The weight of the assumed hazard, in hits.
    """
    all_waited = [sum(column) for column in zip(*waited, strict=True)]
    all_came_back = [sum(column) for column in zip(*came_back, strict=True)]
    num_hits = sum(all_came_back) + _ASSUMED_HITS
    mean = num_hits / (sum(all_waited) + _ASSUMED_USES)
    of_stage = [
        _hazard(hits, uses, mean, prior_hits)
        for hits, uses in zip(all_came_back, all_waited, strict=True)
    ]
    hazards = []
    for class_hits, class_uses in zip(came_back, waited, strict=True):
        if not any(class_uses):
            hazards.append(of_stage)
            continue
        expected = sum(uses * hazard for uses, hazard in zip(class_uses, of_stage, strict=True))
        factor = (sum(class_hits) + prior_hits) / (expected + prior_hits)
        seen = zip(class_hits, class_uses, of_stage, strict=True)
        hazards.append(
            [_hazard(hits, uses, factor * hazard, prior_hits) for hits, uses, hazard in seen]
        )
    return hazards


def _hazard(hits: float, uses: float, assumed: float, prior_hits: float) -> float:
    """The hits per use, if a hazard is assumed that counts as much as some hits."""
    return min(_MAX_HAZARD, (hits + prior_hits) / (uses + prior_hits / assumed))


def densities(hazards: Sequence[float], changes: Sequence[float]) -> list[float]:
    """The hits per use from the beginning of each stage to the end of the last stage.

    Args:
        hazards: The probability that the next use asks for a chunk, by stage.
        changes: The probability that the chunk gets another origin at the next use, by stage. It
            then waits no longer as what it was, and is worth what is expected of the other origin.
    """
    found = []
    num_hits = 0.0
    num_uses = 0.0
    for stage in reversed(range(NUM_STAGES)):
        width = _WIDTHS[stage]
        hazard = hazards[stage]
        ends = hazard + changes[stage]
        missed = (1 - min(_MAX_HAZARD, ends)) ** width
        hit_share = hazard / ends if hazard else 0.0
        num_hits = (1 - missed) * hit_share + missed * num_hits
        num_uses = width * (1 + missed) / 2 + missed * num_uses
        found.append(num_hits / num_uses)
    return found[::-1]


def _zeros(num_classes: int) -> Table:
    """Zeros by class and stage. The last class is that of answers that no prompt has had."""
    return [[0.0] * NUM_STAGES for _ in range(num_classes + 1)]


def _stage_of(age: int) -> int:
    octave = max(0, age.bit_length() - _STAGES_PER_OCTAVE.bit_length())
    stage = _STAGES_PER_OCTAVE * octave + (max(1, age) >> octave) - 1
    return min(stage, NUM_STAGES - 1)


def _stages_until(age: int) -> Iterator[tuple[int, int]]:
    """The stages of a wait up to an age, each with the number of uses in it."""
    last = _stage_of(age)
    yield from enumerate(_WIDTHS[:last])
    yield last, age + 1 - _FIRST_AGES[last]


def _origin_behind(run: _Run | None) -> int:
    """The origin of chunks that are computed behind a run that has just been asked for."""
    if run is None:
        return 0
    return min(run.num_asked, NUM_CHUNK_ORIGINS) - 1
