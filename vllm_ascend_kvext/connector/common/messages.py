# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The messages between the scheduler side and the workers of a connector.

Messages are plain data that can be pickled, because with tensor parallelism they cross processes.
The scheduler side decides everything, so that all workers do the same.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.sharing import HostSharing
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

Direction = Literal["store", "load", "get", "put"]
"""The direction in which bytes are copied.

``store`` copies pages to host memory, and ``load`` copies back. ``get`` copies objects of a
secondary tier to host memory, and ``put`` copies back.
"""


class ExtraRows(Protocol):
    """The rows of one host entry that an extension moves, and how to move them; plain data."""

    @property
    def first_tokens(self) -> int:
        """The first token of the request that the rows belong to."""

    @property
    def end_tokens(self) -> int:
        """The token behind these rows."""

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
        """Whether these jobs bring something into host memory."""


class SecondaryOutput(Protocol):
    """What the worker side of a secondary tier reports besides ended jobs; plain data."""

    def add(self, other: Any) -> None:
        """Join the report of another worker."""


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """What a worker tells the scheduler side once, when its caches are registered.

    Attributes:
        layout: The layout of its pages. The addresses in it mean nothing to other processes.
        host_bytes: The size of its host memory, which it may share with the other workers of its
            host.
        sharing: How it shares host memory; None if it has memory of its own.
        no_sharing: Why it has memory of its own, although there are other workers; None if it
            shares memory, or if no two workers have equal bytes.
        extras: What its part of an extension tells; None without an extension.
        secondary: What its part of a secondary tier tells; None without such a tier.
    """

    layout: KVLayout
    host_bytes: int
    extras: Any = None
    secondary: Any = None
    sharing: HostSharing | None = None
    no_sharing: str | None = None


@dataclass(frozen=True, slots=True)
class StoreJob:
    """A copy of one request's pages to host memory, in one call.

    Attributes:
        number: The number of the job, unique in the engine.
        block_ids: Parts of the request's block table, one per KV cache group. A part has the pages
            that ``chunks`` need.
        extras: Rows that an extension stores from the same pages.
        is_compared: Whether the workers report digests of what they share, see
            ``WorkerOutput.digests``.
    """

    number: int
    chunks: tuple[PlacedChunk, ...]
    block_ids: tuple[TablePart, ...]
    extras: tuple[ExtraRows, ...] = ()
    is_compared: bool = False


@dataclass(frozen=True, slots=True)
class HoleTails:
    """The windows and states that a hole's first token reads. The hole's own blocks receive them.

    Attributes:
        boundary_tokens: Where the hole begins.
        stored: The tails at this boundary, and those that they continue.
        block_ids: The hole's blocks for windows and states, by KV cache group. They are not in the
            request's table.
        groups: Indices in the layout of the groups that are loaded.
    """

    boundary_tokens: int
    stored: tuple[StoredChunk, ...]
    block_ids: tuple[TablePart, ...]
    groups: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """A copy from host memory to one request's pages.

    The copy takes one call, and one more for each of ``hole_tails``.

    Attributes:
        request_id: The request. At most one load of it is under way.
        tokens: The range from the first token that is not in the pages to where the request
            resumes.
        block_ids: Parts of the request's block table, one per KV cache group.
        holes: Tokens in the range whose rows are computed, and not loaded.
        hole_tails: What the holes that need windows or states read.
        may_lack: Whether the load succeeds without the parts that cannot be read. If not, one
            unreadable part makes the whole load fail.
        extras: Rows that an extension loads into the same pages. Their tokens are in ``holes``.
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
        """The offsets in host memory, in bytes, of all that the load reads."""
        return {
            *(stored.host_offset_bytes for stored in self.stored),
            *(each.host_offset_bytes for tails in self.hole_tails for each in tails.stored),
            *(rows.offset_bytes for rows in self.extras),
        }


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the workers do in one step.

    Attributes:
        stores_before: Stores of preempted requests, and of states that the step overwrites. They
            end before the step overwrites the pages.
        loads: Loads that begin with the step.
        stores: Stores that begin when the step has computed. They read what this step or an earlier
            step has written.
        has_forward: Whether the step computes anything.
        wants_stats: Whether workers are to send statistics, even empty ones.
        extras: The message to the worker side of an extension; None if there is none.
        secondary: The jobs for the worker side of a secondary tier; None if there are none.
        keeps_apart: Whether workers that share host memory keep their bytes apart in it, also those
            that should be equal. Jobs of earlier steps without it fail if they have not begun.
    """

    stores_before: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    has_forward: bool = False
    wants_stats: bool = False
    extras: Any = None
    secondary: SecondaryJobs | None = None
    keeps_apart: bool = False


EXTRA_ROWS = -1
"""The number that stands for the rows of an extension where groups of the layout have theirs."""


class PlaneDigest(NamedTuple):
    """A digest of the rows that a worker has for one plane.

    Attributes:
        group: The index of the plane's group in the layout; `EXTRA_ROWS` for an extension's.
        plane: The index of the plane in its group.
        content: Which ranks have equal rows: those with the same number.
    """

    group: int
    plane: int
    content: int
    digest: bytes


@dataclass(slots=True)
class Traffic:
    """What workers moved in one direction.

    Attributes:
        seconds: The time of the copies, without the time that they waited.
        transfers: The number of calls.
    """

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
        jobs_ended: For each job number, how many workers have ended the job, well or not. A job is
            a store, or a job of a secondary tier.
        failed_jobs: The numbers of the jobs that failed on some worker.
        failed_loads: Requests whose load failed on some worker. Workers report the ends of all
            loads to vLLM itself.
        unreadable: For each request, the host offsets of the parts that some worker could not read.
            The request's load has failed, or has left these parts out.
        has_forward: Whether the step computed anything.
        digests: For each number of a store that is compared, and each rank, digests of the planes
            that ranks share.
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
    digests: dict[int, dict[int, tuple[PlaneDigest, ...]]] = field(default_factory=dict)
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
        for number, of_ranks in other.digests.items():
            self.digests.setdefault(number, {}).update(of_ranks)
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
