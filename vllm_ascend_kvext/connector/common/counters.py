# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The counters that the scheduler side of the connector reports; see ``counted``.

The module knows neither Prometheus nor how a report travels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

from vllm_ascend_kvext.connector.common.messages import Direction, Traffic
from vllm_ascend_kvext.counted import Counted, MetricTable, Reporting, zeros
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import TierCounters

_zeros_by_direction = partial(zeros, ("store", "load", "get", "put"))
_SHARED_RESULTS = ("found", "absent", "late", "given_up", "paused")
_SHARED_FAILURES = (
    "get_absent",
    "get_broken",
    "get_unreachable",
    "get_hung",
    "put_unreachable",
    "put_busy",
    "touch_unreachable",
)


@dataclass(slots=True)
class ConnectorCounters(Reporting):
    """The counters of one engine. The parts of the scheduler side add to them. None goes down.

    ``tier`` is the object in which the host tier itself counts.
    """

    transfer_bytes: Annotated[
        dict[Direction, int],
        Counted(
            "Bytes copied to and from host memory, by all workers; get, put: a shared tier.",
            "direction",
            name="transfer_bytes",
        ),
    ] = field(default_factory=_zeros_by_direction)
    transfer_seconds: Annotated[
        dict[Direction, float],
        Counted(
            "Time that these copies took, summed over workers.",
            "direction",
            name="transfer_seconds",
        ),
    ] = field(default_factory=_zeros_by_direction)
    transfers: Annotated[
        dict[Direction, int],
        Counted("Copies of one request each, summed over workers.", "direction", name="transfers"),
    ] = field(default_factory=_zeros_by_direction)
    hit_tokens: Annotated[int, Counted("Prompt tokens that requests had from host memory.")] = 0
    hit_requests: Annotated[int, Counted("Requests that had prompt tokens from host memory.")] = 0
    hole_tokens: Annotated[
        int, Counted("Prompt tokens computed in holes, before tokens that were loaded.")
    ] = 0
    holes: Annotated[int, Counted("Holes of requests that had prompt tokens from host memory.")] = 0
    behind_hole_tokens: Annotated[
        int, Counted("Prompt tokens from host memory that lie behind a hole.")
    ] = 0
    hole_refusals: Annotated[
        dict[HoleRefusal, int],
        Counted(
            "Requests that stopped at a hole although more was stored behind it, by reason.",
            "reason",
        ),
    ] = field(default_factory=partial(zeros, HoleRefusal))
    too_dear_loads: Annotated[
        int, Counted("Loads not made, because computing was estimated to be faster.")
    ] = 0
    joined_loads: Annotated[
        int, Counted("Requests that waited for another's load of the same, and made none.")
    ] = 0
    shortened_loads: Annotated[
        int,
        Counted(
            "Requests whose load failed in part, and that then loaded up to an earlier boundary."
        ),
    ] = 0
    swapped_requests: Annotated[
        int, Counted("Preempted requests whose KV went to host memory.")
    ] = 0
    state_steps: Annotated[
        int, Counted("Prefill steps that ended so that a state could be stored.")
    ] = 0
    added_steps: Annotated[
        float,
        Counted(
            "Steps that early ends of prefill steps added: for each, its part of the next step."
        ),
    ] = 0.0
    shared_requests: Annotated[
        dict[str, int],
        Counted("Requests that might ask a shared tier.", "result", name="shared_requests"),
    ] = field(default_factory=partial(zeros, _SHARED_RESULTS))
    shared_failures: Annotated[
        dict[str, int],
        Counted("Objects not got or put, by reason.", "reason", name="shared_failures"),
    ] = field(default_factory=partial(zeros, _SHARED_FAILURES))
    shared_tokens: Annotated[
        int, Counted("Tokens whose rows came from the shared tier.", name="shared_tokens")
    ] = 0
    shared_lookup_seconds: Annotated[
        float, Counted("Time of lookups in it, beside the engine.", name="shared_lookup_seconds")
    ] = 0.0
    tier: Annotated[TierCounters, "host_"] = field(default_factory=TierCounters)
    capacity_bytes: Annotated[
        int,
        Counted(
            "Host memory for entries on each worker, or on each host if shared.", is_gauge=True
        ),
    ] = 0
    capacity_tokens: Annotated[
        int, Counted("Tokens whose rows this host memory holds.", is_gauge=True)
    ] = 0
    sharing_workers: Annotated[
        int, Counted("Workers that keep equal bytes once; 1 if none do.", is_gauge=True)
    ] = 0

    def add_traffic(self, traffic: Mapping[Direction, Traffic]) -> None:
        """Count what workers report to have moved."""
        for direction, moved in traffic.items():
            self.transfer_bytes[direction] += moved.num_bytes
            self.transfer_seconds[direction] += moved.seconds
            self.transfers[direction] += moved.transfers


METRICS = ConnectorCounters.metrics = MetricTable(ConnectorCounters, prefix="host_")
