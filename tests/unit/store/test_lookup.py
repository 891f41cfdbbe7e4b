# SPDX-License-Identifier: Apache-2.0
"""What is found of a prefix, what is missing, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.store.small_tier import CHUNK_TOKENS, UNIT_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.loads import LoadOutcome
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.pieces import MOST_PIECES
from vllm_ascend_kvext.store.prefix import HashedPrefix, TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

PROMPT = "abcdefghijklmnopqrstuvwxyzABCDEF"  # 2 chunks and 8 tokens


def pieces_of(tier: SmallTier, text: str, first: int = 0) -> list[tuple[int, int]]:
    missing = tier.missing_pieces(TextPrefix(text), first, len(text))
    return [(piece.first_tokens, piece.end_tokens) for piece in missing]


class CountingPrefix(TextPrefix):
    """Counts how often a lookup asks for a key."""

    num_asked = 0

    def key_at(self, boundary_tokens: int) -> bytes:
        CountingPrefix.num_asked += 1
        return super().key_at(boundary_tokens)


# Where a request resumes.


def test_a_stored_prompt_is_found_up_to_its_last_unit() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT[:30] + "!")
    hit = tier.find(PROMPT)
    assert (hit.boundary_tokens, hit.shortfall) == (30, Shortfall.NEVER_STORED)
    assert [entry.piece for entry in hit.entries] == [
        Piece.rows(0, 12),
        Piece.rows(12, 24),
        Piece.rows(24, 30),
    ]


def test_a_prompt_that_parts_ways_within_a_chunk_finds_what_it_shares() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT)
    assert tier.find(PROMPT[:17] + "another end").boundary_tokens == 16


def test_the_limit_may_lie_within_a_chunk() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT)
    hit = tier.find(PROMPT, limit_tokens=17)
    assert (hit.boundary_tokens, hit.shortfall) == (16, None)


def test_rows_that_the_device_has_are_not_loaded_and_need_not_be_there() -> None:
    tier = SmallTier()
    for piece in (Piece.rows(12, 24), Piece.rows(24, 32)):
        tier.store(PROMPT, piece)
    assert tier.find(PROMPT).num_tokens == 0
    hit = tier.find(PROMPT, after_tokens=15)
    assert (hit.boundary_tokens, hit.num_tokens) == (32, 17)
    assert [entry.piece.first_tokens for entry in hit.entries] == [12, 24]
    assert [entry.piece.first_tokens for entry in tier.find(PROMPT, 32, 24).entries] == [24]


def test_a_request_resumes_where_rows_and_tails_are_stored() -> None:
    tier = SmallTier(needs_tails=True)
    tier.store_prefix(PROMPT)
    tails = tier.store(PROMPT, Piece.tails(20))
    assert tier.find(PROMPT).boundary_tokens == 32
    hit = tier.find(PROMPT, limit_tokens=31)
    assert (hit.boundary_tokens, hit.entries[-1]) == (20, tails)
    assert [entry.piece.first_tokens for entry in hit.entries[:-1]] == [0, 12]


def test_tails_behind_missing_rows_are_not_used() -> None:
    tier = SmallTier(needs_tails=True)
    tier.store(PROMPT, Piece.tails(32))
    assert tier.find(PROMPT).num_tokens == 0


def test_a_model_without_full_attention_needs_tails_alone() -> None:
    tier = HostTier(640, TierGeometry(12, 2, needs_rows=False))
    prefix = TextPrefix(PROMPT)
    entry = tier.begin_store(prefix, Piece.tails(20), 64, tier.next_use())
    tier.finish_store(entry)
    hit = tier.look_up(prefix, 32)
    assert (hit.boundary_tokens, hit.entries) == (20, (entry,))
    assert tier.missing_pieces(prefix, 0, 32) == []


def test_a_lookup_of_whole_chunks_asks_for_one_key_per_chunk() -> None:
    tier = SmallTier(200)
    text = "".join(chr(256 + index) for index in range(1200))
    tier.store_prefix(text)
    CountingPrefix.num_asked = 0
    assert tier.look_up(CountingPrefix(text), 1200).boundary_tokens == 1200
    assert CountingPrefix.num_asked == 100


# Pieces of a chunk.


def test_a_longer_prompt_adds_a_piece_behind_the_end_of_an_earlier_one() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT[:28])
    assert pieces_of(tier, PROMPT[:30]) == [(28, 30)]
    tier.store_prefix(PROMPT[:30])
    assert [entry.piece.first_tokens for entry in tier.find(PROMPT).entries] == [0, 12, 24, 28]


def test_two_prompts_share_the_piece_before_they_part_ways() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT[:28])
    assert pieces_of(tier, PROMPT[:28] + "++++") == [(28, 32)]
    tier.store_prefix(PROMPT[:28] + "++++")
    assert pieces_of(tier, PROMPT[:28] + "----") == [(28, 32)]


def test_a_piece_that_is_missing_between_two_is_stored_alone() -> None:
    tier = SmallTier()
    tier.store(PROMPT, Piece.rows(0, 4))
    tier.store(PROMPT, Piece.rows(8, 12))
    assert pieces_of(tier, PROMPT[:12]) == [(4, 8)]


def test_a_chunk_in_too_many_pieces_is_stored_as_one_and_they_go() -> None:
    tier = SmallTier()
    for index in range(MOST_PIECES):
        tier.store(PROMPT, Piece.rows(2 * index, 2 * index + 2))
    assert pieces_of(tier, PROMPT[:12]) == [(0, 12)]
    whole = tier.store(PROMPT, Piece.rows(0, 12))
    assert [entry.piece.end_tokens for entry, _ in tier.removed] == [2, 4, 6, 8]
    assert tier.counters.entries_held == 1
    assert tier.find(PROMPT[:6] + "another").entries == (whole,)


def test_a_piece_that_overlaps_another_stays_while_it_has_rows_of_its_own() -> None:
    tier = SmallTier()
    tier.store(PROMPT, Piece.rows(4, 10))
    for _ in range(2):
        first = tier.store(PROMPT, Piece.rows(0, 8))
        assert tier.find(PROMPT[:10]).boundary_tokens == 10
        assert tier.find(PROMPT[:8]).entries == (first,)
        tier._remove(first, Removal.LOAD_FAILED)
        assert tier.find(PROMPT[:8], after_tokens=4).boundary_tokens == 8


def test_what_is_being_stored_is_not_missing() -> None:
    tier = SmallTier()
    tier.begin(PROMPT, Piece.rows(0, 12))
    assert pieces_of(tier, PROMPT[:24]) == [(12, 24)]


def test_chunks_before_the_first_token_are_left_out() -> None:
    assert pieces_of(SmallTier(), PROMPT, first=25) == [(24, 32)]


# Why not more.


def test_too_short_a_prompt_is_below_the_unit() -> None:
    tier = SmallTier()
    assert tier.find("a").shortfall is Shortfall.BELOW_UNIT
    assert tier.find(PROMPT, 13, after_tokens=12).shortfall is Shortfall.BELOW_UNIT


def test_nothing_is_missing_where_everything_was_found() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT)
    assert tier.find(PROMPT).shortfall is None


def test_what_nobody_stored_was_never_stored() -> None:
    assert SmallTier().find(PROMPT).shortfall is Shortfall.NEVER_STORED


def test_rows_without_any_tails_have_no_tail() -> None:
    tier = SmallTier(needs_tails=True)
    tier.store(PROMPT, Piece.rows(0, 12))
    assert tier.find(PROMPT).shortfall is Shortfall.NO_TAIL


@pytest.mark.parametrize("needs_tails", [False, True])
def test_what_is_on_its_way_is_being_stored(needs_tails: bool) -> None:
    tier = SmallTier(needs_tails=needs_tails)
    piece = Piece.rows(0, 12)
    if needs_tails:
        tier.store(PROMPT, piece)
        piece = Piece.tails(12)
    tier.begin(PROMPT, piece)
    assert (tier.find(PROMPT).num_tokens, tier.find(PROMPT).shortfall) == (
        0,
        Shortfall.BEING_STORED,
    )


def test_what_gave_way_was_evicted_until_it_is_stored_again() -> None:
    tier = SmallTier(1)
    tier.store(PROMPT, Piece.rows(0, 12))
    tier.store("another text", Piece.rows(0, 12))
    assert tier.find(PROMPT).shortfall is Shortfall.EVICTED
    assert tier.find(PROMPT[:8] + "an end").shortfall is Shortfall.EVICTED
    tier.store(PROMPT, Piece.rows(0, 12))
    assert tier.find(PROMPT, 12).shortfall is None
    assert tier.find("another text").shortfall is Shortfall.EVICTED
    tier.clear()
    assert tier.find("another text").shortfall is Shortfall.NEVER_STORED


def test_a_store_that_failed_is_told() -> None:
    tier = SmallTier()
    entry = tier.begin(PROMPT, Piece.rows(0, 12))
    tier.fail_store(entry)  # type: ignore[arg-type]
    assert tier.find(PROMPT).shortfall is Shortfall.FAILED


def test_a_load_that_failed_is_told() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT)
    tier.load(PROMPT, LoadOutcome.FAILED)
    assert tier.find(PROMPT).shortfall is Shortfall.FAILED


def test_an_old_eviction_is_forgotten() -> None:
    tier = SmallTier(1, remembered_keys=1)
    for text in ("aa", "bb", "cc"):
        tier.store(text, Piece.rows(0, 2))
    assert tier.find("aa").shortfall is Shortfall.NEVER_STORED
    assert tier.find("bb").shortfall is Shortfall.EVICTED


def test_shortfalls_are_counted_for_whoever_says_so() -> None:
    tier = SmallTier()
    tier.count_shortfall(tier.find(PROMPT).shortfall)
    tier.count_shortfall(None)
    assert sum(tier.counters.shortfalls.values()) == 1
    assert tier.counters.shortfalls[Shortfall.NEVER_STORED] == 1


# Prefixes and geometry.


def test_the_hashes_of_a_request_are_a_prefix() -> None:
    hashes = [b"one", b"two"]
    prefix = HashedPrefix(hashes, 16)
    assert prefix.num_tokens == 32
    assert (prefix.key_at(16), prefix.key_at(32)) == (b"one", b"two")
    hashes.append(b"three")
    assert prefix.key_at(48) == b"three"


@pytest.mark.parametrize("boundary", [0, 15, 48, -16])
def test_a_prefix_has_no_key_elsewhere(boundary: int) -> None:
    with pytest.raises(
        TierError, match=rf"a multiple of 16 from 16 to 32 tokens, found {boundary}"
    ):
        HashedPrefix([b"one", b"two"], 16).key_at(boundary)


@pytest.mark.parametrize(("chunk", "unit"), [(12, 5), (0, 0), (2, 4), (12, -2)])
def test_a_chunk_is_a_multiple_of_the_unit(chunk: int, unit: int) -> None:
    with pytest.raises(TierError, match=f"found {chunk}; choose another chunk size"):
        TierGeometry(chunk, unit)


def test_a_model_needs_rows_or_tails() -> None:
    with pytest.raises(TierError, match="leave the tier out"):
        TierGeometry(12, 2, needs_rows=False, needs_tails=False)


@given(
    pieces=st.lists(st.tuples(st.integers(0, 17), st.integers(1, 6)), max_size=8),
    limit_tokens=st.integers(0, 40),
)
def test_present_tokens_end_where_the_first_row_is_missing(
    pieces: list[tuple[int, int]], limit_tokens: int
) -> None:
    tier = SmallTier()
    text = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJ"
    for first_unit, num_units in pieces:
        first = first_unit * UNIT_TOKENS
        end = min(first + num_units * UNIT_TOKENS, first - first % CHUNK_TOKENS + CHUNK_TOKENS)
        tier.begin(text, Piece.rows(first, end))
    prefix = TextPrefix(text)
    complete = [
        boundary
        for boundary in range(0, min(limit_tokens, len(text)) + 1, UNIT_TOKENS)
        if not tier.missing_pieces(prefix, 0, boundary)
    ]
    assert tier.present_tokens(prefix, limit_tokens) == max(complete)


@pytest.mark.parametrize("step", [16, 32, 48])
@pytest.mark.parametrize("first", [16, 48])
@pytest.mark.parametrize("stop", [1, 17, 65, 129])
def test_keys_of_many_boundaries_are_those_of_each(first: int, stop: int, step: int) -> None:
    prefix = HashedPrefix([bytes([number]) for number in range(8)], 16)
    boundaries = range(first, stop, step)
    assert list(prefix.keys_at(boundaries)) == [prefix.key_at(each) for each in boundaries]


@pytest.mark.parametrize("boundaries", [range(0, 33, 16), range(16, 145, 16), range(16, 65, 24)])
def test_keys_where_nothing_is_hashed_are_refused(boundaries: range) -> None:
    with pytest.raises(TierError, match="ask at boundaries that are hashed"):
        HashedPrefix([b"one"] * 8, 16).keys_at(boundaries)


def test_all_tails_of_a_range_are_found() -> None:
    tier = SmallTier(needs_tails=True)
    for boundary in (4, 12, 20, 26):
        tier.store(PROMPT, Piece.tails(boundary))
    tier.store(PROMPT[:7] + "!" * 9, Piece.tails(16))
    found = tier.find_all_tails(TextPrefix(PROMPT), 25, 11)
    assert [entry.piece.end_tokens for entry in found] == [12, 20]
    found = tier.find_all_tails(TextPrefix(PROMPT), 100, 12)
    assert [entry.piece.end_tokens for entry in found] == [12, 20, 26]
    assert tier.find_all_tails(TextPrefix(PROMPT), 3) == []
