# SPDX-License-Identifier: Apache-2.0
"""Edges against what upstream computes at every number of tokens."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.edges import GroupEdges

EDGES = st.builds(
    lambda block_tokens, window_tokens, units, looks_ahead: GroupEdges(
        block_tokens, window_tokens, units * block_tokens or 1, looks_ahead
    ),
    st.integers(1, 6),
    st.integers(0, 20),
    st.integers(0, 3),
    st.booleans(),
)


@given(EDGES, st.integers(0, 12))
def test_slots_run_out_at_the_edge(edges, num_blocks):
    edge = edges.next_slot_tokens(num_blocks)
    needed = [-(-tokens // edges.block_tokens) for tokens in (edge - 1, edge)]
    assert needed[0] <= num_blocks < needed[1]


@given(EDGES, st.integers(0, 100))
def test_a_block_leaves_the_window_at_the_edge(edges, tokens):
    if not edges.window_tokens:
        assert edges.num_skipped_blocks(tokens) == 0
        return
    skipped = edges.num_skipped_blocks(tokens)
    edge = edges.next_skip_tokens(skipped)
    assert tokens < edge
    assert [edges.num_skipped_blocks(n) for n in (edge - 1, edge)] == [skipped, skipped + 1]


@given(EDGES, st.integers(0, 12))
def test_a_block_is_cached_at_the_edge(edges, num_cached):
    def num_full_blocks(tokens: int) -> int:
        aligned = tokens // edges.unit_tokens * edges.unit_tokens
        if edges.looks_ahead and aligned:
            aligned = min(tokens, aligned + edges.block_tokens)
        return aligned // edges.block_tokens

    edge = edges.next_cache_tokens(num_cached)
    assert num_full_blocks(edge - 1) <= num_cached < num_full_blocks(edge)
