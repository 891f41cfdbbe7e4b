# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Tails that continue others: when they do, and what stays or goes with what."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from unit.store.small_tier import CHUNK_TOKENS, PLACE_BYTES, UNIT_TOKENS, SmallTier, pin
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.holes.load_plan import plan_of_hit
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.tier import MAX_CHAIN, HostTier

WINDOW_TOKENS = 8
COMMON = "abcdefgh"
TEXT = COMMON + "ijklmnop"


class WindowLayout:
    """A unit of 2 tokens takes a place in rows, and two in the window before a boundary."""

    def num_bytes(self, piece: Piece) -> int:
        first_tokens, end_tokens = piece[1:]
        if piece.kind is Kind.ROWS:
            return (end_tokens - first_tokens) // 2 * PLACE_BYTES
        first_tokens = first_tokens if piece.continues else 0
        return (end_tokens - max(first_tokens, end_tokens - WINDOW_TOKENS)) * PLACE_BYTES

    def rows_within(self, row_map: Any, first_tokens: int, end_tokens: int) -> Any:
        return row_map


class WindowTier(SmallTier):
    """A tier of a model with a window of 8 tokens. All tails are stored behind their rows."""

    def __init__(self, num_places: int = 100) -> None:
        super().__init__(num_places, needs_tails=True, layout=WindowLayout())

    def piece(self, text: str, max_tokens: int = WINDOW_TOKENS) -> Piece:
        return self.tails_to_store(TextPrefix(text), len(text), max_tokens)

    def begin_tails(
        self,
        text: str,
        piece: Piece | None = None,
        num_places: int = 1,
    ) -> Entry | Refusal:
        self.store_prefix(text)
        piece = piece or Piece.tails(len(text))
        num_bytes = num_places * PLACE_BYTES
        return self.begin_store(TextPrefix(text), piece, num_bytes, self.next_use())

    def store_tails(self, text: str, base_tokens: int = 0, num_resumes: int = 2) -> Entry:
        """Store tails, at which some requests then resume."""
        piece = Piece.continued_tails(base_tokens, len(text)) if base_tokens else None
        entry = self.begin_tails(text, piece)
        assert isinstance(entry, Entry), entry
        self.finish_store(entry, object())
        for _ in range(num_resumes):
            self.note_admitted(TextPrefix(text + "??"), len(text) + 2)
        return entry


# Which tails are continued.


def test_tails_at_which_requests_have_resumed_are_continued() -> None:
    tier = WindowTier()
    assert tier.piece(TEXT[:10]) == Piece.tails(10)
    tier.store_tails(COMMON)
    assert tier.piece(TEXT[:10]) == Piece.continued_tails(8, 10)
    assert tier.piece(COMMON[:6] + "xy" + "zz") == Piece.tails(10)
    assert tier.piece(COMMON) == Piece.tails(8)


def test_tails_that_are_being_stored_are_not_continued() -> None:
    tier = WindowTier()
    tier.begin_tails(COMMON)
    assert tier.piece(TEXT[:10]) == Piece.tails(10)


@pytest.mark.parametrize("num_resumes", range(4))
def test_tails_at_which_one_request_has_resumed_are_not_continued(num_resumes: int) -> None:
    """Once its conversation has gone on, the end of a turn is of no use, and should give way."""
    tier = WindowTier()
    tier.store_tails(COMMON, num_resumes=num_resumes)
    assert tier.piece(TEXT[:10]).continues == (num_resumes > 1)


def test_tails_are_continued_only_where_that_saves_a_quarter() -> None:
    tier = WindowTier()
    tier.store_tails(COMMON)
    assert tier.piece(TEXT[:14]) == Piece.continued_tails(8, 14)
    assert tier.piece(TEXT[:16]) == Piece.tails(16)
    assert tier.piece(TEXT[:14], max_tokens=4) == Piece.tails(14)
    assert tier.piece(TEXT[:12], max_tokens=4) == Piece.tails(12)
    assert tier.piece(TEXT[:12], max_tokens=5) == Piece.continued_tails(8, 12)
    assert tier.piece(TEXT[:12], max_tokens=0) == Piece.tails(12)


