# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side and the workers of a connector tell each other.

Plain data that can be pickled: with tensor parallelism it crosses processes. Everything is decided
by the scheduler side, so that all workers do the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

Direction = Literal["store", "load", "get", "put"]
"""Pages to host memory and back; and from a secondary tier to host memory, and back."""


class ExtraRows(Protocol):
    """Rows of one entry of host memory that an extension moves, and how; plain data."""

    @property
    def first_tokens(self) -> int:
        """The first token of the request that the rows belong to."""

    @property
    def end_tokens(self) -> int:
        """The token behind the last one."""

    @property
    def offset_bytes(self) -> int:
        """Where the entry begins in host memory."""


class ExtraOutput(Protocol):
    """What the worker side of an extension reports of a step; plain data."""

    def add(self, other: Any) -> None:
        """Join the report of another worker."""


class SecondaryJobs(Protocol):
    """What the workers do for a secondary tier in one step; plain data."""

    @property
    def has_gets(self) -> bool:
        """Whether they bring something into host memory."""


class SecondaryOutput(Protocol):
    """What the worker side of a secondary tier reports beside its jobs' ends; plain data."""

    def add(self, other: Any) -> None:
        """Join the report of another worker."""


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """What a worker tells the scheduler side once, when its caches are registered.

    Attributes:
        layout: Its pages; addresses in it are of no meaning to others.
        host_bytes: Size of its arena.
        extras: What its part of an extension has to say; None without one.
        secondary: What its part of a secondary tier has to say; None without one.
    """

    layout: KVLayout
    host_bytes: int
    extras: Any = None
    secondary: Any = None


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Pages of one request to host memory, in one call.

    Attributes:
        number: Unique in the engine.
        block_ids: Parts of the request's block table, one per KV cache group, as far as ``chunks``
            need them.
        extras: Rows that an extension stores from the same pages.
    """

    number: int
    chunks: tuple[PlacedChunk, ...]
    block_ids: tuple[TablePart, ...]
    extras: tuple[ExtraRows, ...] = ()


@dataclass(frozen=True, slots=True)
class HoleTails:
    """What the first token of a hole reads besides rows, into blocks of its own.

    Attributes:
        boundary_tokens: Where the hole begins.
        block_ids: By KV cache group: blocks for windows and states, which are not in the request's
            table.
        groups: Indices in the layout of the groups that are loaded.
    """

    boundary_tokens: int
    stored: StoredChunk
    block_ids: tuple[TablePart, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Host memory to pages of one request, in one call, and one more for each of ``hole_tails``.

    Attributes:
        request_id: At most one load of a request is under way.
        tokens: From the first that is not in the pages to where the request resumes.
        block_ids: Parts of the request's block table, one per KV cache group.
        holes: Tokens in the range whose rows are computed, and not loaded.
        hole_tails: What those holes read that need windows or states.
        may_lack: Whether the load ends well without what cannot be read. If not, it fails then.
        extras: Rows that an extension loads into the same pages; what they cover is in ``holes``.
    """

    request_id: str
    tokens: TokenRange
    stored: tuple[StoredChunk, ...]
    block_ids: tuple[TablePart, ...]
    holes: tuple[TokenRange, ...] = ()
    hole_tails: tuple[HoleTails, ...] = ()
    may_lack: bool = False
    extras: tuple[ExtraRows, ...] = ()

    @property
    def places(self) -> set[int]:
        """Where in host memory what it reads begins."""
        return {
            *(stored.host_offset_bytes for stored in self.stored),
            *(tails.stored.host_offset_bytes for tails in self.hole_tails),
            *(rows.offset_bytes for rows in self.extras),
        }


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the workers do in one step.

    Attributes:
        stores_before: Run to their end before the step overwrites the pages: of preempted requests.
        loads: Begin with the step.
        stores: Begin when the step has computed: what they read is written by it, or was before.
        has_forward: Whether the step computes anything.
        wants_stats: Whether workers are to send statistics, even empty ones.
        extras: For the worker side of an extension; None if there is nothing.
        secondary: For the worker side of a secondary tier; None if there is nothing.
    """

    stores_before: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    has_forward: bool = False
    wants_stats: bool = False
    extras: Any = None
    secondary: SecondaryJobs | None = None


@dataclass(slots=True)
class Traffic:
    """What workers moved in one direction, in how many calls; waiting is not in ``seconds``."""

    num_bytes: int = 0
    seconds: float = 0.0
    transfers: int = 0

    def add(self, other: Traffic) -> None:
        self.num_bytes += other.num_bytes
        self.seconds += other.seconds
        self.transfers += other.transfers


@dataclass(slots=True)
class WorkerOutput:
    """What workers report after a step.

    Attributes:
        jobs_ended: By number: on how many workers a store, or a job of a secondary tier, has
            ended, well or not.
        failed_jobs: The numbers of these jobs that failed on some worker.
        failed_loads: Requests whose load failed on some worker. All loads that have ended are
            reported to vLLM.
        unreadable: By request whose load failed, or left something out, on some worker: where in
            host memory that begins which could not be read.
        has_forward: Whether the step computed anything.
        extras: What the worker sides of an extension report, joined; None if there is nothing.
        secondary: What the worker sides of a secondary tier report, joined; None if there is
            nothing.
    """

    jobs_ended: dict[int, int] = field(default_factory=dict)
    failed_jobs: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    unreadable: dict[str, set[int]] = field(default_factory=dict)
    traffic: dict[Direction, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    has_forward: bool = False
    extras: ExtraOutput | None = None
    secondary: SecondaryOutput | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(
            self.has_forward
            or self.jobs_ended
            or self.failed_loads
            or self.unreadable
            or self.extras is not None
            or self.secondary is not None
            or self.traffic["load"].transfers
        )

    def add(self, other: WorkerOutput) -> None:
        """Join the report of another worker."""
        for number, count in other.jobs_ended.items():
            self.jobs_ended[number] = self.jobs_ended.get(number, 0) + count
        self.failed_jobs |= other.failed_jobs
        self.failed_loads |= other.failed_loads
        for request_id, places in other.unreadable.items():
            self.unreadable.setdefault(request_id, set()).update(places)
        for direction, traffic in other.traffic.items():
            self.traffic[direction].add(traffic)
        if self.extras is None:
            self.extras = other.extras
        elif other.extras is not None:
            self.extras.add(other.extras)
        if self.secondary is None:
            self.secondary = other.secondary
        elif other.secondary is not None:
            self.secondary.add(other.secondary)
