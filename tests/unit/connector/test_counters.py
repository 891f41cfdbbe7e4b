# SPDX-License-Identifier: Apache-2.0
"""Keys of the connector's counts, and traffic.

What all tables do is in ``test_counted``; the names of metrics are those of ``docs/metrics.md``.
"""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.counters import ConnectorCounters
from vllm_ascend_kvext.connector.common.messages import Traffic

COUNTED = {
    "hit_tokens": "host_hit_tokens",
    "capacity_bytes": "host_capacity_bytes",
    "tier.entries_held": "host_entries",
    "tier.bytes_held": "host_bytes",
    "tier.failed_stores": "transfer_failures.store",
    "tier.failed_loads": "transfer_failures.load",
    "blending.hit_segments": "blend_segments.hit",
    "blending.missed_segments": "blend_segments.missed",
    "blending.reused_tokens": "blend_tokens.reused",
    "blending.recomputed_tokens": "blend_tokens.recomputed",
    "blending.scored_probes": "blend_probes.scored",
    "blending.lost_probes": "blend_probes.lost",
}


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
