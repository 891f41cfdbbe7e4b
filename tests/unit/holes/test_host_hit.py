# SPDX-License-Identifier: Apache-2.0
"""Hits that go on behind what is missing."""

from __future__ import annotations

import pytest
from unit.store.small_tier import SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.holes.host_hit import beyond_holes
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.lookup import Hit

PROMPT = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUV"  # 4 chunks of 12


def hit_of(
    tier: SmallTier, after_tokens: int = 0, num_tokens: int = len(PROMPT), least: int = 0
) -> Hit:
    prefix = TextPrefix(PROMPT)
    hit = tier.look_up(prefix, num_tokens - 1, after_tokens)
    return beyond_holes(tier, hit, num_tokens, least)


def tier_with(*pieces: tuple[int, int], tails: tuple[int, ...] | None = None) -> SmallTier:
    """Of a model with windows if ``tails`` are given."""
    tier = SmallTier(needs_tails=tails is not None)
    for piece in pieces:
        tier.store(PROMPT, Piece.rows(*piece))
    for boundary in tails or ():
        tier.store(PROMPT, Piece.tails(boundary))
    return tier


def places(hit: Hit) -> list[tuple[int, int]]:
    return [(entry.piece.first_tokens, entry.piece.end_tokens) for entry in hit.entries]


def test_hit_goes_on_behind_holes() -> None:
    hit = hit_of(tier_with((0, 12), (24, 36), (36, 48)))
    assert (hit.boundary_tokens, hit.holes) == (46, ((12, 24),))
    assert places(hit) == [(0, 12), (24, 36), (36, 48)]
    assert (hit.num_tokens, hit.hole_tokens, hit.loaded_tokens) == (46, 12, 34)


def test_hole_at_the_beginning_begins_where_the_device_ends() -> None:
    hit = hit_of(tier_with((12, 24), (36, 48)), after_tokens=4)
    assert hit.holes == ((4, 12), (24, 36))
    assert places(hit) == [(12, 24), (36, 48)]


def test_what_is_loaded_behind_a_hole_gets_no_protected_rank() -> None:
    tier = tier_with((0, 12), (24, 36))
    load = tier.begin_load(hit_of(tier), tier.next_use())
    assert load is not None
    tier.end_load(load)
    assert [entry.is_hit for entry in load.entries] == [True, False]
    tier.load(PROMPT[:24])
    tier.store(PROMPT, Piece.rows(12, 24))
    tier.load(PROMPT)
    assert [entry.is_hit for entry in load.entries] == [True, True]


def test_tails_that_holes_need_get_no_protected_rank() -> None:
    tier = tier_with((0, 12), (24, 36), tails=(6, 12, 36))
    load = tier.begin_load(hit_of(tier), tier.next_use())
    assert load is not None
    tier.end_load(load)
    places = [(*entry.piece[1:], entry.is_hit) for entry in load.entries]
    assert places == [(0, 12, True), (24, 36, False), (36, 36, False), (12, 12, True)]


def test_rows_that_the_device_has_are_no_hole() -> None:
    hit = hit_of(tier_with((24, 36)), after_tokens=24)
    assert (hit.boundary_tokens, hit.holes, places(hit)) == (36, (), [(24, 36)])


def test_short_runs_are_computed_and_not_loaded() -> None:
    tier = tier_with((0, 12), (20, 24), (36, 48))
    assert hit_of(tier, least=4).holes == ((12, 20), (24, 36))
    hit = hit_of(tier, least=6)
    assert hit.holes == ((12, 36),)
    assert places(hit) == [(0, 12), (36, 48)]


def test_nothing_behind_the_hole_is_the_hit_without_holes() -> None:
    tier = tier_with((0, 12))
    hit = hit_of(tier)
    assert (hit.boundary_tokens, hit.holes) == (12, ())
    assert hit == tier.look_up(hit.prefix, len(PROMPT) - 1)


@pytest.mark.parametrize("after_tokens", [3, 47])
def test_no_holes_where_the_device_ends_within_a_unit(after_tokens: int) -> None:
    hit = hit_of(tier_with((12, 24)), after_tokens=after_tokens)
    assert hit.holes == ()
    assert hit.num_tokens == 0


def test_last_token_is_computed() -> None:
    hit = hit_of(tier_with((12, 24)), num_tokens=24)
    assert (hit.boundary_tokens, hit.holes) == (22, ((0, 12),))


def starts(hit: Hit) -> list[int | None]:
    return [tails and tails.piece.end_tokens for tails in hit.hole_tails]


def test_hole_at_the_first_token_needs_no_tails() -> None:
    hit = hit_of(tier_with((12, 24), (24, 36), tails=(30,)))
    assert (hit.boundary_tokens, hit.holes, starts(hit)) == (30, ((0, 12),), [None])
    assert places(hit) == [(12, 24), (24, 36), (30, 30)]


def test_hole_is_computed_from_the_last_tails_before_it() -> None:
    hit = hit_of(tier_with((0, 12), (12, 24), (36, 48), tails=(8, 46)))
    assert (hit.boundary_tokens, hit.holes, starts(hit)) == (46, ((8, 36),), [8])
    assert places(hit) == [(0, 12), (36, 48), (46, 46)]
    assert [entry.piece.end_tokens for entry in hit.all_entries] == [12, 48, 46, 8]


def test_tails_behind_the_hole_are_needed() -> None:
    tier = tier_with((0, 12), (24, 36), (36, 48), tails=(8,))
    hit = hit_of(tier)
    assert (hit.boundary_tokens, hit.holes, places(hit)) == (8, (), [(0, 12), (8, 8)])


def test_tails_are_needed_where_the_device_ends() -> None:
    pieces = (0, 12), (24, 36), (36, 48)
    assert hit_of(tier_with(*pieces, tails=(46,)), after_tokens=12).num_tokens == 0
    hit = hit_of(tier_with(*pieces, tails=(12, 46)), after_tokens=12)
    assert (hit.holes, starts(hit), places(hit)) == (
        ((12, 24),),
        [12],
        [(24, 36), (36, 48), (46, 46)],
    )


def test_pins_are_those_of_all_that_is_read() -> None:
    tier = tier_with((0, 12), (24, 36), (36, 48), tails=(8, 46))
    hit = hit_of(tier)
    load = tier.begin_load(hit, tier.next_use())
    assert load is not None
    assert all(entry.num_pins == 1 for entry in hit.all_entries)
    tier.end_load(load)
    assert not any(entry.num_pins for entry in hit.all_entries)
