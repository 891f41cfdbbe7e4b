# SPDX-License-Identifier: Apache-2.0
"""Where a hit is split into what is computed and what is loaded meanwhile."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from unit.store.small_tier import PLACE_BYTES, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.holes.both_ends import Split, best_split, split_hit
from vllm_ascend_kvext.holes.host_hit import beyond_holes
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.lookup import Hit

PROMPT = "abcdefghijklmnopqrstuvwxyz" * 5  # 130 tokens
CHUNK_TOKENS = 12
NUM_CHUNKS = 10


@dataclass
class Cost:
    """Seconds per token, and per chunk that is loaded."""

    token_s: float | None
    chunk_s: float

    def load_s(self, num_bytes: int) -> float:
        return num_bytes / PLACE_BYTES * self.chunk_s

    def compute_s(self, num_tokens: int) -> float | None:
        return None if self.token_s is None else num_tokens * self.token_s


def hit_of(*missing: int, after_tokens: int = 0, tails: int | None = None) -> Hit:
    tier = SmallTier(needs_tails=tails is not None)
    for chunk in range(NUM_CHUNKS):
        if chunk not in missing:
            first = chunk * CHUNK_TOKENS
            tier.store(PROMPT, Piece.rows(first, first + CHUNK_TOKENS))
    if tails is not None:
        tier.store(PROMPT, Piece.tails(tails))
    hit = tier.look_up(TextPrefix(PROMPT), 121, after_tokens)
    return beyond_holes(tier, hit, 122, 0)


def chunks(hit: Hit) -> list[int]:
    return [entry.piece.first_tokens // CHUNK_TOKENS for entry in hit.entries]


def test_nothing_is_split_before_computing_was_measured() -> None:
    assert best_split(hit_of(), Cost(None, 1.0)) is None


def test_what_takes_equally_long_is_split_in_the_middle() -> None:
    split = best_split(hit_of(), Cost(1.0, CHUNK_TOKENS))
    assert split == Split(60, 60.0)


def test_fast_loads_load_all() -> None:
    assert best_split(hit_of(), Cost(1.0, 0.5)) == Split(0, 5.0)


def test_slow_loads_compute_all() -> None:
    assert best_split(hit_of(), Cost(1.0, 1000.0)) == Split(120, 120.0)


@pytest.mark.parametrize("chunk_s", [2.0, 6.0, 12.0, 24.0, 60.0])
def test_no_other_split_takes_less(chunk_s: float) -> None:
    split = best_split(hit_of(), Cost(1.0, chunk_s))
    assert split is not None
    possible = [
        max(CHUNK_TOKENS * number, chunk_s * (NUM_CHUNKS - number))
        for number in range(NUM_CHUNKS + 1)
    ]
    assert split.seconds <= min(possible) / 0.9
    assert split.seconds in possible


def test_hole_at_the_beginning_grows() -> None:
    hit = hit_of(0, 1)
    split = best_split(hit, Cost(1.0, CHUNK_TOKENS))
    assert split == Split(60, 60.0)
    found = split_hit(hit, split.tokens)
    assert found.holes == ((0, 60),)
    assert chunks(found) == [5, 6, 7, 8, 9]
    assert found.boundary_tokens == hit.boundary_tokens == 120
    assert found.left_out == ()  # It lies behind what is missing.


def test_later_holes_stay() -> None:
    hit = hit_of(7)
    split = best_split(hit, Cost(1.0, CHUNK_TOKENS))
    assert split == Split(48, 60.0 + 12)
    found = split_hit(hit, split.tokens)
    assert found.holes == ((0, 48), (84, 96))
    assert found.hole_tails == (None, None)
    assert found.left_out == hit.entries[:4]
    assert found.prefix_entries == hit.entries[4:7]


def test_hole_that_the_split_reaches_is_one_with_it() -> None:
    hit = hit_of(5)
    split = best_split(hit, Cost(1.0, CHUNK_TOKENS))
    assert split is not None
    assert split.tokens in (48, 72)
    found = split_hit(hit, 72)
    assert (found.holes, chunks(found)) == (((0, 72),), [6, 7, 8, 9])


def test_tails_are_loaded_wherever_it_is_split() -> None:
    hit = hit_of(tails=120)
    split = best_split(hit, Cost(1.0, CHUNK_TOKENS))
    assert split is not None
    found = split_hit(hit, split.tokens)
    assert chunks(found)[-1] == 120 // CHUNK_TOKENS
    assert found.entries[-1].piece == Piece.tails(120)


def test_beginning_that_the_device_has_is_not_computed() -> None:
    split = best_split(hit_of(after_tokens=24), Cost(1.0, CHUNK_TOKENS))
    assert split == Split(72, 48.0)
