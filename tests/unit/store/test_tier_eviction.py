# SPDX-License-Identifier: Apache-2.0
"""What gives way, in which order, and what does not."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
from unit.store.small_tier import PLACE_BYTES, UNIT_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.eviction import MOST_SPARED, MOST_TRIED, MOST_TRIED_IN_ALL
from vllm_ascend_kvext.store.loads import LoadOutcome

CHUNK = Piece.rows(0, 12)


def text_of(number: int) -> str:
    """A chunk that shares nothing with others."""
    return chr(256 + number) * 12


def store_chunk(tier: SmallTier, number: int, num_places: int = 1) -> Entry:
    return tier.store(text_of(number), CHUNK, num_places)


def test_what_was_used_longest_ago_goes_first() -> None:
    tier = SmallTier(3)
    entries = [store_chunk(tier, number) for number in range(3)]
    tier.renew(TextPrefix(text_of(0)), 12, tier.next_use())
    for number in range(3, 6):
        store_chunk(tier, number)
    assert tier.evicted() == [entries[1], entries[2], entries[0]]


def test_what_was_never_loaded_goes_before_what_was() -> None:
    tier = SmallTier(3)
    entries = [store_chunk(tier, number) for number in range(3)]
    tier.load(text_of(0))
    for number in range(3, 6):
        store_chunk(tier, number)
    assert entries[0] not in tier.evicted()
    assert tier.evicted()[:2] == entries[1:]


@pytest.mark.parametrize("outcome", [LoadOutcome.CANCELLED, LoadOutcome.FAILED])
def test_a_load_that_brought_nothing_is_no_hit(outcome: LoadOutcome) -> None:
    tier = SmallTier(3)
    entry = store_chunk(tier, 0)
    tier.load(text_of(0), outcome)
    assert not entry.is_hit
    assert tier.counters.hit_entries[Kind.ROWS] == 0
    assert tier.counters.failed_loads == (outcome is LoadOutcome.FAILED)


@pytest.mark.parametrize("outcome", LoadOutcome)
def test_what_is_left_out_of_a_load_has_the_rank_of_what_is_loaded(outcome: LoadOutcome) -> None:
    tier = SmallTier(3)
    text = "".join(text_of(number) for number in range(3))
    chunks = tier.store_prefix(text)
    hit = tier.find(text)
    load = tier.begin_load(
        replace(hit, entries=hit.entries[2:], left_out=hit.entries[:2]), tier.next_use()
    )
    assert load is not None
    tier._remove(chunks[1], Removal.EVICTED)
    tier.end_load(load, outcome)
    is_loaded = outcome is LoadOutcome.LOADED
    assert [entry.is_hit for entry in chunks] == [is_loaded, False, is_loaded]
    assert [entry.was_loaded for entry in chunks] == [False, False, is_loaded]
    assert tier.counters.hit_entries[Kind.ROWS] == is_loaded


def test_what_was_loaded_long_ago_loses_its_rank_beyond_the_share() -> None:
    tier = SmallTier(4, protected_share=0.5)
    entries = [store_chunk(tier, number) for number in range(4)]
    for number in (2, 0, 1):
        tier.load(text_of(number))
    assert [entry.is_hit for entry in entries] == [True, True, False, False]
    for number in range(4, 8):
        store_chunk(tier, number)
    assert tier.evicted()[:2] == [entries[3], entries[2]]
    assert entries[0].state is entries[1].state is EntryState.STORED


def test_the_end_of_a_prefix_goes_before_its_beginning() -> None:
    tier = SmallTier(4)
    text = "".join(text_of(number) for number in range(4))
    chunks = tier.store_prefix(text)
    for number in range(4, 8):
        store_chunk(tier, number)
    assert tier.evicted() == chunks[::-1]


def test_whoever_extends_a_prefix_renews_its_beginning() -> None:
    tier = SmallTier(3)
    text = "".join(text_of(number) for number in range(2))
    first = tier.store(text, CHUNK)
    other = store_chunk(tier, 7)
    tier.store(text, Piece.rows(12, 24))
    store_chunk(tier, 8)
    assert tier.evicted() == [other]
    assert first.state is EntryState.STORED


def test_whoever_loads_the_end_of_a_prefix_renews_what_the_device_has() -> None:
    tier = SmallTier(3)
    text = "".join(text_of(number) for number in range(2))
    first, _ = tier.store_prefix(text)
    other = store_chunk(tier, 7)
    load = tier.begin_load(tier.find(text, after_tokens=12), tier.next_use())
    assert load is not None
    assert len(load.entries) == 1
    store_chunk(tier, 8)
    assert tier.evicted() == [other]
    assert first.state is EntryState.STORED


def test_rows_behind_a_gap_stay() -> None:
    tier = SmallTier(4)
    text = "".join(text_of(number) for number in range(3))
    first = tier.store(text, CHUNK)
    tier.store(text, Piece.rows(24, 36))
    tier._remove(first, Removal.EVICTED)
    store_chunk(tier, 7)
    assert tier.find(text, after_tokens=24).boundary_tokens == 36


def test_tails_whose_rows_are_gone_go_first() -> None:
    tier = SmallTier(3, needs_tails=True)
    entries = [store_chunk(tier, number) for number in range(2)]
    tails = tier.store(text_of(1), Piece.tails(12))
    tier.load(text_of(1))
    assert tails.is_hit
    tier._remove(entries[1], Removal.EVICTED)
    store_chunk(tier, 2)
    store_chunk(tier, 3)
    assert tier.evicted() == [entries[1], tails]


def test_tails_have_their_worth_back_when_their_rows_are_stored_again() -> None:
    tier = SmallTier(3, needs_tails=True)
    rows = store_chunk(tier, 0)
    tails = tier.store(text_of(0), Piece.tails(12))
    tier.load(text_of(0))
    tier._remove(rows, Removal.LOAD_FAILED)
    again, other = store_chunk(tier, 0), store_chunk(tier, 1)
    store_chunk(tier, 2)
    assert tier.evicted() == [again]
    assert tails.state is other.state is EntryState.STORED


def test_tails_that_have_their_rows_back_are_queued_as_loaded_at_once() -> None:
    tier = SmallTier(4, needs_tails=True)
    rows = store_chunk(tier, 0)
    tails = tier.store(text_of(0), Piece.tails(12))
    tier.load(text_of(0))
    tier._remove(rows, Removal.LOAD_FAILED)
    assert tier._order.queue.first(is_hit=True) is None
    store_chunk(tier, 0)
    assert tier._order.queue.first(is_hit=True) is tails


def test_tails_without_rows_push_out_nothing() -> None:
    tier = SmallTier(1, needs_tails=True)
    store_chunk(tier, 0)
    assert tier.begin(text_of(1), Piece.tails(12)) is Refusal.WORTH_LESS


def test_a_boundary_s_tails_go_before_its_rows() -> None:
    tier = SmallTier(2, needs_tails=True)
    _, tails = tier.store_prefix(text_of(0))
    store_chunk(tier, 1)
    assert tier.evicted() == [tails]


# All or nothing.


def test_what_is_loaded_or_stored_never_gives_way() -> None:
    tier = SmallTier(2)
    store_chunk(tier, 0)
    load = tier.begin_load(tier.find(text_of(0)), tier.next_use())
    assert load is not None
    storing = tier.begin(text_of(1), CHUNK)
    assert tier.begin(text_of(2), CHUNK) is Refusal.NO_ROOM
    tier.end_load(load, LoadOutcome.CANCELLED)
    assert isinstance(tier.begin(text_of(2), CHUNK), Entry)
    assert storing not in tier.evicted()


def test_a_load_by_the_request_that_stored_it_keeps_an_entry() -> None:
    tier = SmallTier(1)
    entry = store_chunk(tier, 0)
    assert tier.begin_load(tier.find(text_of(0)), entry.use) is not None
    assert tier.begin(text_of(1), CHUNK) is Refusal.NO_ROOM


def test_nothing_is_evicted_for_a_place_that_cannot_be_had() -> None:
    tier = SmallTier(3)
    for number in range(3):
        store_chunk(tier, number)
    load = tier.begin_load(tier.find(text_of(1)), tier.next_use())
    assert tier.begin(text_of(9), CHUNK, num_places=2) is Refusal.NO_ROOM
    assert not tier.removed
    assert tier.counters.refused_stores[Refusal.NO_ROOM] == 1
    assert load is not None
    tier.end_load(load)


def test_what_is_larger_than_the_tier_is_refused() -> None:
    tier = SmallTier(2)
    store_chunk(tier, 0)
    assert tier.begin(text_of(1), CHUNK, num_places=3) is Refusal.NO_ROOM


def test_a_store_pushes_out_nothing_that_is_worth_more() -> None:
    tier = SmallTier(1, protected_share=1)
    store_chunk(tier, 0)
    tier.load(text_of(0))
    assert tier.begin(text_of(1), CHUNK) is Refusal.WORTH_LESS


def test_a_prefix_does_not_push_out_its_own_beginning() -> None:
    tier = SmallTier(2)
    text = "".join(text_of(number) for number in range(3))
    use = tier.next_use()
    for piece in (CHUNK, Piece.rows(12, 24)):
        tier.store(text, piece, use=use)
    assert tier.begin(text, Piece.rows(24, 36), use=use) is Refusal.WORTH_LESS
    assert tier.find(text).boundary_tokens == 24


def test_only_what_lies_in_the_new_place_goes() -> None:
    tier = SmallTier(6)
    entries = [store_chunk(tier, number) for number in range(6)]
    for number in (0, 2, 3):  # these stay longest; 1, 4 and 5 are tried first
        tier.renew(TextPrefix(text_of(number)), 12, tier.next_use())
    tier.store(text_of(9), CHUNK, num_places=2)
    assert tier.evicted() == [entries[4], entries[5]]
    assert entries[1].state is EntryState.STORED
    store_chunk(tier, 10)
    assert tier.evicted()[2:] == [entries[1]], "what was tried is still the first in order"


def store_small_among_large(tier: SmallTier, num_small: int) -> tuple[list[Entry], list[Entry]]:
    """Small entries, each alone between two that are larger and were used later."""
    uses = [tier.next_use() for _ in range(2 * num_small)]
    small, large = [], []
    for number in range(num_small):
        small.append(tier.store(text_of(number), CHUNK, 1, uses[number]))
        large.append(tier.store(text_of(1000 + number), CHUNK, 2, uses[num_small + number]))
    return small, large


def test_after_many_tries_what_is_large_enough_by_itself_goes() -> None:
    num_small = 3 * MOST_TRIED
    tier = SmallTier(3 * num_small)
    _, large = store_small_among_large(tier, num_small)
    for number in range(3):
        tier.store(text_of(5000 + number), CHUNK, 2)
    assert tier.evicted() == large[:3]


def test_where_none_is_large_enough_lesser_neighbours_go_together() -> None:
    num_small = MOST_TRIED_IN_ALL
    tier = SmallTier(3 * num_small)
    small, large = store_small_among_large(tier, num_small)
    tier.store(text_of(5000), CHUNK, 3)
    assert tier.evicted() == [small[0], large[0]]


def test_a_tried_entry_stays_where_its_lesser_neighbours_are_enough() -> None:
    num_small = MOST_TRIED
    tier = SmallTier(5 * num_small)
    uses = [tier.next_use() for _ in range(3 * num_small)]
    large = []
    for number in range(num_small):
        tier.store(text_of(number), CHUNK, 1, uses[number])
        for other in range(2):
            use = uses[num_small + 2 * number + other]
            large.append(tier.store(text_of(1000 + 2 * number + other), CHUNK, 2, use))
    tier.store(text_of(5000), CHUNK, 4)
    assert tier.evicted() == large[:2]


def test_a_neighbour_that_is_being_loaded_does_not_go_along() -> None:
    num_small = MOST_TRIED_IN_ALL
    tier = SmallTier(3 * num_small)
    _, large = store_small_among_large(tier, num_small)
    loads = [tier.begin_load(tier.find(text_of(1000)), large[0].use) for _ in range(2)]
    tier.store(text_of(5000), CHUNK, 3)
    assert large[0] not in tier.evicted()
    assert len(tier.evicted()) == 2
    assert all(loads)


def test_small_entries_are_not_spared_for_ever() -> None:
    num_small = 3 * MOST_TRIED
    tier = SmallTier(3 * num_small)
    small, large = store_small_among_large(tier, num_small)
    for number in range(MOST_SPARED):
        tier.store(text_of(5000 + number), CHUNK, 2)
    assert tier.evicted() == large[:MOST_SPARED]
    tier.store(text_of(6000), CHUNK, 2)
    assert set(tier.evicted()[MOST_SPARED:]) == {*small[:MOST_TRIED], large[MOST_SPARED]}


def test_the_search_for_a_place_ends_where_everything_around_has_to_stay() -> None:
    num_small = MOST_TRIED_IN_ALL + 2
    tier = SmallTier(3 * num_small, protected_share=1)
    store_small_among_large(tier, num_small)
    for number in range(num_small - 1):
        tier.load(text_of(1000 + number))
    # The last small and large entry would do, and lie behind too many others.
    assert tier.begin(text_of(5000), CHUNK, 3) is Refusal.WORTH_LESS
    for number in range(MOST_TRIED_IN_ALL // 2):
        tier.load(text_of(number))
    assert isinstance(tier.begin(text_of(5000), CHUNK, 3), Entry)


def test_the_order_does_not_grow_with_what_comes_and_goes() -> None:
    tier = SmallTier(10)
    for number in itertools.islice(itertools.cycle(range(8)), 2000):
        if tier.find(text_of(number)).num_tokens:
            tier.load(text_of(number), LoadOutcome.LOADED if number % 3 else LoadOutcome.FAILED)
        else:
            store_chunk(tier, number)
    queue = tier._order.queue
    assert queue.num_items <= 2 * 10 + 64
    assert queue.num_queued == tier.counters.entries_held


# Transfers.


def test_an_entry_is_a_hit_once_it_is_stored_and_not_stored_twice() -> None:
    tier = SmallTier()
    entry = tier.begin(text_of(0), CHUNK)
    assert isinstance(entry, Entry)
    assert tier.find(text_of(0)).num_tokens == 0
    assert tier.begin(text_of(0), CHUNK) is Refusal.BEING_STORED
    assert tier.finish_store(entry, "rows")
    assert tier.begin(text_of(0), CHUNK) is Refusal.ALREADY_STORED
    assert tier.find(text_of(0)).entries == (entry,)
    assert entry.row_map == "rows"


def test_a_store_that_a_longer_one_overtook_is_dropped_and_not_reported() -> None:
    tier = SmallTier()
    short, whole = tier.begin(text_of(0), Piece.rows(0, 4)), tier.begin(text_of(0), CHUNK)
    assert isinstance(short, Entry) and isinstance(whole, Entry)
    assert tier.finish_store(whole)
    assert not tier.finish_store(short)
    assert (tier.removed, tier.counters.bytes_held) == ([], 64)
    assert tier.counters.removed_entries[Removal.REPLACED] == 1


def test_a_failed_store_gives_its_place_back_at_once() -> None:
    tier = SmallTier(1)
    entry = tier.begin(text_of(0), CHUNK)
    assert isinstance(entry, Entry)
    tier.fail_store(entry)
    assert (tier.counters.failed_stores, tier.counters.bytes_held) == (1, 0)
    assert isinstance(tier.begin(text_of(0), CHUNK), Entry)


def test_a_hit_that_gave_way_meanwhile_is_not_loaded() -> None:
    tier = SmallTier(2)
    text = "".join(text_of(number) for number in range(2))
    tier.store_prefix(text)
    hit = tier.find(text)
    store_chunk(tier, 7)
    assert tier.begin_load(hit, tier.next_use()) is None
    assert not any(entry.num_pins for entry in hit.entries)


def test_a_failed_load_takes_its_entries_from_everyone() -> None:
    tier = SmallTier()
    entry = store_chunk(tier, 0)
    one, other = (tier.begin_load(tier.find(text_of(0)), tier.next_use()) for _ in range(2))
    assert one is not None and other is not None
    tier.end_load(one, LoadOutcome.FAILED)
    assert tier.removed == [(entry, Removal.LOAD_FAILED)]
    assert tier.find(text_of(0)).num_tokens == 0
    assert tier.counters.bytes_held == 64, "the other load still reads it"
    tier.end_load(other)
    assert tier.counters.bytes_held == 0


def test_a_reset_forgets_everything_and_waits_for_transfers() -> None:
    tier = SmallTier()
    loaded, idle = store_chunk(tier, 0), store_chunk(tier, 1)
    load = tier.begin_load(tier.find(text_of(0)), tier.next_use())
    storing, failing = (tier.begin(text_of(number), CHUNK) for number in (2, 3))
    assert load is not None and isinstance(storing, Entry) and isinstance(failing, Entry)
    tier.clear()
    assert [entry for entry, _ in tier.removed] == [loaded, idle]
    assert tier.counters.bytes_held == 3 * 64
    assert tier.find(text_of(0)).num_tokens == 0
    again = tier.begin(text_of(2), CHUNK)
    assert isinstance(again, Entry), "what was being stored before the reset does not count"
    assert not tier.finish_store(storing)
    tier.fail_store(failing)
    tier.end_load(load)
    assert tier.counters.bytes_held == 64
    assert tier.finish_store(again)
    assert tier.find(text_of(2)).entries == (again,)


def test_transfers_end_once() -> None:
    tier = SmallTier()
    entry = store_chunk(tier, 0)
    with pytest.raises(TierError, match="expected an entry of this tier that is being stored"):
        tier.fail_store(entry)
    assert tier.counters.failed_stores == 0
    load = tier.begin_load(tier.find(text_of(0)), tier.next_use())
    assert load is not None
    tier.end_load(load)
    with pytest.raises(TierError, match="this load of 1 entries has ended before"):
        tier.end_load(load)


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


@pytest.mark.parametrize("share", [-0.1, 1.1])
def test_a_share_is_a_share(share: float) -> None:
    with pytest.raises(TierError, match="from 0 to 1"):
        SmallTier(protected_share=share)


def test_a_long_mix_of_sizes_leaves_no_room_unused_and_refuses_nothing() -> None:
    """Conversations grow: chunks, pieces of any size, and tails larger than a chunk."""
    tier = SmallTier(3000, needs_tails=True)
    chance = random.Random(0)
    lengths: dict[int, int] = {}
    least_held_bytes = tier.capacity_bytes
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
            least_held_bytes = min(least_held_bytes, tier.counters.bytes_held)
    assert tier.counters.removed_entries[Removal.EVICTED] > 1000
    assert least_held_bytes > 0.9 * tier.capacity_bytes


def test_the_same_calls_lead_to_the_same_offsets() -> None:
    def offsets() -> list[int]:
        tier = SmallTier(20)
        found = []
        for number in range(60):
            entry = tier.begin(text_of(number * 7 % 40), CHUNK, 1 + number % 3)
            if isinstance(entry, Entry):
                found.append(entry.offset_bytes)
                tier.finish_store(entry)
        return found

    assert offsets() == offsets()


def test_tails_whose_rows_come_back_have_the_rank_that_they_had() -> None:
    tier = SmallTier(12, needs_tails=True, protected_share=0.25)  # 3 places
    rows, tails = tier.store_prefix("a" * 4)
    tier.load("a" * 4)
    tier._remove(rows, Removal.EVICTED)
    tier.store("a" * 4, Piece.rows(0, 4))
    others = tier.store_prefix("b" * 4)
    tier.load("b" * 4)
    assert tails.is_hit and all(entry.is_hit for entry in others)
    more = tier.store_prefix("c" * 4)
    tier.load("c" * 4)
    # It was loaded longest ago.
    assert not tails.is_hit and all(entry.is_hit for entry in more)
