# SPDX-License-Identifier: Apache-2.0
"""The rule that learns when chunks are asked for again: what it keeps, and what it lets go."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from unit.store.small_tier import CHUNK_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store import eviction, reuse
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Piece, Worth
from vllm_ascend_kvext.store.reuse import Reuse, densities
from vllm_ascend_kvext.store.reuse_times import NUM_STAGES
from vllm_ascend_kvext.store.worth import EvictionRule


def text_of(number: int, num_chunks: int = 1) -> str:
    """Shares nothing with others."""
    return chr(256 + number) * CHUNK_TOKENS * num_chunks


def tier_of(num_places: int, eviction: EvictionRule = EvictionRule.REUSE) -> SmallTier:
    return SmallTier(num_places, protected_share=0.0, eviction=eviction)


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


def share_found(eviction: EvictionRule, num_places: int, texts: Iterator[str]) -> float:
    tier, num_found, num_chunks = tier_of(num_places, eviction), 0, 0
    for text in texts:
        num_found += ask(tier, text)
        num_chunks += len(text) // CHUNK_TOKENS
    return num_found / num_chunks


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
    ("texts", "num_places", "least", "most_latest"),
    [(in_turn, 20, 0.35, 0.0), (between_scans, 10, 0.08, 0.0), (many_about_few, 20, 0.58, 0.56)],
)
def test_more_is_found_than_with_the_latest_use(
    texts: type[Iterator[str]], num_places: int, least: float, most_latest: float
) -> None:
    assert share_found(EvictionRule.LATEST_USE, num_places, texts()) <= most_latest
    assert share_found(EvictionRule.REUSE, num_places, texts()) > least


def test_before_anything_is_learned_the_order_is_that_of_the_latest_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reuse, "LEARNING_SHARE", math.inf)

    def evicted(eviction: EvictionRule) -> list[int]:
        tier = tier_of(12, eviction)
        for number in range(12):
            ask(tier, text_of(number, 3))
        return [entry.number for entry in tier.evicted()]

    assert evicted(EvictionRule.REUSE) == evicted(EvictionRule.LATEST_USE)
    assert len(evicted(EvictionRule.REUSE)) == 24


def test_a_density_is_hits_per_request() -> None:
    never = densities([0.0] * NUM_STAGES)
    assert never == [0.0] * NUM_STAGES
    assert densities([0.5] * NUM_STAGES)[0] == pytest.approx(0.5, rel=0.4)
    soon = densities([0.0, 0.0, 0.9, *[0.0] * (NUM_STAGES - 3)])
    # What is about to come back is worth more than what has just been asked for, or is over.
    assert soon[2] > soon[1] > soon[0] > soon[3] == 0.0


def test_cleared_tiers_have_learned_nothing() -> None:
    tier = tier_of(8)
    for text in between_scans():
        ask(tier, text)
    rule = tier._rule
    assert isinstance(rule, Reuse)
    assert len({value for row in rule._densities for value in row}) > 5
    tier.clear()
    assert {value for row in rule._densities for value in row} == {1.0}
    assert not len(rule.times)


def test_no_store_waits_until_all_entries_are_queued_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier may have a hundred thousand entries, and the engine waits for the store's plan."""
    monkeypatch.setattr(eviction, "MOST_MOVED", 50)
    num_places = 600
    tier = tier_of(num_places)
    rng = random.Random(3)
    rule = tier._rule
    assert isinstance(rule, Reuse)
    most, num_looks, worth_of = 0, 0, rule.worth_of

    def watched(entry: Entry) -> Worth:
        nonlocal num_looks
        num_looks += 1
        return worth_of(entry)

    tier._order.queue._worth_of = watched
    for number in range(4 * num_places):
        num_looks = 0
        ask(tier, text_of(rng.randrange(2 * num_places) if number % 2 else 5000 + number))
        if number > num_places:
            most = max(most, num_looks)
    assert rule.version > 10
    assert tier.counters.entries_held > num_places * 0.9
    assert 50 <= most < num_places / 2
