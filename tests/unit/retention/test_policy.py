# SPDX-License-Identifier: Apache-2.0
"""Which boundaries outlive a request, and which intervals are refused."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.policy import (
    GRID_SHARE,
    RetentionPolicy,
    check_interval,
    ladder_boundaries,
)
from vllm_ascend_kvext.retention.reasons import Origin, Reason

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
PROMPT, GRID = Reason(Origin.PROMPT), Reason(Origin.GRID)


def policy(
    interval_tokens: int,
    use_eagle: bool = False,
    is_adaptive: bool = False,
    ladder_budget: float = 0.5,
) -> RetentionPolicy:
    groups = (
        GroupGeometry(FULL, 16, margin_tokens=16),
        GroupGeometry(WINDOW, 4, 9, use_eagle, margin_tokens=4),
    )
    return RetentionPolicy(HitGeometry(groups, 16), interval_tokens, is_adaptive, ladder_budget)


def adaptive(interval_tokens: int = 0, ladder_budget: float = 0.5) -> RetentionPolicy:
    return policy(interval_tokens, is_adaptive=True, ladder_budget=ladder_budget)


@pytest.mark.parametrize(
    ("num_prompt_tokens", "use_eagle", "expected"),
    [
        (16, False, 0),  # the last token is always computed
        (17, False, 16),
        (100, False, 96),
        (97, True, 80),  # no room for the look-ahead block [96, 100) within 96 tokens
        (101, True, 96),
    ],
)
def test_replay_boundary(num_prompt_tokens: int, use_eagle: bool, expected: int) -> None:
    assert policy(0, use_eagle).replay_boundary_tokens(num_prompt_tokens) == expected


def test_each_boundary_has_its_reason() -> None:
    found = adaptive(64).lasting_boundaries({80: Reason(Origin.HINT), 128: PROMPT}, 0, 192)
    assert found == [(64, GRID), (80, Reason(Origin.HINT)), (128, PROMPT), (192, GRID)]


def test_the_plan_has_a_ladder_below_the_replay_boundary() -> None:
    plan = adaptive(ladder_budget=math.inf).plan(1000)
    rungs = {992 - (16 << rung): Reason(Origin.LADDER, rung) for rung in range(6)}
    assert plan == {992: PROMPT, **rungs}
    assert adaptive(ladder_budget=0).plan(1000) == {992: PROMPT}


def test_demand_goes_before_what_nobody_asked_for() -> None:
    demand = {976: Reason(Origin.JUNCTION), 992: Reason(Origin.WANTED), 48: Reason(Origin.HINT)}
    plan = adaptive(ladder_budget=math.inf).plan(1000, 0, demand)
    assert {tokens: plan[tokens] for tokens in demand} == demand
    assert plan[960] == Reason(Origin.LADDER, 1)


def test_what_nobody_asked_for_is_left_only_where_it_is_worth_trying() -> None:
    def refuse(reason: Reason) -> bool:
        return False

    of = adaptive(ladder_budget=math.inf)
    hint = {64: Reason(Origin.HINT)}
    assert of.plan(1000, 0, hint, refuse) == {992: PROMPT, **hint}
    assert of.lasting_boundaries({}, 0, 2000), "the automatic grid"
    asked_for = adaptive(512).lasting_boundaries({}, 0, 1024)
    assert [tokens for tokens, _ in asked_for] == [512, 1024], "by the user"


@pytest.mark.parametrize("num_windows", [1, 2, 5])
@pytest.mark.parametrize("window_tokens", [5, 9, 65, 129])
def test_the_automatic_grid_costs_a_bounded_share(window_tokens: int, num_windows: int) -> None:
    groups = (
        GroupGeometry(FULL, 16),
        GroupGeometry(WINDOW, 16, window_tokens, False, 0, num_windows),
    )
    of = RetentionPolicy(HitGeometry(groups, 16), 0, is_adaptive=True)

    def tail_share(grid_tokens: int) -> float:
        return of.geometry.num_tail_blocks / (grid_tokens / 16)

    grid_units = of.grid_tokens // 16
    assert of.grid_tokens % 16 == 0 and grid_units & (grid_units - 1) == 0
    assert tail_share(of.grid_tokens) <= 1 / GRID_SHARE
    assert grid_units == 1 or tail_share(of.grid_tokens // 2) > 1 / GRID_SHARE


def test_states_and_models_without_full_attention_have_no_automatic_grid() -> None:
    full, window, state = (
        GroupGeometry(FULL, 16),
        GroupGeometry(WINDOW, 16, 9),
        GroupGeometry(STATE, 16),
    )
    for groups in ((full, state), (full, window, state), (window,)):
        assert RetentionPolicy(HitGeometry(groups, 16), 0, is_adaptive=True).grid_tokens == 0
        assert RetentionPolicy(HitGeometry(groups, 16), 32, is_adaptive=True).grid_tokens == 32


def test_a_grid_point_that_no_lookup_can_hit_is_left_out() -> None:
    groups = (GroupGeometry(FULL, 16, margin_tokens=16), GroupGeometry(WINDOW, 4, 41, True, 4))
    of = RetentionPolicy(HitGeometry(groups, 16), 16)
    assert [tokens for tokens, _ in of.lasting_boundaries({}, 0, 64)] == [16, 48, 64]


@given(
    num_prompt_tokens=st.integers(1, 400),
    hit_units=st.integers(0, 20),
    interval_units=st.integers(0, 5),
    is_adaptive=st.booleans(),
    cuts=st.lists(st.integers(0, 30)),
)
def test_boundaries_do_not_depend_on_the_steps(
    num_prompt_tokens: int, hit_units: int, interval_units: int, is_adaptive: bool, cuts: list[int]
) -> None:
    of = policy(16 * interval_units, is_adaptive=is_adaptive)
    plan = of.plan(num_prompt_tokens, 16 * hit_units)
    at_once = of.lasting_boundaries(plan, 0, 16 * 30)
    stops = [0, *(16 * cut for cut in sorted(cuts)), 16 * 30]
    in_steps = [
        boundary
        for after, upto in itertools.pairwise(stops)
        for boundary in of.lasting_boundaries(plan, after, upto)
    ]
    assert in_steps == at_once
    assert all(of.geometry.is_boundary(tokens) for tokens, _ in at_once)


def ladder_geometry(
    use_eagle: bool = False, window_tokens: int = 9, num_groups: int = 1
) -> HitGeometry:
    groups = (
        GroupGeometry(FULL, 16, margin_tokens=16),
        GroupGeometry(WINDOW, 4, window_tokens, use_eagle, 4, num_groups),
    )
    return HitGeometry(groups, 16)


def rungs(
    top: int, after: int = 0, budget: float = math.inf, of: HitGeometry | None = None
) -> list[tuple[int, int]]:
    return list(ladder_boundaries(of or ladder_geometry(), top, after, budget))


@pytest.mark.parametrize("num_groups", [1, 3])
def test_budget_counts_the_blocks_of_all_groups(num_groups: int) -> None:
    """A window of 9 tokens takes two blocks of 4."""
    several = ladder_geometry(num_groups=num_groups)
    for rung in range(5):
        budget = rung * 2 * num_groups
        assert len(rungs(1024, budget=budget, of=several)) == rung
        assert len(rungs(1024, budget=budget + 2 * num_groups - 1, of=several)) == rung


def test_blocks_that_a_rung_shares_with_the_one_above_are_free() -> None:
    # Eight blocks each; 1008 shares four with 1024 itself, 992 four with 1008, 960 none with 992.
    wide = ladder_geometry(window_tokens=33)
    for budget, expected in {
        3: [],
        4: [1008],
        7: [1008],
        8: [1008, 992],
        16: [1008, 992, 960],
    }.items():
        assert [tokens for _, tokens in rungs(1024, budget=budget, of=wide)] == expected


@given(
    top_units=st.integers(0, 60),
    after=st.integers(0, 900),
    budget=st.integers(0, 80),
    use_eagle=st.booleans(),
    window_tokens=st.integers(2, 70),
)
def test_any_ladder(
    top_units: int, after: int, budget: int, use_eagle: bool, window_tokens: int
) -> None:
    of = ladder_geometry(use_eagle, window_tokens)
    top = top_units * 16
    found = rungs(top, after, budget, of)
    assert all(after < tokens < top and of.is_boundary(tokens) for _, tokens in found)
    assert all(top - tokens == 16 << rung for rung, tokens in found)
    own = set(of.tails(top)[1])
    taken = set().union(*(of.tails(tokens)[1] for _, tokens in found)) - own if found else set()
    assert len(taken) <= budget
    assert set(found) <= set(rungs(top, after, budget + 1, of)), "more budget, fewer rungs"


@pytest.mark.parametrize(
    ("interval_tokens", "nearest"), [(63, "0 and 64"), (200, "192 and 256"), (-64, "0 and 64")]
)
def test_refused_interval(interval_tokens: int, nearest: str) -> None:
    with pytest.raises(ValueError, match="not a multiple of 64") as caught:
        check_interval(interval_tokens, 64)
    message = str(caught.value)
    assert nearest in message
    assert f"'{interval_tokens}'" in message
    assert "64 tokens" in message
