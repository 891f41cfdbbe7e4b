# SPDX-License-Identifier: Apache-2.0
"""Runs against upstream's flags, block by block."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.prefix_cache.runs import TailRule, runs_between


def upstream_flags(rule: TailRule, blocks: range, replay_boundary_blocks: int) -> list[bool]:
    """vLLM 0.23.0's ``reachable_block_mask``."""
    per_segment, need, shift = rule.segment_blocks, rule.need_blocks, rule.ahead_blocks
    if per_segment and need >= per_segment:
        return [True] * len(blocks)
    flags = []
    for index in blocks:
        in_tail = (
            per_segment > 0
            and index >= shift
            and (index - shift) % per_segment >= per_segment - need
        )
        end = replay_boundary_blocks + shift
        in_replay = rule.keeps_replay and end - need <= index < end
        flags.append(in_tail or in_replay)
    return flags


@given(
    st.builds(
        TailRule,
        unit_blocks=st.integers(1, 6),
        segment_blocks=st.integers(0, 20),
        need_blocks=st.integers(0, 12),
        ahead_blocks=st.integers(0, 1),
        keeps_replay=st.booleans(),
    ),
    st.integers(0, 60),
    st.integers(0, 60),
    st.integers(0, 15),
)
def test_runs_are_the_blocks_that_upstream_flags(rule, start, count, boundary_units):
    blocks = range(start, start + count)
    boundary = boundary_units * rule.unit_blocks
    runs = rule.runs(blocks, boundary)
    flags = upstream_flags(rule, blocks, boundary)
    assert [index for run in runs for index in run] == [
        index for index, flag in zip(blocks, flags, strict=True) if flag
    ]
    assert all(run for run in runs)
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))


@given(st.lists(st.booleans()))
def test_runs_between_holes_are_maximal(holes):
    runs = runs_between(holes)
    assert [index for run in runs for index in run] == [
        index for index, is_hole in enumerate(holes) if not is_hole
    ]
    assert all(one.stop < other.start for one, other in itertools.pairwise(runs))
