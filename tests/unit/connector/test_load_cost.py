# SPDX-License-Identifier: Apache-2.0
"""Whether loading costs less than computing."""

from __future__ import annotations

from vllm_ascend_kvext.connector.load_cost import LEAST_PREFILL_TOKENS, LoadCost


def measured() -> LoadCost:
    """1 ms per token, 1 MB/s, parked for 10 ms."""
    cost = LoadCost()
    cost.note_step(1000, 1.0)
    cost.note_copies(1_000_000, 1.0)
    cost.note_load(1_000_000, 1.01)
    return cost


def test_nothing_is_refused_before_prefill_is_measured() -> None:
    assert not LoadCost().is_too_dear(1 << 40, 1)


def test_load_is_too_dear_once_it_takes_longer_than_computing() -> None:
    cost = measured()
    assert not cost.is_too_dear(80_000, 100)  # 90 ms against 100 ms
    assert cost.is_too_dear(100_000, 100)  # 110 ms


def test_small_load_is_too_dear_for_the_time_it_parks_a_request() -> None:
    assert measured().is_too_dear(1, 9)
    assert not measured().is_too_dear(1, 11)


def test_steps_of_few_tokens_say_nothing() -> None:
    cost = measured()
    for _ in range(100):
        cost.note_step(LEAST_PREFILL_TOKENS - 1, 60.0)
    assert cost.compute_s(1000) == 1.0


def test_what_was_measured_can_be_forgotten() -> None:
    cost = measured()
    assert cost.compute_s(100)
    cost.forget()
    assert cost.compute_s(100) is None
    assert cost.load_s(1 << 20) == 0


def test_estimates_follow_what_is_measured() -> None:
    cost = measured()
    for _ in range(100):
        cost.note_step(1000, 4.0)
        cost.note_copies(1_000_000, 0.5)
    compute_s = cost.compute_s(1000)
    assert compute_s is not None
    assert abs(compute_s - 4.0) < 0.01
    assert abs(cost.load_s(1_000_000) - 0.51) < 0.01
