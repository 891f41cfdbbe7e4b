# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which boundaries are kept after their request, and which intervals are refused."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import example, given
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


def geometry(use_eagle: bool = False, window_tokens: int = 9, num_windows: int = 1) -> HitGeometry:
    window = GroupGeometry(WINDOW, 4, window_tokens, use_eagle, 4, num_windows)
    return HitGeometry((GroupGeometry(FULL, 16, margin_tokens=16), window), 16)


def adaptive(interval_tokens: int = 0, ladder_budget: float = math.inf) -> RetentionPolicy:
    return RetentionPolicy(geometry(), interval_tokens, True, ladder_budget)


@pytest.mark.parametrize(("num_prompt_tokens", "replay_tokens"), [(992, 976), (993, 992)])
def test_the_plan_has_a_ladder_below_where_the_prompt_itself_hits(
    num_prompt_tokens: int, replay_tokens: int
) -> None:
    """The last token of a prompt is always computed."""
    rungs = {replay_tokens - (16 << rung): Reason(Origin.LADDER, rung) for rung in range(6)}
    assert adaptive().plan(num_prompt_tokens) == {replay_tokens: PROMPT, **rungs}
    assert adaptive(ladder_budget=0).plan(num_prompt_tokens) == {replay_tokens: PROMPT}


def test_demand_goes_before_what_nobody_asked_for() -> None:
    demand = {976: Reason(Origin.JUNCTION), 992: Reason(Origin.WANTED), 48: Reason(Origin.HINT)}
    plan = adaptive().plan(1000, 0, demand)
    assert {tokens: plan[tokens] for tokens in demand} == demand
    assert plan[960] == Reason(Origin.LADDER, 1)


def test_what_nobody_asked_for_is_left_only_where_it_is_worth_trying() -> None:
    hint = {64: Reason(Origin.HINT)}
    assert adaptive().plan(1000, 0, hint, lambda reason: False) == {992: PROMPT, **hint}


@pytest.mark.parametrize("num_windows", [1, 2, 5])
@pytest.mark.parametrize("window_tokens", [5, 9, 65, 129])
def test_the_automatic_grid_costs_a_bounded_share(window_tokens: int, num_windows: int) -> None:
    of = RetentionPolicy(geometry(False, window_tokens, num_windows), 0, is_adaptive=True)

    def tail_share(grid_tokens: int) -> float:
        return of.geometry.num_tail_blocks / (grid_tokens / 16)

    grid_units = of.grid_tokens // 16
    assert of.grid_tokens % 16 == 0 and grid_units & (grid_units - 1) == 0
    assert tail_share(of.grid_tokens) <= 1 / GRID_SHARE
    assert grid_units == 1 or tail_share(of.grid_tokens // 2) > 1 / GRID_SHARE


def test_states_and_models_without_full_attention_have_no_automatic_grid() -> None:
    full, state = GroupGeometry(FULL, 16), GroupGeometry(STATE, 16)
    window = GroupGeometry(WINDOW, 16, 9)
    for groups in ((full, state), (full, window, state), (window,)):
        assert RetentionPolicy(HitGeometry(groups, 16), 0, is_adaptive=True).grid_tokens == 0
        assert RetentionPolicy(HitGeometry(groups, 16), 32, is_adaptive=True).grid_tokens == 32


@given(
    num_prompt_tokens=st.integers(1, 400),
    hit_units=st.integers(0, 20),
    interval_units=st.integers(0, 5),
    window_tokens=st.sampled_from([9, 41]),
    is_adaptive=st.booleans(),
    cuts=st.lists(st.integers(0, 30)),
)
def test_boundaries_last_that_are_planned_or_on_the_grid_whatever_the_steps(
    num_prompt_tokens: int,
    hit_units: int,
    interval_units: int,
    window_tokens: int,
    is_adaptive: bool,
    cuts: list[int],
) -> None:
    of = RetentionPolicy(geometry(True, window_tokens), 16 * interval_units, is_adaptive)
    plan = of.plan(num_prompt_tokens, 16 * hit_units)
    grid = range(of.grid_tokens, 16 * 30 + 1, of.grid_tokens) if of.grid_tokens else ()
    # If a wide window looks ahead, no lookup can hit some of the first multiples.
    reasons = {tokens: GRID for tokens in grid if of.geometry.is_boundary(tokens)} | plan
    stops = [0, *(16 * cut for cut in sorted(cuts)), 16 * 30]
    in_steps = [
        boundary
        for after, upto in itertools.pairwise(stops)
        for boundary in of.lasting_boundaries(plan, after, upto)
    ]
    assert in_steps == [each for each in sorted(reasons.items()) if 0 < each[0] <= 16 * 30]
    assert all(of.geometry.is_boundary(tokens) for tokens in plan)


@given(
    top_units=st.integers(0, 60),
    after=st.integers(0, 900),
    budget=st.integers(0, 160),
    use_eagle=st.booleans(),
    window_tokens=st.integers(2, 70),
    num_windows=st.integers(1, 3),
)
@example(64, 0, 8, False, 33, 1)  # The first rungs share blocks with the rung above.
def test_rungs_are_at_distances_that_double_until_their_blocks_are_spent(
    top_units: int, after: int, budget: int, use_eagle: bool, window_tokens: int, num_windows: int
) -> None:
    of, top = geometry(use_eagle, window_tokens, num_windows), 16 * top_units
    expected, above, left = [], set(of.tails(top)[1]), budget
    for rung, tokens in enumerate(top - (16 << rung) for rung in range(7)):
        if tokens <= after:
            break
        blocks = set(of.tails(tokens)[1])
        left -= num_windows * len(blocks - above)
        above = blocks
        if left >= 0 and of.is_boundary(tokens):
            expected.append((rung, tokens))
    assert list(ladder_boundaries(of, top, after, budget, of.unit_tokens)) == expected


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
