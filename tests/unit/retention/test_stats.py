# SPDX-License-Identifier: Apache-2.0
"""Names of retention's metrics, and its line of the log. The rest is in ``test_counted``."""

from __future__ import annotations

import re

import pytest

from vllm_ascend_kvext.counted import Report
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats, describe

COUNTERS = (
    "checkpoints_kept",
    "checkpoints_evicted",
    "junctions_pinned",
    "junctions_hit",
    "hints_pinned",
)


@pytest.fixture
def stats() -> RetentionStats:
    return RetentionStats()


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
def test_no_line_if_nothing_happened(quiet: Report) -> None:
    assert describe(quiet) == ""
