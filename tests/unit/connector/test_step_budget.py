# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How many steps are added to leave states."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.connector.scheduler.step_budget import (
    ADDED_PER_STEP,
    FIRST_STEPS,
    MAX_LEFT_STEPS,
    RESERVED_STEPS,
    TOKENS_PER_STEP,
    StepBudget,
)

OTHERS = {f"other-{number}": 1 for number in range(3)}


def end_early(budget: StepBudget, num_others: int = 0) -> float:
    budget.note_early_end("a", 64)
    return budget.note_step({"a": 64, **{f"other-{number}": 1 for number in range(num_others)}})


def num_stops(budget: StepBudget, is_trial: bool = False) -> int:
    """The steps that end early, one after the other, until no more may."""
    for number in range(10_000):
        if not (budget.may_try if is_trial else budget.may_stop):
            return number
        end_early(budget)
    return 10_000


def test_a_step_is_shared_by_its_requests() -> None:
    budget = StepBudget()
    assert end_early(budget) == 1
    assert end_early(budget, num_others=3) == 0.25


def test_only_steps_that_are_made_count() -> None:
    """A request may lack blocks, or get other tokens in the end."""
    budget = StepBudget()
    for step in (OTHERS, {"a": 32, **OTHERS}, {}):
        budget.note_early_end("a", 64)
        assert budget.note_step(step) == 0
    assert budget.note_step({"a": 64}) == 0


def test_trials_leave_steps_to_what_requests_share() -> None:
    budget = StepBudget()
    for is_trial, num_steps in ((True, FIRST_STEPS - RESERVED_STEPS), (False, RESERVED_STEPS)):
        assert num_steps <= num_stops(budget, is_trial) < 1.2 * num_steps


def test_steps_and_hits_earn_further_ones() -> None:
    budget = StepBudget()
    num_stops(budget)
    assert not budget.may_stop
    for _ in range(round(2 / ADDED_PER_STEP)):
        budget.note_step(OTHERS)
    assert 1 < num_stops(budget) < 4
    budget.note_hit(2 * TOKENS_PER_STEP)
    assert 1 < num_stops(budget) < 4


def test_what_is_earned_and_not_spent_is_bounded() -> None:
    budget = StepBudget()
    budget.note_hit(1 << 40)
    assert num_stops(budget) < 1.1 * MAX_LEFT_STEPS


@given(
    st.lists(
        st.tuples(st.booleans(), st.integers(0, 15), st.integers(0, 30_000)),
        min_size=1,
        max_size=300,
    )
)
def test_added_steps_are_bounded_at_any_time(steps: list[tuple[bool, int, int]]) -> None:
    """Added steps are at most the constant, their share of all steps, and what hits have earned."""
    budget = StepBudget()
    earned_steps, added_steps = FIRST_STEPS, 0.0
    for wants_stop, num_others, hit_tokens in steps:
        budget.note_hit(hit_tokens)
        earned_steps += hit_tokens / TOKENS_PER_STEP + ADDED_PER_STEP
        if wants_stop and budget.may_stop:
            added_steps += end_early(budget, num_others)
        else:
            budget.note_step(OTHERS)
        assert added_steps < earned_steps + 1
