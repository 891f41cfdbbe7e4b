# SPDX-License-Identifier: Apache-2.0
"""What is counted is reported once, and adds up again where it is read."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.connector.blend_counters import BlendRefusal, LearningDrop
from vllm_ascend_kvext.connector.counters import (
    METRICS,
    ConnectorCounters,
    Report,
    is_gauge,
    merge,
)
from vllm_ascend_kvext.connector.messages import Traffic
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Shortfall

MOVED = ("transfer_bytes", "transfer_seconds", "transfers")
OWN = (
    *("hit_tokens", "hit_requests", "hole_tokens", "holes", "behind_hole_tokens"),
    *("too_dear_loads", "joined_loads", "swapped_requests"),
)
BY_REASON = {
    "shortfalls": Shortfall,
    "removed_entries": Removal,
    "removed_bytes": Removal,
    "refused_stores": Refusal,
    "stored_entries": Kind,
    "stored_bytes": Kind,
    "hole_refusals": HoleRefusal,
}
GAUGES = {
    "host_entries": lambda counters, value: setattr(counters.tier, "entries_held", value),
    "host_bytes": lambda counters, value: setattr(counters.tier, "bytes_held", value),
    "host_capacity_bytes": lambda counters, value: setattr(counters, "capacity_bytes", value),
}
Event = Callable[[ConnectorCounters, int], None]


def move(direction: Any) -> Event:
    return lambda counters, amount: counters.add_traffic(
        {direction: Traffic(amount, amount / 4, amount)}
    )


def add_to(name: str) -> Event:
    def add(counters: ConnectorCounters, amount: int) -> None:
        owner = counters if hasattr(counters, name) else counters.tier
        setattr(owner, name, getattr(owner, name) + amount)

    return add


def add_for(name: str, reason: Any) -> Event:
    def add(counters: ConnectorCounters, amount: int) -> None:
        owner = counters if hasattr(counters, name) else counters.tier
        getattr(owner, name)[reason] += amount

    return add


def add_to_blending(name: str) -> Event:
    def add(counters: ConnectorCounters, amount: int) -> None:
        setattr(counters.blending, name, getattr(counters.blending, name) + amount)

    return add


def refuse_blending(reason: BlendRefusal) -> Event:
    def add(counters: ConnectorCounters, amount: int) -> None:
        counters.blending.refusals[reason] += amount

    return add


def drop_segments(drop: LearningDrop) -> Event:
    def add(counters: ConnectorCounters, amount: int) -> None:
        counters.blending.learning_drops[drop] += amount

    return add


# By the keys that they change, one after the other.
COUNTED: dict[str, Event] = {
    **{f"host_{name}": add_to(name) for name in OWN},
    "transfer_failures.store": add_to("failed_stores"),
    "transfer_failures.load": add_to("failed_loads"),
    **{
        f"host_{name}.{reason.name.lower()}": add_for(name, reason)
        for name, reasons in BY_REASON.items()
        for reason in reasons
    },
    "blend_segments.hit": add_to_blending("hit_segments"),
    "blend_segments.missed": add_to_blending("missed_segments"),
    "blend_tokens.reused": add_to_blending("reused_tokens"),
    "blend_tokens.recomputed": add_to_blending("recomputed_tokens"),
    "blend_stored_segments": add_to_blending("stored_segments"),
    "blend_learned_segments": add_to_blending("learned_segments"),
    **{f"blend_learning_drops.{drop.value}": drop_segments(drop) for drop in LearningDrop},
    "blend_probes.scored": add_to_blending("scored_probes"),
    "blend_probes.lost": add_to_blending("lost_probes"),
    "blend_probed_tokens": add_to_blending("probed_tokens"),
    **{f"blend_refusals.{reason.value}": refuse_blending(reason) for reason in BlendRefusal},
}
EVENTS: tuple[Event, ...] = (*COUNTED.values(), *GAUGES.values(), move("store"), move("load"))


@pytest.fixture
def counters() -> ConnectorCounters:
    return ConnectorCounters()


def without_gauges(report: Report) -> Report:
    return {key: value for key, value in report.items() if not is_gauge(key)}


def test_nothing_counted_is_nothing_to_report(counters: ConnectorCounters) -> None:
    assert counters.take() == {}
    assert not any(counters.totals().values())


@pytest.mark.parametrize("key", COUNTED)
def test_each_count_has_its_key(counters: ConnectorCounters, key: str) -> None:
    COUNTED[key](counters, 3)
    assert without_gauges(counters.take()) == {key: 3}


def test_every_key_can_be_counted() -> None:
    keys = {key for metric in METRICS for key in metric.keys}
    moved = {f"{name}.{way}" for way in ("store", "load") for name in MOVED}
    assert keys == {*COUNTED, *GAUGES, *moved}
    assert len(keys) == sum(len(metric.keys) for metric in METRICS)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_traffic_adds_up(counters: ConnectorCounters, direction: Any) -> None:
    for _ in range(2):
        counters.add_traffic({direction: Traffic(num_bytes=100, seconds=0.5, transfers=1)})
    assert without_gauges(counters.take()) == {
        f"transfer_bytes.{direction}": 200,
        f"transfer_seconds.{direction}": 1.0,
        f"transfers.{direction}": 2,
    }


def test_what_workers_report_is_not_changed_by_counting_it(counters: ConnectorCounters) -> None:
    first = Traffic(num_bytes=1)
    counters.add_traffic({"store": first})
    counters.add_traffic({"store": Traffic(num_bytes=2)})
    assert first == Traffic(num_bytes=1)


def test_a_report_says_what_was_counted_since_the_last_one(counters: ConnectorCounters) -> None:
    counters.hit_tokens += 5
    assert without_gauges(counters.take()) == {"host_hit_tokens": 5}
    assert counters.take() == {}
    counters.hit_tokens += 2
    counters.tier.shortfalls[Shortfall.NO_TAIL] += 1
    assert without_gauges(counters.take()) == {"host_hit_tokens": 2, "host_shortfalls.no_tail": 1}


def test_gauges_say_how_much_there_is_in_every_report(counters: ConnectorCounters) -> None:
    counters.capacity_bytes = 1000
    counters.tier.entries_held, counters.tier.bytes_held = 3, 300
    held = {"host_entries": 3, "host_bytes": 300, "host_capacity_bytes": 1000}
    assert counters.take() == held
    counters.hit_tokens += 1
    assert counters.take() == {**held, "host_hit_tokens": 1}
    counters.tier.entries_held, counters.tier.bytes_held = 1, 100
    assert counters.take() == {**held, "host_entries": 1, "host_bytes": 100}


def test_a_gauge_that_falls_to_zero_is_reported(counters: ConnectorCounters) -> None:
    counters.tier.entries_held = 3
    counters.take()
    counters.tier.entries_held = 0
    assert counters.take()["host_entries"] == 0


def test_gauges_are_the_three_that_may_fall() -> None:
    assert {key for metric in METRICS for key in metric.keys if is_gauge(key)} == {*GAUGES}


def test_reports_are_plain_data(counters: ConnectorCounters) -> None:
    for event in EVENTS:
        event(counters, 1)
    report = counters.take()
    assert pickle.loads(pickle.dumps(report)) == report
    assert json.loads(json.dumps(report)) == report
    assert {type(value) for value in report.values()} <= {int, float}


def test_what_is_forgotten_is_reported_to_nobody() -> None:
    counters = ConnectorCounters()
    counters.hit_tokens, counters.capacity_bytes = 5, 100
    counters.forget()
    assert [value for value in counters.take().values() if value] == [100], "gauges are reported"
    assert [value for value in counters.totals().values() if value] == [100]
    counters.hit_tokens += 2
    hits = {key: value for key, value in counters.totals().items() if value == 2}
    assert len(hits) == 1
    assert hits.items() <= counters.take().items()


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(1, 1000), st.booleans())))
def test_reports_add_up_to_the_totals(steps: list[tuple[Event, int, bool]]) -> None:
    counters = ConnectorCounters()
    read: Report = {}
    for event, amount, is_reported in steps:
        event(counters, amount)
        if is_reported:
            merge(read, counters.take())
    merge(read, counters.take())
    totals = counters.totals()
    assert read == {key: value for key, value in totals.items() if value or key in read}
