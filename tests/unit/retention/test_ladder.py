# SPDX-License-Identifier: Apache-2.0
"""Rungs at doubling distances below the end of a prompt, within a budget."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.ladder import ladder_boundaries

UNLIMITED = math.inf
UNIT_TOKENS = 16


def geometry(looks_ahead: bool = False, window_tokens: int = 9, num_groups: int = 1) -> HitGeometry:
    groups = (
        GroupGeometry(GroupKind.FULL, 16, margin_tokens=16),
        GroupGeometry(GroupKind.WINDOW, 4, window_tokens, looks_ahead, 4, num_groups),
    )
    return HitGeometry(groups, UNIT_TOKENS)


def rungs(
    top: int, after: int = 0, budget: float = UNLIMITED, of: HitGeometry | None = None
) -> list[tuple[int, int]]:
    return list(ladder_boundaries(of or geometry(), top, after, budget))


def test_distances_double_from_one_unit_on() -> None:
    top = 100 * UNIT_TOKENS
    distances = [top - boundary for _, boundary in rungs(top)]
    assert distances == [UNIT_TOKENS << rung for rung in range(7)]
    assert [rung for rung, _ in rungs(top)] == list(range(7))


@pytest.mark.parametrize(
    ("after", "expected"),
    [(0, 3), (16, 3), (31, 3), (32, 2), (64, 2), (96, 1), (112, 0), (128, 0), (160, 0)],
)
def test_nothing_at_or_below_the_hit(after: int, expected: int) -> None:
    """Of a prompt of 128 tokens the rungs are 112, 96 and 64; 0 is no boundary."""
    boundaries = [112, 96, 64]
    assert [tokens for _, tokens in rungs(128, after)] == [b for b in boundaries if b > after]


@pytest.mark.parametrize("top", [0, UNIT_TOKENS])
def test_no_rungs_below_the_first_boundary(top: int) -> None:
    assert rungs(top) == []


@pytest.mark.parametrize("num_groups", [1, 3])
def test_budget_counts_the_blocks_of_all_groups(num_groups: int) -> None:
    """A window of 9 tokens takes two blocks of 4."""
    several = geometry(num_groups=num_groups)
    for rung in range(5):
        budget = rung * 2 * num_groups
        assert len(rungs(1024, budget=budget, of=several)) == rung
        assert len(rungs(1024, budget=budget + 2 * num_groups - 1, of=several)) == rung


def test_blocks_that_a_rung_shares_with_the_one_above_are_free() -> None:
    # Eight blocks each; 1008 shares four with 1024 itself, 992 four with 1008, 960 none with 992.
    wide = geometry(window_tokens=33)
    for budget, expected in {
        3: [],
        4: [1008],
        7: [1008],
        8: [1008, 992],
        16: [1008, 992, 960],
    }.items():
        assert [tokens for _, tokens in rungs(1024, budget=budget, of=wide)] == expected


def test_a_rung_that_no_lookup_can_hit_is_left_out() -> None:
    """A clipped look-ahead window loses a unit: its boundary cannot be hit."""
    clipped = geometry(looks_ahead=True, window_tokens=41)
    assert not clipped.is_boundary(32) and clipped.is_boundary(48)
    assert rungs(64, of=clipped) == [(0, 48)]
    assert rungs(64, of=geometry(window_tokens=41)) == [(0, 48), (1, 32)]


@given(
    top_units=st.integers(0, 60),
    after=st.integers(0, 900),
    budget=st.integers(0, 80),
    looks_ahead=st.booleans(),
    window_tokens=st.integers(2, 70),
)
def test_any_ladder(
    top_units: int, after: int, budget: int, looks_ahead: bool, window_tokens: int
) -> None:
    of = geometry(looks_ahead, window_tokens)
    top = top_units * UNIT_TOKENS
    found = rungs(top, after, budget, of)
    assert all(after < tokens < top and of.is_boundary(tokens) for _, tokens in found)
    assert all(top - tokens == UNIT_TOKENS << rung for rung, tokens in found)
    own = set(of.tails(top)[1])
    taken = set().union(*(of.tails(tokens)[1] for _, tokens in found)) - own if found else set()
    assert len(taken) <= budget
    assert set(found) <= set(rungs(top, after, budget + 1, of)), "more budget, fewer rungs"
