# SPDX-License-Identifier: Apache-2.0
"""Names of the connector's metrics, and traffic. What all tables do is in ``test_counted``."""

from __future__ import annotations

from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.blend_counters import BlendRefusal, LearningDrop
from vllm_ascend_kvext.connector.common.counters import METRICS, ConnectorCounters
from vllm_ascend_kvext.connector.common.messages import Traffic
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.lookup import Shortfall

GAUGES = {"host_entries", "host_bytes", "host_capacity_bytes"}
PLAIN = {
    *(f"host_{name}" for name in ("hit_tokens", "hit_requests", "hole_tokens", "holes")),
    *(f"host_{name}" for name in ("behind_hole_tokens", "too_dear_loads", "joined_loads")),
    "host_swapped_requests",
    *("blend_stored_segments", "blend_learned_segments", "blend_probed_tokens"),
}
WAYS, KINDS = ("direction", ("store", "load")), ("kind", ("tails", "rows"))
LABELLED = {
    "transfer_bytes": WAYS,
    "transfer_seconds": WAYS,
    "transfers": WAYS,
    "transfer_failures": WAYS,
    "host_hole_refusals": ("reason", HoleRefusal),
    "host_shortfalls": ("reason", Shortfall),
    "host_removed_entries": ("reason", Removal),
    "host_removed_bytes": ("reason", Removal),
    "host_refused_stores": ("reason", Refusal),
    "host_stored_entries": KINDS,
    "host_stored_bytes": KINDS,
    "blend_segments": ("result", ("hit", "missed")),
    "blend_tokens": ("result", ("reused", "recomputed")),
    "blend_probes": ("result", ("scored", "lost")),
    "blend_learning_drops": ("reason", LearningDrop),
    "blend_refusals": ("reason", BlendRefusal),
}
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


def test_metrics_keep_their_names_and_labels() -> None:
    """Dashboards name them."""
    found = {metric.name: (metric.label, metric.label_values) for metric in METRICS}
    labelled = {
        name: (label, tuple(getattr(each, "value", each) for each in values))
        for name, (label, values) in LABELLED.items()
    }
    assert found == dict.fromkeys(PLAIN | GAUGES, ("", ())) | labelled
    assert {metric.name for metric in METRICS if metric.is_gauge} == GAUGES


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
