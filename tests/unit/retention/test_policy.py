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
from vllm_ascend_kvext.retention.policy import GRID_SHARE, RetentionPolicy, parse_interval
from vllm_ascend_kvext.retention.reasons import Origin, Reason

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
PROMPT, GRID = Reason(Origin.PROMPT), Reason(Origin.GRID)


def policy(
    interval_tokens: int,
    looks_ahead: bool = False,
    is_adaptive: bool = False,
    ladder_budget: float = 0.5,
) -> RetentionPolicy:
    groups = (
        GroupGeometry(FULL, 16, margin_tokens=16),
        GroupGeometry(WINDOW, 4, 9, looks_ahead, margin_tokens=4),
    )
    return RetentionPolicy(HitGeometry(groups, 16), interval_tokens, is_adaptive, ladder_budget)


def adaptive(interval_tokens: int = 0, ladder_budget: float = 0.5) -> RetentionPolicy:
    return policy(interval_tokens, is_adaptive=True, ladder_budget=ladder_budget)


def lasting(of: RetentionPolicy, num_prompt_tokens: int, after: int, upto: int) -> list[int]:
    found = of.lasting_boundaries(of.plan(num_prompt_tokens), after, upto)
    return [tokens for tokens, _ in found]


@pytest.mark.parametrize(
    ("num_prompt_tokens", "looks_ahead", "expected"),
    [
        (16, False, 0),  # the last token is always computed
        (17, False, 16),
        (100, False, 96),
        (97, True, 80),  # no room for the look-ahead block [96, 100) within 96 tokens
        (101, True, 96),
    ],
)
def test_replay_boundary(num_prompt_tokens: int, looks_ahead: bool, expected: int) -> None:
    assert policy(0, looks_ahead).replay_boundary_tokens(num_prompt_tokens) == expected


def test_interval_zero_keeps_the_replay_boundary_only() -> None:
    assert policy(0).plan(100) == {96: PROMPT}
    assert lasting(policy(0), 100, 0, 96) == [96]
    assert lasting(policy(0), 100, 0, 80) == []
    assert lasting(policy(0), 100, 96, 500) == []


def test_interval_keeps_a_checkpoint_per_interval_and_the_replay_boundary() -> None:
    assert policy(32).plan(120) == {112: PROMPT}
    assert lasting(policy(32), 120, 0, 112) == [32, 64, 96, 112]
    assert lasting(policy(32), 120, 64, 200) == [96, 112, 128, 160, 192]


def test_an_interval_alone_has_no_ladder() -> None:
    assert policy(0, ladder_budget=math.inf).plan(1000) == {992: PROMPT}


def test_each_boundary_has_its_reason() -> None:
    found = adaptive(64).lasting_boundaries({80: Reason(Origin.HINT), 128: PROMPT}, 0, 192)
    assert found == [(64, GRID), (80, Reason(Origin.HINT)), (128, PROMPT), (192, GRID)]


def test_the_plan_has_a_ladder_below_the_replay_boundary() -> None:
    plan = adaptive(ladder_budget=math.inf).plan(1000)
    rungs = {992 - (16 << rung): Reason(Origin.LADDER, rung) for rung in range(6)}
    assert plan == {992: PROMPT, **rungs}
    assert adaptive(ladder_budget=0).plan(1000) == {992: PROMPT}


def test_the_ladder_ends_above_the_hit() -> None:
    plan = adaptive(ladder_budget=math.inf).plan(1000, hit_tokens=928)
    assert sorted(plan) == [960, 976, 992]


@pytest.mark.parametrize(("ladder_budget", "num_rungs"), [(0.19, 5), (0.12, 3), (0.032, 1)])
def test_the_budget_grows_with_the_prompt(ladder_budget: float, num_rungs: int) -> None:
    """A prompt of 1000 tokens has 62.5 blocks of full attention; a rung takes two."""
    assert len(adaptive(ladder_budget=ladder_budget).plan(1000)) == 1 + num_rungs


def test_demand_goes_before_what_nobody_asked_for() -> None:
    demand = {976: Reason(Origin.JUNCTION), 992: Reason(Origin.WANTED), 48: Reason(Origin.HINT)}
    plan = adaptive(ladder_budget=math.inf).plan(1000, 0, demand)
    assert {tokens: plan[tokens] for tokens in demand} == demand
    assert plan[960] == Reason(Origin.LADDER, 1)


def test_a_boundary_behind_the_prompt_is_not_kept_twice() -> None:
    """What is planned lies within the prompt; the grid goes on with the answer."""
    found = adaptive(64).lasting_boundaries(adaptive(64).plan(100), 96, 300)
    assert found == [(128, GRID), (192, GRID), (256, GRID)]


def test_what_nobody_asked_for_is_left_only_where_it_is_worth_trying() -> None:
    def refuse(reason: Reason) -> bool:
        return False

    of = adaptive(ladder_budget=math.inf)
    hint = {64: Reason(Origin.HINT)}
    assert of.plan(1000, 0, hint, refuse) == {992: PROMPT, **hint}
    assert of.lasting_boundaries({}, 0, 2000), "the automatic grid"
    asked_for = adaptive(512).lasting_boundaries({}, 0, 1024)
    assert [tokens for tokens, _ in asked_for] == [512, 1024], "by the user"


def test_an_interval_is_the_grid() -> None:
    assert policy(96).grid_tokens == adaptive(96).grid_tokens == 96
    assert policy(0).grid_tokens == 0


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


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("64", 64), (" 128 ", 128)])
def test_valid_interval(text: str, value: int) -> None:
    assert parse_interval(text, 64) == value


@pytest.mark.parametrize(
    ("text", "problem", "nearest"),
    [
        ("-5", "negative", "0 and 64"),
        ("abc", "not an integer", "0 and 64"),
        ("100.5", "not an integer", "64 and 128"),
        ("nan", "not an integer", "0 and 64"),
        ("inf", "not an integer", "0 and 64"),
        ("1e2", "not an integer", "64 and 128"),
        ("63", "not a multiple of 64", "0 and 64"),
        ("200", "not a multiple of 64", "192 and 256"),
    ],
)
def test_refused_interval(text: str, problem: str, nearest: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        parse_interval(text, 64)
    message = str(caught.value)
    assert nearest in message
    assert repr(text) in message
    assert "64 tokens" in message


def test_unit_is_not_checked_where_nothing_is_sparse() -> None:
    assert parse_interval("100", 64, check_unit=False) == 100
    with pytest.raises(ValueError, match="negative"):
        parse_interval("-64", 64, check_unit=False)
