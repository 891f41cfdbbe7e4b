# SPDX-License-Identifier: Apache-2.0
"""What is counted of chunks that are asked for again, against counting one by one."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from vllm_ascend_kvext.store.reuse_times import (
    NUM_CLASSES,
    NUM_STAGES,
    ReuseTimes,
    class_of,
    stage_of,
)

NOTHING = [[0.0] * NUM_STAGES for _ in range(NUM_CLASSES)]


def test_stages_are_powers_of_two() -> None:
    assert [stage_of(age) for age in (1, 2, 3, 4, 7, 8)] == [0, 1, 1, 2, 2, 3]
    assert stage_of(1 << 40) == NUM_STAGES - 1


@dataclass
class _Known:
    """One chunk of the plain count."""

    origin: int
    asked_at: int
    num_asked: int = 1

    @property
    def place(self) -> int:
        return class_of(self.origin, self.num_asked)


class _PlainTimes:
    """Looks at every chunk at every request."""

    def __init__(self, most_keys: int) -> None:
        self.most_keys = most_keys
        self.now = 0
        self.known: dict[bytes, _Known] = {}
        self.waited = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self.came_back = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]

    def note_ended(self, asked: list[bytes], answered: list[bytes]) -> None:
        self.now += 1
        for known in self.known.values():
            self.waited[known.place][stage_of(self.now - known.asked_at)] += 1
        origin = 0
        for key in asked:
            known = self.known.pop(key, None)
            if known is None:
                known = _Known(origin, self.now)
            else:
                self.came_back[known.place][stage_of(self.now - known.asked_at)] += 1
                known.num_asked += 1
                known.asked_at = self.now
                origin = min(known.num_asked, 3) - 1
            self.known[key] = known
        for key in answered:
            if key not in self.known:
                self.known[key] = _Known(origin, self.now)
        while len(self.known) > self.most_keys:
            del self.known[next(iter(self.known))]


@pytest.mark.parametrize("most_keys", [8, 50, 1000])
@pytest.mark.parametrize("seed", range(5))
def test_counts_are_those_of_looking_at_each_chunk(seed: int, most_keys: int) -> None:
    chance = random.Random(seed)
    times, plain = ReuseTimes(most_keys), _PlainTimes(most_keys)
    for _ in range(300):
        text = chance.choice("abcdefghijklmnop") * chance.randint(1, 6)
        text += chance.choice(["", "", "x", "yz"])
        keys = [text[:end].encode() for end in range(1, len(text) + 1)]
        num_asked = chance.randint(0, len(keys))
        times.note_ended(keys[:num_asked], keys[num_asked:], NOTHING)
        plain.note_ended(keys[:num_asked], keys[num_asked:])
        assert times.waited == plain.waited
        assert times.came_back == plain.came_back
        assert len(times) == len(plain.known) <= most_keys
        assert len(times._cohorts) <= len(plain.known) + 1
    for key, known in plain.known.items():
        chunk = times.get(key)
        assert chunk is not None
        assert (chunk.origin, chunk.asked_at, chunk.num_asked) == (
            known.origin,
            known.asked_at,
            known.num_asked,
        )
    assert sum(map(sum, times.came_back)) > 20


def test_what_was_expected_of_a_chunk_is_summed_up() -> None:
    times = ReuseTimes(10)
    expected = [[0.5 * (stage + 1)] * 1 + [9.0] * (NUM_STAGES - 1) for stage in range(NUM_CLASSES)]
    for _ in range(3):
        times.note_ended([b"a"], [], expected)
    chunk = times.get(b"a")
    assert chunk is not None
    # Twice it came back at once: of the class of one use, and of two.
    assert chunk.num_expected == 0.5 + 1.0


def test_nothing_is_left_when_it_is_cleared() -> None:
    times = ReuseTimes(10)
    times.note_ended([b"a", b"b"], [b"c"], NOTHING)
    times.note_ended([b"a"], [], NOTHING)
    times.clear()
    times.note_ended([b"a"], [], NOTHING)
    assert (times.now, len(times)) == (1, 1)
    assert not any(map(sum, times.came_back))
