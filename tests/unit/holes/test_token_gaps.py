# SPDX-License-Identifier: Apache-2.0
"""Which requests with gaps go into which step."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.holes.errors import HoleError
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.holes.token_gaps import (
    MOST_PATIENCE_S,
    Answer,
    GapsInSteps,
    Room,
    gaps_within,
)

MOST = Room(100, 8)


@pytest.mark.parametrize(
    ("gaps", "expected"),
    [
        ([], []),
        ([(20, 30)], [(20, 30)]),
        ([(40, 50), (20, 30)], [(20, 30), (40, 50)]),
        ([(20, 30), (30, 40), (35, 45)], [(20, 45)]),
        ([(0, 10)], []),
        ([(0, 12)], [(10, 12)]),
        ([(85, 95), (90, 99)], [(85, 90)]),
    ],
)
def test_gaps_lie_within_what_was_matched(
    gaps: list[tuple[int, int]], expected: list[tuple[int, int]]
) -> None:
    assert list(gaps_within(gaps, 10, 90)) == expected


@pytest.mark.parametrize("gap", [(-1, 5), (5, 5), (6, 5)])
def test_wrong_gaps_are_refused(gap: tuple[int, int]) -> None:
    with pytest.raises(HoleError, match="expected pairs of a first token and an end behind it"):
        gaps_within([(20, 30), gap], 10, 90)


def ask(steps: GapsInSteps, name: str, *gaps: tuple[int, int], now_s: float = 0.0) -> Answer:
    return steps.ask(name, [Run(*gap) for gap in gaps], 1, MOST, now_s)


def test_request_is_admitted_in_the_step_after_that_which_finds_its_gaps() -> None:
    steps = GapsInSteps()
    assert ask(steps, "a", (10, 20), (30, 35)) is Answer.LATER
    assert ask(steps, "a", (10, 20), (30, 35)) is Answer.LATER  # in the same step
    assert steps.begin_step(Room(50, 4)) == Room(15, 2)
    assert ask(steps, "a", (10, 20), (30, 35)) is Answer.NOW
    steps.drop("a")
    assert not steps
    assert steps.begin_step(Room(50, 4)) == Room(0, 0)


@pytest.mark.parametrize(
    "has", [Room(15, 4), Room(16, 2), Room(-5, -1)], ids=["tokens", "rows", "neither"]
)
def test_request_waits_for_its_gaps_and_a_token_of_its_own(has: Room) -> None:
    steps = GapsInSteps()
    ask(steps, "a", (10, 20), (30, 35))
    assert steps.begin_step(has) == Room(0, 0)
    assert ask(steps, "a", (10, 20), (30, 35)) is Answer.LATER
    assert steps.begin_step(Room(16, 3)) == Room(15, 2)


def test_who_was_asked_first_comes_first_and_nobody_waits_for_who_does_not_fit() -> None:
    steps = GapsInSteps()
    for name, num_tokens in (("a", 30), ("b", 20), ("c", 5)):
        ask(steps, name, (0, num_tokens))
    assert steps.begin_step(Room(40, 8)) == Room(35, 2)
    answers = [ask(steps, name, (0, n)) for name, n in (("a", 30), ("b", 20), ("c", 5))]
    assert answers == [Answer.NOW, Answer.LATER, Answer.NOW]


def test_a_request_whose_gaps_have_grown_waits_again() -> None:
    steps = GapsInSteps()
    ask(steps, "a", (10, 20))
    steps.begin_step(MOST)
    assert ask(steps, "a", (10, 21)) is Answer.LATER
    assert steps.begin_step(MOST) == Room(11, 1)
    assert ask(steps, "a", (10, 18)) is Answer.NOW


def test_what_was_set_aside_for_one_step_is_not_there_in_the_next() -> None:
    steps = GapsInSteps()
    ask(steps, "a", (10, 20))
    steps.begin_step(MOST)
    steps.begin_step(Room(5, 8))
    assert ask(steps, "a", (10, 20)) is Answer.LATER


@pytest.mark.parametrize("own_tokens", [1, 50])
def test_own_tokens_are_not_set_aside(own_tokens: int) -> None:
    steps = GapsInSteps()
    steps.ask("a", [Run(10, 20)], own_tokens, MOST, 0.0)
    assert steps.begin_step(Room(9 + own_tokens, 2)) == Room(0, 0)
    assert steps.begin_step(Room(10 + own_tokens, 2)) == Room(10, 1)


@pytest.mark.parametrize(
    "gaps", [[(0, 100)], [(2 * n, 2 * n + 1) for n in range(8)]], ids=["tokens", "rows"]
)
def test_gaps_that_fit_into_no_step_wait_for_none(gaps: list[tuple[int, int]]) -> None:
    steps = GapsInSteps()
    assert ask(steps, "a", *gaps) is Answer.NEVER
    assert not steps


def test_patience_ends() -> None:
    steps = GapsInSteps()
    assert ask(steps, "a", (0, 10), now_s=5.0) is Answer.LATER
    assert ask(steps, "a", (0, 10), now_s=5.0 + 0.99 * MOST_PATIENCE_S) is Answer.LATER
    steps.begin_step(MOST)
    assert ask(steps, "a", (0, 10), now_s=5.0 + MOST_PATIENCE_S) is Answer.NOW
    steps.begin_step(Room(0, 0))
    assert ask(steps, "a", (0, 10), now_s=5.0 + MOST_PATIENCE_S) is Answer.NEVER
    assert ask(steps, "a", (0, 10), now_s=6.0 + MOST_PATIENCE_S) is Answer.LATER
