# SPDX-License-Identifier: Apache-2.0
"""How much of the tier is for what was loaded."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st
from unit.store.small_tier import CHUNK_TOKENS, PLACE_BYTES, SmallTier

from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.protected_share import ProtectedShare

NUM_PLACES = 8


def small_tier(share: float = 0.5, remembered_share: float = 0.25) -> SmallTier:
    """Of eight places, which remembers what two places held."""
    tier = SmallTier(NUM_PLACES, protected_share=share)
    tier._order.share = ProtectedShare(NUM_PLACES * PLACE_BYTES, share, remembered_share)
    return tier


def protected_places(tier: SmallTier) -> float:
    return tier._order.share.num_bytes / PLACE_BYTES


def text_of(number: int) -> str:
    return chr(ord("A") + number) * CHUNK_TOKENS


def store(tier: SmallTier, *numbers: int) -> list[Entry]:
    return [tier.store(text_of(number), Piece.rows(0, CHUNK_TOKENS)) for number in numbers]


def test_new_entries_that_left_too_early_get_room() -> None:
    tier = small_tier()
    store(tier, *range(NUM_PLACES + 2))  # The first two are evicted.
    store(tier, 0)
    assert protected_places(tier) == 3


def test_loaded_entries_that_left_too_early_get_room() -> None:
    tier = small_tier()
    store(tier, *range(NUM_PLACES))
    for number in range(5):
        tier.load(text_of(number))  # The first of the five loses its rank.
    store(tier, *range(100, 104))
    assert protected_places(tier) == 4
    assert tier.find(text_of(0)).num_tokens == 0
    store(tier, 0)
    assert protected_places(tier) == 5


def test_what_was_evicted_long_ago_says_nothing() -> None:
    tier = small_tier()
    store(tier, *range(NUM_PLACES + 3))  # Three are evicted, the first is forgotten.
    store(tier, 0)
    assert protected_places(tier) == 4


def test_what_loses_its_room_gives_way_at_once() -> None:
    tier = small_tier(share=2 / NUM_PLACES)
    entries = store(tier, *range(NUM_PLACES))
    tier.load(text_of(0))
    tier.load(text_of(1))
    store(tier, *range(100, 102))
    store(tier, 2)  # evicted, and never loaded
    assert protected_places(tier) == 1
    assert [entry.is_hit for entry in entries[:2]] == [False, True]


def test_what_was_loaded_behind_holes_says_nothing() -> None:
    share = ProtectedShare(1000, 0.5, remembered_share=0.5)
    entry = Entry(0, Piece.rows(0, CHUNK_TOKENS), (b"key",), 0, 100, 0)
    entry.was_loaded = True
    share.note_evicted(entry)
    share.note_wanted(entry)
    assert share.num_bytes == 500


def test_an_emptied_tier_begins_anew() -> None:
    tier = small_tier()
    store(tier, *range(NUM_PLACES + 2))
    store(tier, 0)
    assert protected_places(tier) == 3
    tier.clear()
    store(tier, 1)
    assert protected_places(tier) == 4


def test_new_entries_keep_the_room_of_the_largest() -> None:
    share = ProtectedShare(1000, 0.5, remembered_share=0.25)
    loaded = [Entry(n, Piece.rows(0, CHUNK_TOKENS), (bytes([n]),), 0, 100, 0) for n in range(9)]
    for entry in loaded:
        entry.was_loaded = entry.was_hit = True
        share.note_evicted(entry)
        share.note_wanted(entry)
    assert share.num_bytes == 750
    share.note_wanted(Entry(9, Piece.rows(0, CHUNK_TOKENS), (b"large",), 0, 400, 0))
    assert share.num_bytes == 600


def test_a_tier_of_what_was_of_use_takes_in_what_becomes_so() -> None:
    """More documents than fit are asked for twice each, in turns; then others are."""
    tier = SmallTier(100)
    rng = random.Random(0)

    def ask(number: int) -> bool:
        text = text_of(number)
        if tier.find(text).num_tokens == len(text):
            tier.load(text)
            return True
        entry = tier.begin(text, Piece.rows(0, CHUNK_TOKENS))
        if isinstance(entry, Entry):
            tier.finish_store(entry)
        return False

    for _ in range(4000):
        number = rng.randrange(110)
        ask(number)
        ask(number)
    hits = [ask(200 + rng.randrange(20)) for _ in range(2000)]
    assert sum(hits[1000:]) > 900


Step = tuple[int, bool, bool, int]
"""Number of an entry, whether it is evicted or stored, whether it was loaded, places."""

steps = st.lists(st.tuples(st.integers(0, 9), st.booleans(), st.booleans(), st.integers(1, 3)))


@given(steps, st.floats(0, 1), st.floats(0, 1))
def test_agrees_with_lists(history: list[Step], share: float, remembered_share: float) -> None:
    capacity_bytes = NUM_PLACES * PLACE_BYTES
    found = ProtectedShare(capacity_bytes, share, remembered_share)
    expected_bytes, largest_bytes = int(share * capacity_bytes), 0
    evicted: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
    for number, is_evicted, was_hit, num_places in history:
        num_bytes = num_places * PLACE_BYTES
        entry = Entry(0, Piece.rows(0, 2), (str(number).encode(),), 0, num_bytes, 0)
        entry.was_loaded = entry.was_hit = was_hit
        if is_evicted:
            found.note_evicted(entry)
            kept = [each for each in evicted[was_hit] if each[0] != number]
            kept.append((number, num_bytes))
            while sum(size for _, size in kept) > int(remembered_share * capacity_bytes):
                del kept[0]
            evicted[was_hit] = kept
            continue
        found.note_wanted(entry)
        for of_hit, sign in ((False, -1), (True, 1)):
            if any(each[0] == number for each in evicted[of_hit]):
                evicted[of_hit] = [each for each in evicted[of_hit] if each[0] != number]
                expected_bytes = max(0, expected_bytes + sign * num_bytes)
        largest_bytes = max(largest_bytes, num_bytes)
        room_bytes = max(int(remembered_share * capacity_bytes), largest_bytes)
        most_bytes = max(int(share * capacity_bytes), capacity_bytes - room_bytes)
        expected_bytes = min(expected_bytes, most_bytes)
        assert found.num_bytes == expected_bytes
