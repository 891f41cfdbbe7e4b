# SPDX-License-Identifier: Apache-2.0
"""Reasons are judged by what became of the checkpoints that were kept for them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.retention.reasons import MOST_USES, STEPS_END_AT, Origin, Reason, UseRates

LADDER = Reason(Origin.LADDER, 1)
PROMPT = Reason(Origin.PROMPT)


@pytest.fixture
def rates() -> UseRates:
    return UseRates()


@pytest.mark.parametrize("origin", Origin)
def test_every_reason_starts_out_equal(rates: UseRates, origin: Origin) -> None:
    assert rates.expected_uses(Reason(origin)) == 1


def test_odds_of_a_use(rates: UseRates) -> None:
    for _ in range(3):
        rates.count_use(LADDER)
    assert rates.expected_uses(LADDER) == 4
    rates.count_eviction(LADDER)
    assert rates.expected_uses(LADDER) == 2
    for _ in range(6):
        rates.count_eviction(LADDER)
    assert rates.expected_uses(LADDER) == 0.5


def test_reasons_are_judged_apart(rates: UseRates) -> None:
    rates.count_use(LADDER)
    rates.count_eviction(PROMPT)
    assert rates.expected_uses(Reason(Origin.LADDER, 2)) == 1
    assert rates.expected_uses(Reason(Origin.LADDER, 1, 1)) == 1
    assert rates.expected_uses(PROMPT) < 1 < rates.expected_uses(LADDER)


def test_an_eviction_taken_back_counts_as_a_use(rates: UseRates) -> None:
    rates.count_eviction(PROMPT)
    rates.take_eviction_back(PROMPT)
    assert rates.expected_uses(PROMPT) == 2
    rates.take_eviction_back(LADDER)
    assert rates.expected_uses(LADDER) == 2, "of what nothing is known there is none to take back"


def test_nothing_is_expected_without_end(rates: UseRates) -> None:
    for _ in range(100):
        rates.count_use(PROMPT)
    bound = rates.expected_uses(PROMPT)
    rates.count_use(PROMPT)
    assert rates.expected_uses(PROMPT) == bound < 100


def test_what_happened_long_ago_is_forgotten(rates: UseRates) -> None:
    for _ in range(2000):
        rates.count_use(PROMPT)
    for _ in range(300):
        rates.count_eviction(PROMPT)
    assert rates.expected_uses(PROMPT) < 0.5


@given(st.lists(st.sampled_from(["count_use", "count_eviction", "take_eviction_back"])))
def test_expectations_stay_finite_and_positive(events: list[str]) -> None:
    rates = UseRates()
    for event in events:
        getattr(rates, event)(PROMPT)
        assert 0 < rates.expected_uses(PROMPT) < 100


@pytest.mark.parametrize("origin", Origin)
def test_after_a_use_the_origin_matters_no_more(origin: Origin) -> None:
    assert Reason(origin, 3).used_again() == Reason(Origin.LATEST).used_again()


def test_uses_are_counted_up_to_a_limit() -> None:
    reason = PROMPT
    for uses in range(1, MOST_USES + 1):
        reason = reason.used_again()
        assert reason.uses == uses
    assert reason.used_again() == reason


def test_steps_end_only_where_a_request_asked_for_it() -> None:
    assert {Origin.JUNCTION, Origin.WANTED, Origin.HINT} == STEPS_END_AT


def test_what_is_never_used_is_tried_less_often(rates: UseRates) -> None:
    assert rates.is_worth_trying(LADDER)
    for _ in range(100):
        rates.count_eviction(LADDER)
    assert [rates.is_worth_trying(LADDER) for _ in range(32)].count(True) == 2
    assert rates.is_worth_trying(PROMPT)
    for _ in range(5):
        rates.count_use(LADDER)
    assert rates.is_worth_trying(LADDER)
