# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The tier learns when chunks are looked up again. Eviction uses what it has learned."""

from __future__ import annotations

import random

import pytest
from unit.store.small_tier import CHUNK_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.reuse import (
    NUM_CLASSES,
    NUM_ORIGINS,
    NUM_STAGES,
    Reuse,
    densities,
    learned_hazards,
)


def stage_of(age: int) -> int:
    """The stage of an age, counted from the first stage on. A stage is a quarter of an octave."""
    stage = 0
    end = 1
    octave = 4
    while True:
        end += octave // 4
        if age < end or stage == NUM_STAGES - 1:
            return stage
        stage += 1
        if end == 2 * octave:
            octave *= 2


class PlainReuse:
    """A model that looks at every chunk in every use.

    ``known`` has the origin, the latest use and the number of lookups of each key. Keys in
    ``answers`` have only been seen in answers, and are counted in a class of their own.
    """

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.now = 0
        self.known: dict[bytes, tuple[int, int, int]] = {}
        self.answers: set[bytes] = set()
        self.waited = [[0] * NUM_STAGES for _ in range(NUM_CLASSES + 1)]
        self.came_back = [[0] * NUM_STAGES for _ in range(NUM_CLASSES + 1)]
        self.changed = [[0] * NUM_STAGES for _ in range(NUM_CLASSES + 1)]

    def place(self, key: bytes, now: int) -> tuple[int, int]:
        """The class and the stage of a chunk at some use."""
        origin, asked_at, num_asked = self.known[key]
        return 4 * origin + min(num_asked, 4) - 1, stage_of(now - asked_at)

    def pass_uses(self, number: int) -> None:
        for _ in range(number):
            self.now += 1
            for key in self.known:
                index, stage = self.counted(key)
                self.waited[index][stage] += 1

    def counted(self, key: bytes) -> tuple[int, int]:
        index, stage = self.place(key, self.now)
        return (NUM_CLASSES if key in self.answers else index), stage

    def note_ended(self, asked: list[bytes], answered: list[bytes]) -> None:
        behind = 0
        for key in asked:
            origin = behind
            num_asked = 0
            if key in self.known:
                index, stage = self.counted(key)
                self.came_back[index][stage] += 1
                self.answers.discard(key)
                origin, _, num_asked = self.known.pop(key)
                behind = min(num_asked + 1, 3) - 1
            self.known[key] = origin, self.now, num_asked + 1
        for key in answered:
            if key not in self.known:
                self.known[key] = behind, self.now, 1
                self.answers.add(key)
        while len(self.known) > self.max_keys:
            oldest = next(iter(self.known))
            del self.known[oldest]
            self.answers.discard(oldest)

    def note_new(self, key: bytes, origin: int) -> None:
        self.known.setdefault(key, (origin, self.now, 1))
        if len(self.known) > self.max_keys:
            del self.known[next(iter(self.known))]

    def change_origin(self, key: bytes, before: set[int], origin: int) -> None:
        if key in self.known and self.known[key][0] in before:
            index, stage = self.place(key, self.now)
            self.changed[index][stage] += 1
            _, _, num_asked = self.known.pop(key)
            self.known[key] = origin, self.now, num_asked


