# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The names of the connector's counters, and the counts of its traffic.

``test_counted`` tests what all tables have in common. ``docs/metrics.md`` has the metrics' names.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.counters import METRICS, ConnectorCounters
from vllm_ascend_kvext.connector.common.messages import Traffic
from vllm_ascend_kvext.segments.counters import SEGMENT_METRICS, SegmentCounters

COUNTED = {
    "hit_tokens": "host_hit_tokens",
    "capacity_bytes": "host_capacity_bytes",
    "tier.entries_held": "host_entries",
    "tier.bytes_held": "host_bytes",
    "tier.failed_stores": "transfer_failures.store",
    "tier.failed_loads": "transfer_failures.load",
}


OF_SEGMENTS = {
    "hit_segments": "blend_segments.hit",
    "missed_segments": "blend_segments.missed",
    "reused_tokens": "blend_tokens.reused",
    "recomputed_tokens": "blend_tokens.recomputed",
    "scored_probes": "blend_probes.scored",
    "lost_probes": "blend_probes.lost",
    "stored_segments": "blend_stored_segments",
}


@pytest.mark.parametrize("name", OF_SEGMENTS)
def test_a_count_of_segments_has_its_key(name: str) -> None:
    counters = SegmentCounters()
    setattr(counters, name, 3)
    assert {key: value for key, value in counters.take().items() if value} == {OF_SEGMENTS[name]: 3}


def test_an_extension_has_counters_only_and_none_of_the_connectors() -> None:
    """Reports are added up in a process that knows no extension."""
    assert not any(metric.is_gauge for metric in SEGMENT_METRICS)
    assert {m.name for m in SEGMENT_METRICS}.isdisjoint(m.name for m in METRICS)


@pytest.mark.parametrize("path", COUNTED)
def test_a_count_has_its_key(path: str) -> None:
    counters = ConnectorCounters()
    *parts, name = path.split(".")
    owner: Any = counters
    for part in parts:
        owner = getattr(owner, part)
    setattr(owner, name, 3)
    assert {key: value for key, value in counters.take().items() if value} == {COUNTED[path]: 3}


@pytest.mark.parametrize("direction", ["store", "load"])
def test_traffic_adds_up(direction: Any) -> None:
    counters, traffic = ConnectorCounters(), Traffic(num_bytes=100, seconds=0.5, transfers=1)
    for _ in range(2):
        counters.add_traffic({direction: traffic})
    assert traffic == Traffic(100, 0.5, 1)
    assert {key: value for key, value in counters.take().items() if value} == {
        f"transfer_bytes.{direction}": 200,
        f"transfer_seconds.{direction}": 1.0,
        f"transfers.{direction}": 2,
    }
