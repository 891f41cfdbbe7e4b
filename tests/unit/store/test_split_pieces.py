# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rows for which there is no single gap become several entries."""

from __future__ import annotations

from typing import Any

from unit.store.small_tier import PLACE_BYTES
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Piece
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import HostTier

PREFIX = TextPrefix("a prompt of 24 letters..")


class Places:
    """Each cut of 4 tokens takes one place."""

    def num_bytes(self, piece: Piece) -> int:
        return -(-(piece.end_tokens - piece.first_tokens) // 4) * PLACE_BYTES

    def rows_within(self, row_map: Any, first_tokens: int, end_tokens: int) -> Any:
        return range(first_tokens, end_tokens)


def tier_with_gaps(gaps: list[int]) -> HostTier:
    """A tier with gaps of some numbers of places. Between them lie pinned entries."""
    tier = HostTier(
        (sum(gaps) + len(gaps)) * PLACE_BYTES, TierGeometry(12, 2, cut_tokens=4), layout=Places()
    )
    removed = []
    for number, num_places in enumerate(gaps):
        for name, size in (("gap", num_places), ("between", 1)):
            prefix = TextPrefix(f"{name} {number}".ljust(12))
            use = tier.next_use()
            entry = tier.begin_store(prefix, Piece.rows(0, 12), size * PLACE_BYTES, use)
            assert isinstance(entry, Entry)
            tier.finish_store(entry)
            if name == "gap":
                removed.append(entry)
            else:
                assert tier.pin(entry) is not None
    tier.evict(removed.__contains__)
    return tier


def begin_rows(tier: HostTier, piece: Piece, chance: float = 1.0) -> list[Entry]:
    entries = tier.begin_rows(PREFIX, piece, tier.next_use(), chance=chance)
    assert not isinstance(entries, Refusal)
    return entries


def test_each_entry_of_a_split_piece_is_as_if_it_were_stored_by_itself() -> None:
    entries = begin_rows(tier_with_gaps([1, 1, 1]), Piece.rows(12, 24), chance=0.5)
    alone = [
        entry
        for first_tokens in (12, 16, 20)
        for entry in begin_rows(
            tier_with_gaps([3]), Piece.rows(first_tokens, first_tokens + 4), chance=0.5
        )
    ]
    assert len(entries) == 3
    for entry, other in zip(entries, alone, strict=True):
        assert entry.piece == other.piece
        assert entry.keys == other.keys
        assert entry.cut_key == other.cut_key
        assert entry.key_before == other.key_before
        assert entry.num_bytes == other.num_bytes
        assert entry.chance == other.chance
    numbers = [entry.number for entry in entries]
    assert numbers == list(range(numbers[0], numbers[0] + 3))
    assert len({entry.offset_bytes for entry in entries}) == 3


def test_rows_take_as_few_gaps_as_they_can() -> None:
    entries = begin_rows(tier_with_gaps([1, 2]), Piece.rows(12, 24))
    assert [entry.piece for entry in entries] == [Piece.rows(12, 20), Piece.rows(20, 24)]


def test_rows_that_have_room_in_one_gap_are_one_entry() -> None:
    (entry,) = begin_rows(tier_with_gaps([1, 3]), Piece.rows(12, 24))
    assert entry.piece == Piece.rows(12, 24)


def test_only_the_first_rows_are_stored_if_there_is_no_room_for_all() -> None:
    tier = tier_with_gaps([2])
    entries = begin_rows(tier, Piece.rows(12, 24))
    assert [entry.piece for entry in entries] == [Piece.rows(12, 20)]
    assert entries[0].keys == tuple(PREFIX.keys_at(range(14, 21, 2)))
    assert tier.counters.refused_stores[Refusal.NO_ROOM] == 1
