# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Whether loading costs less than computing."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.connector.scheduler.transfer_cost import MIN_PREFILL_TOKENS, TransferCost


def measured() -> TransferCost:
    """The costs: 1 ms per computed token, 1 MB/s, and 10 ms for parking."""
    cost = TransferCost()
    cost.note_step(1000, 1.0)
    cost.note_copies("load", 1_000_000, 1.0)
    cost.note_load(1_000_000, 1.01)
    return cost


def test_nothing_is_refused_before_prefill_is_measured() -> None:
    assert not TransferCost().is_slower_than_computing(1 << 40, 1)


def test_load_is_too_dear_once_it_takes_longer_than_computing() -> None:
    cost = measured()
    assert not cost.is_slower_than_computing(80_000, 100)  # 90 ms against 100 ms
    assert cost.is_slower_than_computing(100_000, 100)  # 110 ms


def test_small_load_is_too_dear_for_the_time_it_parks_a_request() -> None:
    assert measured().is_slower_than_computing(1, 9)
    assert not measured().is_slower_than_computing(1, 11)


def test_kv_goes_out_and_back_once_that_is_known_to_be_faster_than_computing() -> None:
    cost = TransferCost()
    assert not cost.pays_out_and_back(1, 1 << 20), "neither computing nor copies were measured"
    cost.note_step(1000, 1.0)
    assert not cost.pays_out_and_back(1, 1 << 20), "no store was measured"
    cost.note_copies("store", 1_000_000, 0.5)
    assert cost.pays_out_and_back(100_000, 101)  # 50 ms each way
    assert not cost.pays_out_and_back(100_000, 99)
    cost.note_copies("load", 1_000_000, 1.0)
    cost.note_load(1_000_000, 1.01)
    assert cost.pays_out_and_back(100_000, 161)  # 50 ms out, 100 ms and 10 ms back
    assert not cost.pays_out_and_back(100_000, 159)
    assert TransferCost(is_ignored=True).pays_out_and_back(1 << 40, 1)


def test_a_worker_that_shares_memory_copies_a_part_of_a_piece() -> None:
    cost = measured()
    cost.note_copies("store", 1_000_000, 1.0)
    cost.shares = {"store": 0.25, "load": 0.5}
    assert cost.store_s(400_000) == pytest.approx(0.1)
    assert not cost.is_slower_than_computing(160_000, 100)  # 90 ms against 100 ms
    assert cost.is_slower_than_computing(200_000, 100)  # 110 ms


def test_steps_of_few_tokens_say_nothing() -> None:
    cost = measured()
    for _ in range(100):
        cost.note_step(MIN_PREFILL_TOKENS - 1, 60.0)
    assert cost.is_slower_than_computing(100_000, 100)


def test_estimates_follow_what_is_measured() -> None:
    cost = measured()
    for _ in range(100):
        cost.note_step(1000, 4.0)
        cost.note_copies("load", 1_000_000, 0.5)
    assert not cost.is_slower_than_computing(700_000, 91)  # 360 ms against 364 ms
    assert cost.is_slower_than_computing(700_000, 89)