def test_small_tails_are_whole() -> None:
    """They are worth what the rows before them are, and others could not give way with these."""
    tier = WindowTier()
    tier.store_tails(TEXT[:2])
    assert tier.piece(TEXT[:6]) == Piece.tails(6)
    tier._order.small_tails_bytes -= 1
    assert tier.piece(TEXT[:6]) == Piece.continued_tails(2, 6)


def test_the_nearest_tails_are_continued_if_not_too_many_would_be_read() -> None:
    tier = WindowTier()
    tier.store_tails(COMMON)
    ends = [len(COMMON) + 2 * number for number in range(MAX_CHAIN + 1)]
    for base_tokens, end_tokens in pairwise(ends[:-1]):
        assert tier.piece(TEXT[:end_tokens], max_tokens=10).first_tokens == base_tokens
        tier.store_tails(TEXT[:end_tokens], base_tokens)
    last = tier.find(TEXT[: ends[-2]]).tails
    assert last is not None and len(last.chain) == MAX_CHAIN
    assert tier.piece(TEXT[: ends[-1]], max_tokens=10).first_tokens == ends[-3]


def test_tails_are_whole_where_a_resume_would_read_nothing_of_the_first_ones() -> None:
    tier = WindowTier()
    tier.store_tails(COMMON)
    tier.store_tails(TEXT[:12], 8)
    assert tier.piece(TEXT[:14]) == Piece.continued_tails(12, 14)
    assert tier.piece(TEXT[:16]) == Piece.tails(16)


def test_tails_of_a_model_without_rows_are_whole() -> None:
    geometry = TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_rows=False, needs_tails=True)
    tier = HostTier(100 * PLACE_BYTES, geometry, layout=WindowLayout())
    prefix = TextPrefix(TEXT)
    entry = tier.begin_store(prefix, Piece.tails(8), PLACE_BYTES, tier.next_use())
    assert isinstance(entry, Entry)
    tier.finish_store(entry)
    for _ in range(2):
        tier.note_admitted(prefix, len(TEXT))
    assert tier.tails_to_store(prefix, 10, WINDOW_TOKENS) == Piece.tails(10)


# What stays and goes.


def chain_of_three(tier: WindowTier) -> tuple[Entry, Entry, Entry]:
    first = tier.store_tails(TEXT[:8])
    second = tier.store_tails(TEXT[:10], 8)
    return first, second, tier.store_tails(TEXT[:12], 10)


def test_a_load_reads_all_that_its_tails_continue() -> None:
    tier = WindowTier()
    chain = chain_of_three(tier)
    hit = tier.find(TEXT)
    assert hit.boundary_tokens == 12 and hit.tails is chain[-1]
    plan = plan_of_hit(hit)
    assert plan.entries[-3:] == chain
    load = pin(tier, plan, tier.next_use())
    assert load is not None and all(entry.num_pins == 1 for entry in chain)


def test_tails_are_evicted_after_those_that_continue_them() -> None:
    tier = WindowTier()
    chain = chain_of_three(tier)
    for number in range(3):
        tier.evict(lambda entry: entry.piece.kind is Kind.TAILS)
        assert tier.evicted() == list(reversed(chain))[: number + 1]


def test_new_tails_make_no_room_of_those_that_they_continue() -> None:
    """Whole tails of this size take the place of the others."""
    tier = WindowTier(14)
    tier.store_prefix(TEXT[:10])
    base = tier.begin_tails(COMMON, num_places=7)
    assert isinstance(base, Entry)
    tier.finish_store(base)
    found = tier.begin_tails(TEXT[:10], Piece.continued_tails(8, 10), num_places=7)
    assert isinstance(found, Refusal)
    assert base.state is EntryState.STORED
    assert isinstance(tier.begin_tails(TEXT[:10], num_places=7), Entry)
    assert tier.evicted() == [base]


def test_rows_stay_up_to_the_boundary_of_tails_that_continue_others() -> None:
    tier = WindowTier()
    tier.store_tails(COMMON)
    tier.store_tails(TEXT[:10], 8)
    rows = tier.find(TEXT[:10]).run.entries[-1]
    assert rows.piece == Piece.rows(8, 10)
    assert tier._order.removable_to(rows) == 10


