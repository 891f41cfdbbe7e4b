# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs, compared with upstream's flags, block by block."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.patches.upstream import live_blocks
from vllm_ascend_kvext.prefix_cache.runs import TailRule, runs_between


def upstream_flags(rule: TailRule, blocks: range) -> list[bool]:
    """vLLM 0.23.0's ``reachable_block_mask``, without an interval."""
    unit, need, shift = rule.unit_blocks, rule.need_blocks, rule.ahead_blocks
    if need >= unit:
        return [True] * len(blocks)
    return [index >= shift and (index - shift) % unit >= unit - need for index in blocks]


@given(
    st.builds(
        TailRule,
        unit_blocks=st.integers(1, 20),
        need_blocks=st.integers(0, 12),
        ahead_blocks=st.integers(0, 1),
    ),
    st.integers(0, 60),
    st.integers(0, 60),
)
def test_runs_are_the_blocks_that_upstream_flags(rule, start, count):
    blocks = range(start, start + count)
    runs = rule.runs(blocks)
    flags = upstream_flags(rule, blocks)
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


@given(st.lists(st.booleans(), max_size=9))
def test_live_blocks_are_those_that_are_not_null(holes):
    null = SimpleNamespace(is_null=True)
    blocks = [null if is_hole else SimpleNamespace(is_null=False) for is_hole in holes]
    found = live_blocks(blocks)
    assert [id(block) for block in found] == [id(b) for b in blocks if not b.is_null]
    assert (found is blocks) == (True not in holes)
