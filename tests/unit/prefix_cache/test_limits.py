# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Limits, compared with what upstream computes for every number of tokens."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.limits import GroupLimits

LIMITS = st.builds(
    lambda block_tokens, window_tokens, units, use_eagle, draft_blocks: GroupLimits(
        block_tokens, window_tokens, units * block_tokens or 1, use_eagle, 1, draft_blocks
    ),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(0, 3),
    st.booleans(),
    st.integers(0, 3),
)


@given(LIMITS, st.integers(0, 12))
def test_slots_run_out_at_the_limit(limits, num_blocks):
    limit = limits.next_slot_tokens(num_blocks)
    assert limits.num_blocks(limit) == num_blocks + 1
    if limit > 1:
        assert limits.num_blocks(limit - 1) == num_blocks


@given(LIMITS, st.integers(0, 100))
def test_a_block_leaves_the_window_at_the_limit(limits, tokens):
    assume(limits.window_tokens)
    skipped = limits.num_skipped_blocks(tokens)
    first_read_tokens = max(0, tokens - limits.window_tokens + 1)
    assert skipped == first_read_tokens // limits.block_tokens
    limit = limits.next_skip_tokens(skipped)
    assert tokens < limit
    assert [limits.num_skipped_blocks(n) for n in (limit - 1, limit)] == [skipped, skipped + 1]


@given(LIMITS, st.integers(0, 12))
def test_a_block_is_cached_at_the_limit(limits, num_cached):
    def num_full_blocks(tokens: int) -> int:
        aligned = tokens // limits.unit_tokens * limits.unit_tokens
        if limits.use_eagle and aligned:
            aligned = min(tokens, aligned + limits.block_tokens)
        return aligned // limits.block_tokens

    limit = limits.next_cache_tokens(num_cached)
    assert num_full_blocks(limit - 1) <= num_cached < num_full_blocks(limit)
