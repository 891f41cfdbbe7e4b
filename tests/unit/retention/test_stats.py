# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention's line in the log. ``test_counted`` tests its counters."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.counted import Report
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats, describe


def test_the_line_names_everything() -> None:
    lost_tokens = dict(zip(LossCause, range(21, 25), strict=True))
    stats = RetentionStats(9, 11, 12, 13, 14, 15, lost_tokens)
    assert describe(stats.totals()) == (
        "KV retention: 11 checkpoints kept, 12 evicted, 13 junctions pinned (14 hit), "
        "15 hints pinned, lost tokens: never kept 21, evicted 22, granularity 23, look ahead 24"
    )


@pytest.mark.parametrize("quiet", [{}, {"checkpoints": 8}, {"checkpoints_kept": 0}])
def test_no_line_if_nothing_happened(quiet: Report) -> None:
    assert describe(quiet) == ""
