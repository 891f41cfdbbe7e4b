# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The cost of lookups, refused calls, and cases that the tier machine does not reach."""

from __future__ import annotations

import random
from typing import Any

import pytest
from unit.store.small_tier import CHUNK_TOKENS, PLACE_BYTES, UNIT_TOKENS, SmallTier, pin
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.holes.load_plan import plan_of_hit
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.eviction import MAX_TRIED, NUM_SAMPLED, EvictionOrder, Priority
from vllm_ascend_kvext.store.lookup import MAX_PIECES, Shortfall
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

# The cost of lookups, and prefixes.


class CountingPrefix(TextPrefix):
    """A prefix that counts the keys for which a lookup asks."""

    num_asked = 0

    def key_at(self, boundary_tokens: int) -> bytes:
        CountingPrefix.num_asked += 1
        return super().key_at(boundary_tokens)


def test_a_lookup_asks_for_one_key_per_chunk() -> None:
    num_chunks = 100
    tier = SmallTier(200)
    text = "".join(chr(256 + index) for index in range(num_chunks * CHUNK_TOKENS))
    tier.store_prefix(text)
    CountingPrefix.num_asked = 0
    assert tier.look_up(CountingPrefix(text), len(text)).boundary_tokens == len(text)
    assert CountingPrefix.num_asked == num_chunks
    CountingPrefix.num_asked = 0
    assert tier.lookup(CountingPrefix("x" * len(text))).find_runs(len(text), 0) == []
    assert CountingPrefix.num_asked == CHUNK_TOKENS // UNIT_TOKENS + num_chunks - 1


def test_a_chunk_in_too_many_pieces_is_stored_as_one_and_they_go() -> None:
    tier = SmallTier()
    text = "abcdefghijkl"
    for index in range(MAX_PIECES):
        tier.store(text, Piece.rows(2 * index, 2 * index + 2))
    assert tier.lookup(TextPrefix(text)).missing_pieces(0, 12) == [Piece.rows(0, 12)]
    whole = tier.store(text, Piece.rows(0, 12))
    assert [entry.piece.end_tokens for entry, _ in tier.removed] == [2, 4, 6, 8]
    assert tier.counters.entries_held == 1
    assert tier.find(text[:6] + "another").run.entries == (whole,)


def test_a_chunk_that_is_stored_as_a_whole_is_not_stored_in_pieces_too() -> None:
    """The second gap has too many pieces before it, so the first gap needs no piece of its own."""
    tier = SmallTier()
    text = "abcdefghijkl"
    for first, end in ((0, 2), (2, 4), (6, 8)):
        tier.store(text, Piece.rows(first, end))
    assert tier.lookup(TextPrefix(text)).missing_pieces(0, 8) == [Piece.rows(4, 6)]
    assert tier.lookup(TextPrefix(text)).missing_pieces(0, 12) == [Piece.rows(0, 12)]


def test_a_piece_ends_where_a_cut_is_stored_again() -> None:
    tier = HostTier(100 * PLACE_BYTES, TierGeometry(24, 2, cut_tokens=12))
    prefix = TextPrefix("abcdefghijklmnopqrstuvwx")
    for first, end in ((14, 16), (16, 18), (18, 20), (20, 22)):
        entry = tier.begin_store(prefix, Piece.rows(first, end), PLACE_BYTES, 0)
        assert isinstance(entry, Entry)
        tier.finish_store(entry)
    assert tier.lookup(prefix).missing_pieces(0, 22) == [Piece.rows(0, 14)]
    assert tier.lookup(prefix).missing_pieces(0, 24) == [Piece.rows(0, 12), Piece.rows(12, 24)]


def test_gaps_behind_rows_that_are_stored_again_are_stored_apart() -> None:
    tier = HostTier(100 * PLACE_BYTES, TierGeometry(24, 2))
    prefix = TextPrefix("abcdefghijklmnopqrstuvwx")
    for first in (0, 2, 4, 8, 12):
        entry = tier.begin_store(prefix, Piece.rows(first, first + 2), PLACE_BYTES, 0)
        assert isinstance(entry, Entry)
        tier.finish_store(entry)
    found = tier.lookup(prefix).missing_pieces(0, 16)
    assert found == [Piece.rows(0, 12), Piece.rows(14, 16)]


def test_an_old_eviction_is_forgotten_and_a_reset_forgets_all() -> None:
    tier = SmallTier(1, remembered_keys=1)
    for text in ("aa", "bb", "cc"):
        tier.store(text, Piece.rows(0, 2))
    assert tier.find("aa").shortfall is Shortfall.NEVER_STORED
    assert tier.find("bb").shortfall is Shortfall.EVICTED
    tier.clear()
    assert tier.find("bb").shortfall is Shortfall.NEVER_STORED


