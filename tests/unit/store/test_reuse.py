# SPDX-License-Identifier: Apache-2.0
"""What is learned from when chunks are asked for again, and what is kept for it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from unit.store.small_tier import CHUNK_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.reuse import NUM_CLASSES, NUM_STAGES, Reuse, densities, learned_hazards


@dataclass
class _Known:
    """One chunk of the plain count."""

    origin: int
    asked_at: int
    num_asked: int = 1

    def place(self, now: int) -> tuple[int, int]:
        """Class and stage at some use."""
        stage = 0
        while stage < NUM_STAGES - 1 and 2 << stage <= now - self.asked_at:
            stage += 1
        return 4 * self.origin + min(self.num_asked, 4) - 1, stage


class _PlainReuse:
    """Looks at every chunk at every use."""

    def __init__(self, max_keys: int) -> None:
        self.max_keys = max_keys
        self.now = 0
        self.known: dict[bytes, _Known] = {}
        self.waited = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]
        self.came_back = [[0] * NUM_STAGES for _ in range(NUM_CLASSES)]

    def pass_uses(self, number: int) -> None:
        for _ in range(number):
            self.now += 1
            for known in self.known.values():
                index, stage = known.place(self.now)
                self.waited[index][stage] += 1

    def note_ended(self, asked: list[bytes], answered: list[bytes]) -> None:
        origin = 0
        for key in asked:
            known = self.known.pop(key, None)
            if known is None:
                known = _Known(origin, self.now)
            else:
                index, stage = known.place(self.now)
                self.came_back[index][stage] += 1
                known.num_asked += 1
                known.asked_at = self.now
                origin = min(known.num_asked, 3) - 1
            self.known[key] = known
        for key in answered:
            if key not in self.known:
                self.known[key] = _Known(origin, self.now)
        while len(self.known) > self.max_keys:
            del self.known[next(iter(self.known))]


@pytest.mark.parametrize("max_keys", [8, 50, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_counts_are_those_of_looking_at_each_chunk(seed: int, max_keys: int) -> None:
    chance = random.Random(seed)
    reuse, plain = Reuse(max_keys), _PlainReuse(max_keys)
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
        assert len(reuse) == len(plain.known) <= max_keys
    for key, known in plain.known.items():
        index, stage = known.place(plain.now + 1)
        assert reuse.density(key, 0, plain.now) == reuse.densities[index][stage]
    assert reuse.density(b"unknown", plain.now - 2, plain.now) == reuse.densities[0][1]
    assert len({density for row in reuse.densities for density in row}) > 5
    reuse.clear()
    assert not len(reuse) and not any(map(any, [*reuse.waited(9), *reuse.came_back]))
    assert {density for row in reuse.densities for density in row} == {1.0}


def test_where_little_was_seen_a_hazard_is_that_of_class_and_stage() -> None:
    waited = [[100.0] * NUM_STAGES for _ in range(NUM_CLASSES)]
    came_back = [[10.0, *[1.0] * (NUM_STAGES - 1)] for _ in range(NUM_CLASSES)]
    came_back[1] = [2 * hits for hits in came_back[1]]
    waited[1][3] = came_back[1][3] = 0
    hazards = learned_hazards(waited, came_back, 1.0)
    assert hazards[0][0] == pytest.approx(0.1, rel=0.2)
    assert 1.5 * hazards[0][3] < hazards[1][3] < 2.5 * hazards[0][3]
    assert hazards[1][3] < hazards[1][0]


def test_a_density_is_hits_per_use() -> None:
    assert densities([0.0] * NUM_STAGES) == [0.0] * NUM_STAGES
    assert densities([0.5] * NUM_STAGES)[0] == pytest.approx(0.5, rel=0.4)
    soon = densities([0.0, 0.0, 0.9, *[0.0] * (NUM_STAGES - 3)])
    # What is about to come back is worth more than what has just been asked for, or is over.
    assert soon[2] > soon[1] > soon[0] > soon[3] == 0.0


def text_of(number: int, num_chunks: int) -> str:
    """Shares nothing with others."""
    return chr(256 + number) * CHUNK_TOKENS * num_chunks


def ask(tier: SmallTier, text: str) -> int:
    """A request loads what is there, and stores what is not; how many chunks were there."""
    prefix, num_found = TextPrefix(text), 0
    use = tier.next_use()
    tier.note_ended(prefix, len(text), len(text))
    for first in range(0, len(text), CHUNK_TOKENS):
        piece = Piece.rows(first, first + CHUNK_TOKENS)
        entry = tier.begin_store(prefix, piece, 64, use)
        if entry is Refusal.ALREADY_STORED:
            num_found += 1
        elif isinstance(entry, Entry):
            tier.finish_store(entry)
    tier.renew(prefix, len(text), use)
    return num_found


def in_turn() -> Iterator[str]:
    """Ten texts over and over."""
    for number in range(400):
        yield text_of(number % 10, 4)


def between_scans() -> Iterator[str]:
    """Two texts that come back, and many that do not."""
    for number in range(400):
        yield text_of(number % 2, 2) if number % 5 == 0 else text_of(10 + number, 4)


def many_about_few() -> Iterator[str]:
    chance = random.Random(0)
    weights = [1 / rank for rank in range(1, 41)]
    for _ in range(600):
        yield text_of(chance.choices(range(40), weights)[0], 2)


@pytest.mark.parametrize(
    ("texts", "num_places", "least", "max_unlearned"),
    [(in_turn, 20, 0.35, 0.0), (between_scans, 10, 0.05, 0.0), (many_about_few, 20, 0.57, 0.56)],
)
def test_more_is_found_than_with_the_latest_use(
    texts: type[Iterator[str]],
    num_places: int,
    least: float,
    max_unlearned: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def share_found() -> float:
        tier, num_found, num_chunks = SmallTier(num_places), 0, 0
        for text in texts():
            num_found += ask(tier, text)
            num_chunks += len(text) // CHUNK_TOKENS
        return num_found / num_chunks

    assert share_found() > least
    monkeypatch.setattr(Reuse, "density", lambda *_: 1.0)
    assert share_found() <= max_unlearned
