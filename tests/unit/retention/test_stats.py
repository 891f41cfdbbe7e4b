# SPDX-License-Identifier: Apache-2.0
"""What is counted is reported once, and adds up again where it is read."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.retention.stats import (
    METRICS,
    Counts,
    LossCause,
    RetentionStats,
    describe,
    merge,
)

COUNTERS = (
    "checkpoints_kept",
    "checkpoints_evicted",
    "junctions_pinned",
    "junctions_hit",
    "hints_pinned",
)


def count(name: str) -> Callable[[RetentionStats, int], None]:
    return lambda stats, amount: setattr(stats, name, getattr(stats, name) + amount)


def lose(cause: LossCause) -> Callable[[RetentionStats, int], None]:
    return lambda stats, amount: stats.lose(cause, amount)


def set_checkpoints(stats: RetentionStats, amount: int) -> None:
    stats.checkpoints = amount


EVENTS = (*map(count, COUNTERS), *map(lose, LossCause), set_checkpoints)


@pytest.fixture
def stats() -> RetentionStats:
    return RetentionStats()


def test_nothing_counted_is_nothing_to_report(stats: RetentionStats) -> None:
    assert stats.take() is None


def test_a_report_says_what_has_changed_since_the_last_one(stats: RetentionStats) -> None:
    stats.checkpoints_kept += 5
    stats.lose(LossCause.EVICTED, 64)
    assert stats.take() == {"checkpoints_kept": 5, "lost_tokens.evicted": 64}
    assert stats.take() is None
    stats.checkpoints_kept += 2
    stats.lose(LossCause.LOOK_AHEAD, 16)
    assert stats.take() == {"checkpoints_kept": 2, "lost_tokens.look_ahead": 16}


def test_the_gauge_is_reported_as_it_stands(stats: RetentionStats) -> None:
    stats.checkpoints = 7
    assert stats.take() == {"checkpoints": 7}
    stats.checkpoints = 0
    assert stats.take() == {"checkpoints": 0}


def test_totals_outlive_a_report(stats: RetentionStats) -> None:
    stats.junctions_hit += 3
    stats.take()
    assert stats.totals()["junctions_hit"] == 3


def test_two_engines_do_not_share_what_they_lose(stats: RetentionStats) -> None:
    stats.lose(LossCause.NEVER_KEPT, 1)
    assert RetentionStats().take() is None


def test_every_number_has_a_metric(stats: RetentionStats) -> None:
    keys = [
        metric.key(cause)
        for metric in METRICS
        for cause in (LossCause if metric.has_causes else (None,))
    ]
    assert sorted(keys) == sorted(stats.totals())
    assert all(metric.documentation.endswith(".") for metric in METRICS)


def test_each_attribute_is_reported_under_its_name(stats: RetentionStats) -> None:
    expected: Counts = {"checkpoints": 1}
    stats.checkpoints = 1
    for amount, name in enumerate(COUNTERS, start=2):
        setattr(stats, name, amount)
        expected[name] = amount
    for amount, cause in enumerate(LossCause, start=20):
        stats.lose(cause, amount)
        expected[f"lost_tokens.{cause.value}"] = amount
    assert stats.totals() == expected
    assert stats.take() == expected


@given(st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9), st.booleans())))
def test_merged_reports_are_the_totals(events) -> None:
    stats = RetentionStats()
    merged: Counts = {}
    for event, amount, is_reported in events:
        event(stats, amount)
        if is_reported:
            merge(merged, stats.take() or {})
    merge(merged, stats.take() or {})
    assert {**RetentionStats().totals(), **merged} == stats.totals()


def test_the_line_names_everything(stats: RetentionStats) -> None:
    for amount, name in enumerate(COUNTERS, start=11):
        setattr(stats, name, amount)
    for amount, cause in enumerate(LossCause, start=21):
        stats.lose(cause, amount)
    line = describe(stats.totals())
    assert line.startswith("KV retention: ")
    assert [int(number) for number in re.findall(r"\d+", line)] == [*range(11, 16), *range(21, 25)]
    for words in (
        "11 checkpoints kept",
        "12 evicted",
        "13 junctions pinned (14 hit)",
        "15 hints pinned",
        "never kept 21",
        "evicted 22",
        "granularity 23",
        "look ahead 24",
    ):
        assert words in line


@pytest.mark.parametrize("quiet", [{}, {"checkpoints": 8}, {"checkpoints_kept": 0}])
def test_no_line_if_nothing_happened(quiet: Counts) -> None:
    assert describe(quiet) == ""
