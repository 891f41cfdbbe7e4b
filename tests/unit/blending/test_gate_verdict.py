# SPDX-License-Identifier: Apache-2.0
"""Which answers of a model let its segments be reused."""

from __future__ import annotations

import math

import pytest

from vllm_ascend_kvext.blending.gate_verdict import (
    LEAST_LIMITS,
    Answer,
    InPlace,
    Moved,
    difference,
    judge,
)

ALONE = {5: -0.5, 6: -1.5, 7: -2.5}
FAR = {5: -2.5, 6: -3.5, 7: -4.5}


def shifted(by: float) -> Answer:
    return {token: value + by for token, value in ALONE.items()}


def in_place(reused: Answer, beside: Answer = ALONE) -> InPlace:
    return InPlace(ALONE, beside, reused, FAR)


def moved(*differences: tuple[float, float]) -> list[Moved]:
    return [Moved(ALONE, shifted(before), shifted(after)) for before, after in differences]


@pytest.mark.parametrize("dtype", LEAST_LIMITS)
def test_what_is_reused_in_place_has_to_answer_the_same(dtype: str) -> None:
    limit = LEAST_LIMITS[dtype]
    assert judge([in_place(shifted(0.9 * limit))], [], dtype).passed
    refused = judge([in_place(ALONE), in_place(shifted(1.1 * limit))], [], dtype)
    assert not refused.passed
    assert "expected at most" in refused.message


def test_noise_between_runs_without_reuse_is_allowed() -> None:
    assert judge([in_place(shifted(0.03), beside=shifted(0.01))], [], "float32").passed
    assert not judge([in_place(shifted(0.05), beside=shifted(0.01))], [], "float32").passed


def test_an_unknown_type_is_as_coarse_as_the_coarsest() -> None:
    assert judge([in_place(shifted(0.05))], [], "float8_e4m3fn").passed


@pytest.mark.parametrize("wrong", [{}, {5: math.nan, 6: 0.0, 7: 0.0}, shifted(math.inf)])
def test_what_is_no_number_is_refused(wrong: Answer) -> None:
    assert not judge([in_place(wrong)], [], "float32").passed


def test_repair_that_helps_is_accepted() -> None:
    found = judge([in_place(ALONE)], moved((0.8, 0.3), (0.6, 0.4)), "float32")
    assert found.passed
    assert "moved, by 0.7 as stored and 0.35 repaired" in found.message


def test_repair_that_takes_answers_further_away_is_refused() -> None:
    found = judge([in_place(ALONE)], moved((0.3, 0.8), (0.4, 0.8), (0.2, 0.8)), "float32")
    assert not found.passed
    assert "sliding windows" in found.message


def test_repair_that_sometimes_helps_is_accepted() -> None:
    assert judge([in_place(ALONE)], moved((0.3, 0.8), (0.8, 0.4), (0.3, 0.4)), "float32").passed


def test_the_message_has_the_differences() -> None:
    message = judge([in_place(shifted(0.0002))], [], "float32").message
    assert "by 0.0002 where segments are reused in place" in message
    assert "by 2 with other tokens" in message


def test_a_token_that_is_not_found_counts_as_the_last_of_the_others() -> None:
    assert difference({1: -1.0, 2: -3.0}, {1: -1.0, 3: -2.0}) == pytest.approx(0.5)


@pytest.mark.parametrize("nothing", [{}, {5: math.nan, 6: 0.0, 7: 0.0}])
def test_a_model_whose_own_answers_are_no_numbers_is_refused(nothing: Answer) -> None:
    """Two runs without reuse differ by infinity, and so may all others."""
    for broken in (InPlace(*[nothing] * 4), InPlace(ALONE, nothing, nothing, FAR)):
        assert not judge([broken], [], "float32").passed


@pytest.mark.parametrize("wrong", [{}, shifted(math.nan), shifted(math.inf)])
def test_moved_answers_that_are_no_numbers_are_refused(wrong: Answer) -> None:
    good = Moved(ALONE, shifted(0.8), shifted(0.3))
    for broken in (Moved(ALONE, wrong, ALONE), Moved(ALONE, ALONE, wrong), Moved(*[wrong] * 3)):
        assert not judge([in_place(ALONE)], [good, broken], "float32").passed


def test_tokens_that_are_never_answered_do_not_differ() -> None:
    never = {**ALONE, 8: -math.inf}
    assert difference(never, never) == 0
    assert difference(never, ALONE) == math.inf


def test_it_is_said_if_other_tokens_make_no_difference() -> None:
    found = judge([InPlace(ALONE, ALONE, ALONE, shifted(0.0005))], [], "float32")
    assert found.passed
    assert "with a limit of 0.001 that says nothing" in found.message
    assert "says nothing" not in judge([in_place(ALONE)], [], "float32").message
