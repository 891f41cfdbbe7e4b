# SPDX-License-Identifier: Apache-2.0
"""Stored rows of a prefix, with gaps between them."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st
from unit.store.small_tier import CHUNK_TOKENS, UNIT_TOKENS, SmallTier
from unit.store.test_lookup import PROMPT, CountingPrefix
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.entries import Entry, Piece


def runs_of(
    tier: SmallTier, text: str = PROMPT, limit: int = 1000, after: int = 0
) -> list[list[int]]:
    found = tier.find_runs(TextPrefix(text), limit, after)
    return [[run.first_tokens, run.end_tokens] for run in found]


def test_runs_lie_around_what_is_missing() -> None:
    tier = SmallTier()
    tier.store(PROMPT, Piece.rows(0, 12))
    tier.store(PROMPT, Piece.rows(24, 32))
    assert runs_of(tier) == [[0, 12], [24, 32]]
    tier.store(PROMPT, Piece.rows(12, 16))
    tier.store(PROMPT, Piece.rows(20, 24))
    assert runs_of(tier) == [[0, 16], [20, 32]]
    assert runs_of(tier, after=15) == [[15, 16], [20, 32]]
    assert runs_of(tier, limit=31) == [[0, 16], [20, 30]]
    assert runs_of(tier, after=32) == []


def test_run_behind_a_missing_chunk_is_found_if_its_chunk_has_its_end() -> None:
    tier = SmallTier()
    tier.store(PROMPT, Piece.rows(12, 24))
    assert runs_of(tier) == [[12, 24]]


def test_other_texts_are_not_found() -> None:
    tier = SmallTier()
    tier.store_prefix(PROMPT)
    assert runs_of(tier, "!" + PROMPT[1:]) == []
    assert runs_of(tier, PROMPT[:20] + "!" + PROMPT[21:]) == [[0, 20]]


def test_what_is_being_stored_is_not_found() -> None:
    tier = SmallTier()
    assert isinstance(tier.begin(PROMPT, Piece.rows(0, 12)), Entry)
    assert runs_of(tier) == []


def test_prompt_that_nobody_stored_costs_one_question_per_chunk() -> None:
    num_chunks = 50
    CountingPrefix.num_asked = 0
    SmallTier().find_runs(CountingPrefix("x" * CHUNK_TOKENS * num_chunks), 10_000, 0)
    first_chunk = CHUNK_TOKENS // UNIT_TOKENS
    assert CountingPrefix.num_asked == first_chunk + num_chunks - 1


@given(st.sets(st.integers(0, 15)), st.integers(0, 15), st.integers(1, 40))
def test_runs_are_stored_rows(units: set[int], after_units: int, limit: int) -> None:
    tier = SmallTier(100)
    for unit in sorted(units):
        tier.store(PROMPT, Piece.rows(unit * UNIT_TOKENS, (unit + 1) * UNIT_TOKENS))
    after = after_units * UNIT_TOKENS
    found = tier.find_runs(TextPrefix(PROMPT), limit, after)
    assert all(one.end_tokens < other.first_tokens for one, other in pairwise(found))
    there = {
        token for unit in units for token in range(unit * UNIT_TOKENS, (unit + 1) * UNIT_TOKENS)
    }
    for first, end, entries in found:
        assert after <= first < end <= min(limit, len(PROMPT))
        assert there.issuperset(range(first, end))
        assert entries[0].piece.first_tokens <= first
        assert all(
            one.piece.end_tokens == other.piece.first_tokens for one, other in pairwise(entries)
        )
        assert entries[-1].piece.end_tokens >= end
    # What follows without a gap is what a lookup without gaps finds.
    hit_tokens = tier.find(PROMPT, min(limit, len(PROMPT)), after).num_tokens
    first_run = found[0] if found and found[0].first_tokens == after else None
    assert hit_tokens == (first_run.end_tokens - after if first_run else 0)
    # A chunk that is there is found wherever it lies.
    for chunk in range(after, min(limit, len(PROMPT)) - CHUNK_TOKENS + 1):
        if chunk % CHUNK_TOKENS == 0 and there.issuperset(range(chunk, chunk + CHUNK_TOKENS)):
            assert any(first <= chunk and chunk + CHUNK_TOKENS <= end for first, end, _ in found)
