# SPDX-License-Identifier: Apache-2.0
"""What tails save."""

from __future__ import annotations

import random

import pytest
from unit.store.small_tier import CHUNK_TOKENS, UNIT_TOKENS, SmallTier
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.store.saved_tokens import saved_tokens


@pytest.mark.parametrize("seed", range(20))
def test_tails_save_what_lies_before_them_up_to_others_or_to_a_gap(seed: int) -> None:
    chance = random.Random(seed)
    tier = SmallTier(100, needs_tails=True)
    text = "abc" * CHUNK_TOKENS
    boundaries = range(UNIT_TOKENS, len(text) + 1, UNIT_TOKENS)
    with_rows = {end for end in boundaries if chance.random() < 0.8}
    with_tails = {end for end in boundaries if chance.random() < 0.2}
    for end in with_rows:
        tier.store(text, Piece.rows(end - UNIT_TOKENS, end))
    for end in with_tails:
        tier.store(text, Piece.tails(end))
    for boundary in boundaries:
        gaps = {end for end in boundaries if end <= boundary} - with_rows
        others = {end for end in with_tails if end < boundary}
        found = saved_tokens(tier._index, tier.geometry, TextPrefix(text), Piece.tails(boundary))
        assert found == boundary - max(gaps | others, default=0)