@pytest.mark.parametrize("num_places", [200, 99], ids=["too large", "no room"])
def test_a_refused_store_continues_nothing(num_places: int) -> None:
    tier = WindowTier()
    base = tier.store_tails(COMMON)
    pin(tier, plan_of_hit(tier.find(COMMON)), tier.next_use())
    found = tier.begin_tails(TEXT[:10], Piece.continued_tails(8, 10), num_places=num_places)
    assert isinstance(found, Refusal)
    assert not base.continued_by


def test_tails_may_be_evicted_again_after_a_refused_store() -> None:
    tier = WindowTier()
    base = tier.store_tails(COMMON)
    tier.begin_tails(TEXT[:10], Piece.continued_tails(8, 10), num_places=99)
    assert base.is_evictable and base in tier._order._places


def test_what_continues_unreadable_tails_goes_with_them() -> None:
    tier = WindowTier()
    first, second, third = chain_of_three(tier)
    writing = tier.begin_tails(TEXT[:8] + "xy", Piece.continued_tails(8, 10))
    assert isinstance(writing, Entry)
    whole = tier.store_tails(TEXT[:8] + "yx")
    plan = plan_of_hit(tier.find(TEXT[:10]))
    load = pin(tier, plan, tier.next_use())
    assert load is not None
    tier.end_load(load, [first])
    assert [entry.state for entry in (first, second, third)] == [EntryState.GONE] * 3
    failed = {entry for entry, removal in tier.removed if removal is Removal.LOAD_FAILED}
    assert failed == {first, second, third}
    assert writing.state is EntryState.LEAVING and not tier.finish_store(writing)
    assert whole.state is EntryState.STORED
    assert tier.find(TEXT).shortfall is Shortfall.FAILED


def test_what_others_continue_stays_when_they_are_unreadable() -> None:
    tier = WindowTier()
    first, second, third = chain_of_three(tier)
    load = pin(tier, plan_of_hit(tier.find(TEXT)), tier.next_use())
    assert load is not None
    tier.end_load(load, [second])
    states = [entry.state for entry in (first, second, third)]
    assert states == [EntryState.STORED, EntryState.GONE, EntryState.GONE]
    assert first.is_evictable


@pytest.mark.parametrize("ends", ["fail_store", "abandon_store"])
def test_tails_may_be_evicted_again_after_a_store_that_has_failed(ends: str) -> None:
    tier = WindowTier()
    base = tier.store_tails(COMMON)
    entry = tier.begin_tails(TEXT[:10], Piece.continued_tails(8, 10))
    assert not base.is_evictable
    getattr(tier, ends)(entry)
    assert base.is_evictable and not base.continued_by


@pytest.mark.parametrize("is_whole_first", [True, False])
@pytest.mark.parametrize("is_stored", [True, False])
def test_tails_are_stored_once_whole_or_not(is_whole_first: bool, is_stored: bool) -> None:
    tier = WindowTier()
    tier.store_tails(COMMON)
    pieces = [Piece.tails(10), Piece.continued_tails(8, 10)]
    first, second = pieces if is_whole_first else pieces[::-1]
    entry = tier.begin_tails(TEXT[:10], first)
    assert isinstance(entry, Entry)
    if is_stored:
        tier.finish_store(entry)
    found = tier.begin_tails(TEXT[:10], second)
    assert found is (Refusal.ALREADY_STORED if is_stored else Refusal.BEING_STORED)


def test_tails_that_continue_others_are_judged_by_themselves_however_small() -> None:
    """The others are large, and stay with them."""
    tier = WindowTier()
    tier.store_tails(COMMON)
    small = tier.store_tails(COMMON + "xy")
    continuing = tier.store_tails(TEXT[:10], 8)
    now = tier._latest_use
    assert tier._order.priority(small, now).is_recent
    assert not tier._order.priority(continuing, now).is_recent


def test_a_reset_forgets_tails_and_what_continues_them() -> None:
    tier = WindowTier()
    chain_of_three(tier)
    writing = tier.begin_tails(TEXT[:8] + "xy", Piece.continued_tails(8, 10))
    assert isinstance(writing, Entry)
    tier.clear()
    assert tier.counters.entries_held == 1
    assert not tier.finish_store(writing)
    assert not tier.counters.entries_held