@pytest.mark.parametrize("max_keys", [8, 50, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_looking_at_each_chunk(seed: int, max_keys: int) -> None:
    chance = random.Random(seed)
    reuse = Reuse(max_keys)
    plain = PlainReuse(max_keys)
    for _ in range(300):
        text = chance.choice("abcdefghijklmnop") * chance.randint(1, 6)
        text += chance.choice(["", "", "x", "yz"])
        keys = [text[:end].encode() for end in range(1, len(text) + 1)]
        num_asked = chance.randint(0, len(keys))
        plain.pass_uses(chance.randint(1, 3))
        reuse.note_ended(keys[:num_asked], keys[num_asked:], plain.now)
        plain.note_ended(keys[:num_asked], keys[num_asked:])
        assert reuse.waited(plain.now) == plain.waited
        assert reuse.came_back == plain.came_back
        assert reuse.num_keys == len(plain.known) <= max_keys
    for key in plain.known:
        index, stage = plain.place(key, plain.now + 1)
        assert reuse.density(key, 0, plain.now) == reuse.densities[index][stage]
    assert reuse.density(b"unknown", plain.now - 2, plain.now) == reuse.densities[0][2]
    assert len({density for row in reuse.densities for density in row}) > 5
    reuse.clear()
    assert not reuse.num_keys and not any(map(any, [*reuse.waited(9), *reuse.came_back]))
    assert {density for row in reuse.densities for density in row} == {1.0}


@pytest.mark.parametrize("max_keys", [8, 50])
@pytest.mark.parametrize("seed", range(3))
def test_chunks_of_another_origin_are_counted_there(seed: int, max_keys: int) -> None:
    chance = random.Random(seed)
    reuse = Reuse(max_keys)
    plain = PlainReuse(max_keys)
    names = [bytes([number]) for number in range(40)]
    for _ in range(400):
        plain.pass_uses(chance.randint(1, 3))
        key, origin = chance.choice(names), chance.randrange(NUM_ORIGINS)
        reuse.note_new(key, origin, plain.now)
        plain.note_new(key, origin)
        keys, [origin, *before] = chance.sample(names, 5), chance.sample(range(NUM_ORIGINS), 5)
        reuse.change_origin(keys, before, origin, plain.now)
        for changed in keys:
            plain.change_origin(changed, set(before), origin)
        plain.pass_uses(1)
        key = chance.choice(names)
        if key in plain.known:
            reuse.note_ended([key], (), plain.now)
            plain.note_ended([key], [])
        assert reuse.waited(plain.now) == plain.waited
        assert reuse.came_back == plain.came_back
        assert reuse._changed == plain.changed
    for name in plain.known:
        index, stage = plain.place(name, plain.now + 1)
        assert reuse.density(name, 0, plain.now) == reuse.densities[index][stage]


def test_a_stage_is_a_quarter_of_an_octave() -> None:
    assert [stage_of(age) for age in (1, 7, 8, 9, 10, 15, 16, 19, 20)] == [
        *(0, 6, 7, 7, 8, 10, 11, 11, 12)
    ]
    assert stage_of(1 << 14) == stage_of(1 << 20) == NUM_STAGES - 1
    assert stage_of((1 << 14) - 1) == NUM_STAGES - 2


def test_where_little_was_seen_a_hazard_is_that_of_class_and_stage() -> None:
    waited = [[100.0] * NUM_STAGES for _ in range(NUM_CLASSES)]
    came_back = [[10.0, *[1.0] * (NUM_STAGES - 1)] for _ in range(NUM_CLASSES)]
    came_back[1] = [2 * hits for hits in came_back[1]]
    waited[1][3] = 0
    came_back[1][3] = 0
    hazards = learned_hazards(waited, came_back, 1.0)
    assert hazards[0][0] == pytest.approx(0.1, rel=0.2)
    assert 1.5 * hazards[0][3] < hazards[1][3] < 2.5 * hazards[0][3]
    assert hazards[1][3] < hazards[1][0]


NEVER = [0.0] * NUM_STAGES


def test_a_density_is_hits_per_use() -> None:
    assert densities(NEVER, NEVER) == NEVER
    assert densities([0.5] * NUM_STAGES, NEVER)[0] == pytest.approx(0.5, rel=0.4)
    soon = densities([0.0, 0.0, 0.9, *NEVER[3:]], NEVER)
    # A chunk that will soon come back has the highest density. A chunk that was just looked up has
    # a lower density, and one that does not come back has the lowest.
    assert soon[2] > soon[1] > soon[0] > soon[3] == 0.0


def test_a_chunk_that_gets_another_origin_is_not_expected_to_come_back_later() -> None:
    late = [*NEVER[:20], *[0.5] * (NUM_STAGES - 20)]
    changes = [0.9] * 10 + NEVER[10:]
    assert densities(late, changes)[0] < densities(late, NEVER)[0] / 5
    assert densities(late, changes)[10:] == densities(late, NEVER)[10:]
    # The time in which it still might come back ends, too.
    hazards = [0.1] * 10 + NEVER[10:]
    assert densities(hazards, changes)[0] > densities(hazards, NEVER)[0]
    for hazard in (0.1, 0.999):
        found = densities([hazard] * NUM_STAGES, [0.999] * NUM_STAGES)
        assert 0 < found[0] < 1


def share_found(texts: list[tuple[int, int]], num_places: int) -> float:
    """The share of found chunks when texts (number, chunks) are looked up one after the other."""
    tier = SmallTier(num_places)
    num_found = 0
    for number, num_chunks in texts:
        text = chr(256 + number) * CHUNK_TOKENS * num_chunks
        use = tier.next_use()
        tier.note_ended(TextPrefix(text), len(text), len(text))
        for first in range(0, len(text), CHUNK_TOKENS):
            found = tier.begin(text, Piece.rows(first, first + CHUNK_TOKENS), use=use)
            num_found += found is Refusal.ALREADY_STORED
            if isinstance(found, Entry):
                tier.finish_store(found)
        tier.renew(TextPrefix(text), len(text), use)
    return num_found / sum(num_chunks for _, num_chunks in texts)


IN_TURN = [(number % 10, 4) for number in range(400)]
# Two texts that come back, and many that do not.
BETWEEN_SCANS = [(number % 2, 2) if number % 5 == 0 else (10 + number, 4) for number in range(400)]
WEIGHTS = [1 / rank for rank in range(1, 41)]
MANY_ABOUT_FEW = [(number, 2) for number in random.Random(0).choices(range(40), WEIGHTS, k=600)]


@pytest.mark.parametrize(
    ("texts", "num_places", "least", "max_unlearned"),
    [(IN_TURN, 20, 0.35, 0.0), (BETWEEN_SCANS, 10, 0.05, 0.0), (MANY_ABOUT_FEW, 20, 0.565, 0.56)],
    ids=["in turn", "between scans", "many about few"],
)
def test_more_is_found_than_with_the_latest_use(
    texts: list[tuple[int, int]],
    num_places: int,
    least: float,
    max_unlearned: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert share_found(texts, num_places) > least
    monkeypatch.setattr(Reuse, "density", lambda *_: 1.0)
    assert share_found(texts, num_places) <= max_unlearned
