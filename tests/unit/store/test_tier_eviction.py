# SPDX-License-Identifier: Apache-2.0
"""What gives way where sizes differ, and cases that the machine of random calls does not make."""

from __future__ import annotations

import random
from typing import Any

import pytest
from unit.store.small_tier import PLACE_BYTES, UNIT_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.eviction import MAX_TRIED, NUM_SAMPLED, EvictionOrder, Worth

CHUNK = Piece.rows(0, 12)


def text_of(number: int) -> str:
    """A chunk that shares nothing with others."""
    return chr(256 + number) * 12


def store_chunk(tier: SmallTier, number: int, num_places: int = 1) -> Entry:
    return tier.store(text_of(number), CHUNK, num_places)


def test_a_hit_that_gave_way_meanwhile_is_not_loaded() -> None:
    tier = SmallTier(2)
    text = "".join(text_of(number) for number in range(2))
    tier.store_prefix(text)
    hit = tier.find(text)
    store_chunk(tier, 7)
    assert tier.begin_load(hit, tier.next_use()) is None
    assert not any(entry.num_pins for entry in hit.entries)


def store_small_among_large(tier: SmallTier, num_small: int) -> tuple[list[Entry], list[Entry]]:
    """Small entries, each alone between two that are larger and were used later."""
    uses = [tier.next_use() for _ in range(2 * num_small)]
    small, large = [], []
    for number in range(num_small):
        small.append(tier.store(text_of(number), CHUNK, 1, uses[number]))
        large.append(tier.store(text_of(1000 + number), CHUNK, 2, uses[num_small + number]))
    return small, large


def test_what_is_tried_before_a_place_is_found_goes_with_it() -> None:
    tier = SmallTier(6)
    entries = [store_chunk(tier, number) for number in range(6)]
    for number in (0, 2, 3):  # 1, 4 and 5 are tried first
        tier.renew(TextPrefix(text_of(number)), 12, tier.next_use())
    tier.store(text_of(9), CHUNK, num_places=2)
    assert tier.evicted() == [entries[1], entries[4], entries[5]]


def test_after_many_tries_what_is_large_enough_by_itself_goes() -> None:
    num_small = 3 * MAX_TRIED
    tier = SmallTier(3 * num_small)
    small, large = store_small_among_large(tier, num_small)
    tier.store(text_of(5000), CHUNK, 2)
    assert tier.evicted() == [*small[:MAX_TRIED], large[0]]


def test_where_none_is_large_enough_lesser_neighbours_go_together() -> None:
    tier = SmallTier(3 * MAX_TRIED)
    small, large = store_small_among_large(tier, MAX_TRIED)
    tier.begin_load(tier.find(text_of(1000)), large[0].use)
    tier.store(text_of(5000), CHUNK, 5)
    assert tier.evicted() == [*small, *large[1:3]]
    assert large[0].state is EntryState.STORED, "it is being loaded"


def test_few_of_many_entries_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier may have a hundred thousand entries, and the engine waits for the store's plan."""
    num_places, num_looks = 2000, 0
    tier = SmallTier(num_places)
    worth_of = EvictionOrder._worth_of

    def watched(*arguments: Any) -> Worth:
        nonlocal num_looks
        num_looks += 1
        return worth_of(*arguments)

    monkeypatch.setattr(EvictionOrder, "_worth_of", watched)
    entries = [store_chunk(tier, number) for number in range(2 * num_places)]
    assert num_looks <= (NUM_SAMPLED + 1) * num_places
    # Chosen at random, and still nearly all of those that go are among the oldest.
    young = sum(entry.state is EntryState.GONE for entry in entries[-num_places // 2 :])
    assert young < 0.01 * num_places


@pytest.mark.parametrize(
    "piece",
    [
        Piece.rows(0, 14),
        Piece.rows(1, 12),
        Piece.rows(0, 11),
        Piece.rows(4, 4),
        Piece.rows(-2, 2),
        Piece.tails(0),
        Piece.tails(3),
        Piece(Kind.TAILS, 0, 4),
    ],
)
def test_a_piece_that_is_cut_wrong_is_refused(piece: Piece) -> None:
    with pytest.raises(TierError, match=r"chunk of 12 tokens.*multiples of 2, found Piece"):
        SmallTier().begin("x" * 24, piece)


def test_a_long_mix_of_sizes_leaves_no_room_unused_and_refuses_nothing() -> None:
    """Conversations grow: chunks, pieces of any size, and tails larger than a chunk."""
    tier = SmallTier(3000, needs_tails=True)
    chance = random.Random(0)
    lengths: dict[int, int] = {}
    min_held_bytes = tier.capacity_bytes
    for number in range(600):
        grown = list(lengths)[-40:]
        name = chance.choice(grown) if grown and chance.random() < 0.6 else number
        lengths[name] = lengths.get(name, 0) + UNIT_TOKENS * chance.randrange(3, 30)
        prefix = TextPrefix(chr(256 + name) * lengths[name])
        use = tier.next_use()
        load = tier.begin_load(tier.look_up(prefix, prefix.num_tokens), use)
        assert load is not None
        tier.end_load(load)
        entries = []
        for piece in tier.missing_pieces(prefix, 0, prefix.num_tokens):
            num_units = (piece.end_tokens - piece.first_tokens) // UNIT_TOKENS
            entries.append(tier.begin_store(prefix, piece, num_units * PLACE_BYTES, use))
        tails = Piece.tails(prefix.num_tokens)
        entries.append(tier.begin_store(prefix, tails, 11 * PLACE_BYTES, use))
        for entry in entries:
            assert isinstance(entry, Entry)
            tier.finish_store(entry)
        if number > 300:
            min_held_bytes = min(min_held_bytes, tier.counters.bytes_held)
    assert tier.counters.removed_entries[Removal.EVICTED] > 1000
    assert min_held_bytes > 0.9 * tier.capacity_bytes
