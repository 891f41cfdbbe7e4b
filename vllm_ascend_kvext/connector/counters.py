# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side of the connector counts, and the form in which it is reported.

A report is flat, plain data that any serializer takes: by key, what counters have gained since the
last report, and what gauges say. A counter that it leaves out has gained nothing. `METRICS` is all
that a reader of reports needs. Knows neither Prometheus nor how a report travels.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from vllm_ascend_kvext.connector.blend_counters import BlendCounters, BlendRefusal, LearningDrop
from vllm_ascend_kvext.connector.messages import Direction, Traffic
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import Refusal, Removal, TierCounters
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Shortfall

Number = int | float
Report = dict[str, Number]

_DIRECTIONS: tuple[Direction, ...] = ("store", "load")


@dataclass(slots=True)
class ConnectorCounters:
    """The counters of one engine. Whoever counts adds to the attributes; they never go down.

    Attributes:
        tier: Of the host tier: the very object that the tier counts in.
        capacity_bytes: What the tier can hold on each worker.
        traffic: By direction; see `add_traffic`.
        hit_tokens: Prompt tokens that requests had from the host tier.
        hit_requests: Requests that had some.
        hole_tokens: Prompt tokens that were computed in holes before what was loaded.
        holes: Holes of requests that had something from the host tier.
        behind_hole_tokens: Those of ``hit_tokens`` that lie behind a hole.
        hole_refusals: Requests that stopped at a hole although more was stored behind it.
        too_dear_loads: Loads that were not made, because computing was estimated to be faster.
        joined_loads: Requests that waited for another's load of the same, and made none.
        swapped_requests: Preempted requests whose KV went to the host tier.
        blending: Of segments: the very object that they are counted in.
    """

    tier: TierCounters = field(default_factory=TierCounters)
    capacity_bytes: int = 0
    traffic: dict[Direction, Traffic] = field(
        default_factory=lambda: {direction: Traffic() for direction in _DIRECTIONS}
    )
    hit_tokens: int = 0
    hit_requests: int = 0
    hole_tokens: int = 0
    holes: int = 0
    behind_hole_tokens: int = 0
    hole_refusals: dict[HoleRefusal, int] = field(
        default_factory=lambda: dict.fromkeys(HoleRefusal, 0)
    )
    too_dear_loads: int = 0
    joined_loads: int = 0
    swapped_requests: int = 0
    blending: BlendCounters = field(default_factory=BlendCounters)
    _reported: list[Number] = field(
        init=False, repr=False, default_factory=lambda: [0] * len(_KEYS)
    )
    _forgotten: list[Number] = field(
        init=False, repr=False, default_factory=lambda: [0] * len(_KEYS)
    )

    def add_traffic(self, traffic: Mapping[Direction, Traffic]) -> None:
        """Count what workers say they have moved."""
        for direction, moved in traffic.items():
            self.traffic[direction].add(moved)

    def totals(self) -> Report:
        """Everything counted so far, zeros included: a copy."""
        return {
            key: value - forgotten
            for key, value, forgotten in zip(_KEYS, self._values(), self._forgotten, strict=True)
        }

    def forget(self) -> None:
        """Begin anew: what has been counted is reported to nobody."""
        self._forgotten = [
            0 if is_gauge(key) else value for key, value in zip(_KEYS, self._values(), strict=True)
        ]
        self._reported = self._forgotten

    def take(self) -> Report:
        """What has been counted since the last call.

        Called once per scheduler step, in most of which nothing has.

        Returns:
            What counters have gained, without zeros, and all gauges; empty if nothing has changed.
        """
        reported, values = self._reported, self._values()
        self._reported = values
        if values == reported:
            return {}
        # Gauges are in every report: if one is lost on its way, the next makes up for it.
        return {
            key: value if is_gauge(key) else value - before
            for key, value, before in zip(_KEYS, values, reported, strict=True)
            if value != before or is_gauge(key)
        }

    def _values(self) -> list[Number]:
        return [value for metric in METRICS for value in metric.read(self)]


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, or one for each value of a label.

    Attributes:
        name: Without prefix and suffix.
        documentation: For whoever reads it in Prometheus.
        read: Its values: one, or one for each value of the label. Called once per step: the
            tier's dicts have all keys, in the order of their enumerations.
        label: What its values are told apart by; None if there is one value.
        label_values: In the order of ``read``.
        is_gauge: Whether a report says how much there is, and not how much was added.
        keys: What the values are called in a report.
    """

    name: str
    documentation: str
    read: Callable[[ConnectorCounters], Iterable[Number]]
    label: str | None = None
    label_values: tuple[str, ...] = ()
    is_gauge: bool = False
    keys: tuple[str, ...] = field(init=False)

    def __post_init__(self) -> None:
        keys = tuple(f"{self.name}.{value}" for value in self.label_values)
        object.__setattr__(self, "keys", keys if self.label else (self.name,))


def is_gauge(key: str) -> bool:
    """Whether a key of a report is that of a gauge."""
    return key in _GAUGE_KEYS


def merge(report: Report, later: Mapping[str, Number]) -> None:
    """Add a later report to an earlier one, in place."""
    for key, value in later.items():
        report[key] = value if is_gauge(key) else report.get(key, 0) + value


def _values(choices: type[enum.Enum]) -> tuple[str, ...]:
    return tuple(str(choice.value) for choice in choices)


_KINDS = tuple(kind.name.lower() for kind in Kind)

METRICS = (
    Metric(
        "transfer_bytes",
        "Bytes copied to and from host memory, by all workers.",
        lambda counters: [counters.traffic[way].num_bytes for way in _DIRECTIONS],
        "direction",
        _DIRECTIONS,
    ),
    Metric(
        "transfer_seconds",
        "Time that these copies took, summed over workers.",
        lambda counters: [counters.traffic[way].seconds for way in _DIRECTIONS],
        "direction",
        _DIRECTIONS,
    ),
    Metric(
        "transfers",
        "Copies of one request each, summed over workers.",
        lambda counters: [counters.traffic[way].transfers for way in _DIRECTIONS],
        "direction",
        _DIRECTIONS,
    ),
    Metric(
        "transfer_failures",
        "Stores and loads that failed, in whole or in part; what loads lack is computed.",
        lambda counters: [counters.tier.failed_stores, counters.tier.failed_loads],
        "direction",
        _DIRECTIONS,
    ),
    Metric(
        "host_hit_tokens",
        "Prompt tokens that requests had from host memory.",
        lambda counters: [counters.hit_tokens],
    ),
    Metric(
        "host_hit_requests",
        "Requests that had prompt tokens from host memory.",
        lambda counters: [counters.hit_requests],
    ),
    Metric(
        "host_hole_tokens",
        "Prompt tokens computed in holes, before tokens that were loaded.",
        lambda counters: [counters.hole_tokens],
    ),
    Metric(
        "host_holes",
        "Holes of requests that had prompt tokens from host memory.",
        lambda counters: [counters.holes],
    ),
    Metric(
        "host_behind_hole_tokens",
        "Prompt tokens from host memory that lie behind a hole.",
        lambda counters: [counters.behind_hole_tokens],
    ),
    Metric(
        "host_hole_refusals",
        "Requests that stopped at a hole although more was stored behind it, by reason.",
        lambda counters: counters.hole_refusals.values(),
        "reason",
        _values(HoleRefusal),
    ),
    Metric(
        "host_shortfalls",
        "Requests that found less in host memory than they might have, by reason.",
        lambda counters: counters.tier.shortfalls.values(),
        "reason",
        _values(Shortfall),
    ),
    Metric(
        "host_too_dear_loads",
        "Loads not made, because computing was estimated to be faster.",
        lambda counters: [counters.too_dear_loads],
    ),
    Metric(
        "host_joined_loads",
        "Requests that waited for another's load of the same, and made none.",
        lambda counters: [counters.joined_loads],
    ),
    Metric(
        "host_swapped_requests",
        "Preempted requests whose KV went to host memory.",
        lambda counters: [counters.swapped_requests],
    ),
    Metric(
        "blend_segments",
        "Segments of admitted requests, by whether they were stored and reused.",
        lambda counters: [counters.blending.hit_segments, counters.blending.missed_segments],
        "result",
        ("hit", "missed"),
    ),
    Metric(
        "blend_tokens",
        "Prompt tokens of reused segments: reused, or computed because they are in a head, or what "
        "the question attends to.",
        lambda counters: [counters.blending.reused_tokens, counters.blending.recomputed_tokens],
        "result",
        ("reused", "recomputed"),
    ),
    Metric(
        "blend_stored_segments",
        "Segments stored in host memory.",
        lambda counters: [counters.blending.stored_segments],
    ),
    Metric(
        "blend_learned_segments",
        "Segments stored because two requests had them.",
        lambda counters: [counters.blending.learned_segments],
    ),
    Metric(
        "blend_learning_drops",
        "Segments that two requests had and that are not stored, by reason.",
        lambda counters: counters.blending.learning_drops.values(),
        "reason",
        _values(LearningDrop),
    ),
    Metric(
        "blend_probes",
        "Questions compared with segments, and those that could not be.",
        lambda counters: [counters.blending.scored_probes, counters.blending.lost_probes],
        "result",
        ("scored", "lost"),
    ),
    Metric(
        "blend_probed_tokens",
        "Tokens computed only to compare a question with segments.",
        lambda counters: [counters.blending.probed_tokens],
    ),
    Metric(
        "blend_refusals",
        "Requests whose segments were computed, or not stored, by reason.",
        lambda counters: counters.blending.refusals.values(),
        "reason",
        _values(BlendRefusal),
    ),
    Metric(
        "host_stored_entries",
        "Entries stored in host memory, by what they hold.",
        lambda counters: counters.tier.stored_entries.values(),
        "kind",
        _KINDS,
    ),
    Metric(
        "host_stored_bytes",
        "Host memory that they took on each worker.",
        lambda counters: counters.tier.stored_bytes.values(),
        "kind",
        _KINDS,
    ),
    Metric(
        "host_removed_entries",
        "Entries that are not in host memory any more, by reason.",
        lambda counters: counters.tier.removed_entries.values(),
        "reason",
        _values(Removal),
    ),
    Metric(
        "host_removed_bytes",
        "Host memory that they took on each worker.",
        lambda counters: counters.tier.removed_bytes.values(),
        "reason",
        _values(Removal),
    ),
    Metric(
        "host_refused_stores",
        "Stores that were not made, by reason.",
        lambda counters: counters.tier.refused_stores.values(),
        "reason",
        _values(Refusal),
    ),
    Metric(
        "host_entries",
        "Entries in host memory, those on their way there included.",
        lambda counters: [counters.tier.entries_held],
        is_gauge=True,
    ),
    Metric(
        "host_bytes",
        "Host memory that they take on each worker.",
        lambda counters: [counters.tier.bytes_held],
        is_gauge=True,
    ),
    Metric(
        "host_capacity_bytes",
        "Host memory that there is for them on each worker.",
        lambda counters: [counters.capacity_bytes],
        is_gauge=True,
    ),
)
_KEYS: tuple[str, ...] = tuple(key for metric in METRICS for key in metric.keys)
_GAUGE_KEYS = frozenset(key for metric in METRICS if metric.is_gauge for key in metric.keys)