@pytest.mark.parametrize(
    ("chunk", "unit", "others", "message"),
    [
        *[(*c, {}, f"found {c[0]}; choose another chunk size") for c in [(12, 5), (0, 0), (2, 4)]],
        (12, 2, {"needs_rows": False, "needs_tails": False}, "leave the tier out"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused(
    chunk: int, unit: int, others: dict[str, bool], message: str
) -> None:
    with pytest.raises(TierError, match=message):
        TierGeometry(chunk, unit, **others)


@pytest.mark.parametrize("step", [16, 32, 48])
@pytest.mark.parametrize("first", [16, 48])
@pytest.mark.parametrize("stop", [1, 17, 65, 129])
def test_the_hashes_of_a_request_are_keys(first: int, stop: int, step: int) -> None:
    hashes = [bytes([number]) for number in range(7)]
    prefix = HashedPrefix(hashes, 16)
    hashes.append(bytes([7]))  # vLLM's list of hashes grows with the request.
    assert prefix.num_tokens == 128
    boundaries = range(first, stop, step)
    keys = [hashes[each // 16 - 1] for each in boundaries]
    assert list(prefix.keys_at(boundaries)) == keys == [prefix.key_at(each) for each in boundaries]


@pytest.mark.parametrize(
    "boundaries", [range(0, 33, 16), range(16, 145, 16), range(16, 65, 24), [15], [144], [-16]]
)
def test_keys_where_nothing_is_hashed_are_refused(boundaries: range | list[int]) -> None:
    prefix = HashedPrefix([b"one"] * 8, 16)
    with pytest.raises(TierError, match="ask at boundaries that are hashed"):
        if isinstance(boundaries, range):
            prefix.keys_at(boundaries)
        else:
            prefix.key_at(boundaries[0])


# The choice of evicted entries.

CHUNK = Piece.rows(0, 12)


def text_of(number: int) -> str:
    """The text of a chunk that shares no prefix with other chunks."""
    return chr(256 + number) * 12


def store_chunk(tier: SmallTier, number: int, num_places: int = 1) -> Entry:
    return tier.store(text_of(number), CHUNK, num_places)


def test_a_hit_that_gave_way_meanwhile_is_not_loaded() -> None:
    tier = SmallTier(2)
    text = "".join(text_of(number) for number in range(2))
    tier.store_prefix(text)
    plan = plan_of_hit(tier.find(text))
    store_chunk(tier, 7)
    assert pin(tier, plan, tier.next_use()) is None
    assert not any(entry.num_pins for entry in plan.entries)


def store_small_among_large(tier: SmallTier, num_small: int) -> tuple[list[Entry], list[Entry]]:
    """Store small entries, each between two larger entries that were used later."""
    uses = [tier.next_use() for _ in range(2 * num_small)]
    small = []
    large = []
    for number in range(num_small):
        small.append(tier.store(text_of(number), CHUNK, 1, uses[number]))
        large.append(tier.store(text_of(1000 + number), CHUNK, 2, uses[num_small + number]))
    return small, large


def test_what_is_tried_before_a_place_is_found_goes_with_it() -> None:
    tier = SmallTier(6)
    entries = [store_chunk(tier, number) for number in range(6)]
    for number in (0, 2, 3):  # So the tier tries entries 1, 4 and 5 first.
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
    pin(tier, plan_of_hit(tier.find(text_of(1000))), large[0].use)
    tier.store(text_of(5000), CHUNK, 5)
    assert tier.evicted() == [*small, *large[1:3]]
    assert large[0].state is EntryState.STORED, "an entry was evicted while it is loaded"


def test_what_is_larger_than_the_tier_is_refused() -> None:
    assert SmallTier(2).begin(text_of(1), CHUNK, num_places=3) is Refusal.NO_ROOM
    with_spare_bytes = SmallTier(2, spare_bytes=1)
    assert with_spare_bytes.store(text_of(1), CHUNK).num_bytes == 2 * PLACE_BYTES
    assert with_spare_bytes.begin(text_of(2), CHUNK, num_places=2) is Refusal.NO_ROOM


def test_few_of_many_entries_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tier may have a hundred thousand entries. The engine waits for the plan of a store."""
    num_places = 2000
    num_looks = 0
    tier = SmallTier(num_places)
    priority_of = EvictionOrder.priority

    def watched(*arguments: Any) -> Priority:
        nonlocal num_looks
        num_looks += 1
        return priority_of(*arguments)

    monkeypatch.setattr(EvictionOrder, "priority", watched)
    entries = [store_chunk(tier, number) for number in range(2 * num_places)]
    assert num_looks <= (NUM_SAMPLED + 1) * num_places
    # Candidates are chosen at random. Still, nearly all evicted entries are among the oldest.
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
    """Growing conversations store chunks, pieces of any size, and tails larger than a chunk."""
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
        load = pin(tier, plan_of_hit(tier.look_up(prefix, prefix.num_tokens)), use)
        assert load is not None
        tier.end_load(load)
        entries = []
        for piece in tier.lookup(prefix).missing_pieces(0, prefix.num_tokens):
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


def test_the_same_calls_lead_to_the_same_offsets() -> None:
    def offsets() -> list[int]:
        tier = SmallTier(300)
        numbers = range(600)
        return [
            store_chunk(tier, number * 7 % 400, 1 + number % 3).offset_bytes for number in numbers
        ]

    assert offsets() == offsets()
