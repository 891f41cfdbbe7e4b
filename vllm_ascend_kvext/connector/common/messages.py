# SPDX-License-Identifier: Apache-2.0
"""What the scheduler side and the workers of a connector tell each other.

Plain data that can be pickled: with tensor parallelism it crosses processes. Everything is decided
by the scheduler side, so that all workers do the same.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm_ascend_kvext.blending.question_selection import Scores
from vllm_ascend_kvext.blending.token_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.row_map import StoredChunk
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk, TablePart
from vllm_ascend_kvext.token_range import TokenRange

if TYPE_CHECKING:
    from vllm_ascend_kvext.shared_tier.backend import SharedObject, UsedObjects

Direction = Literal["store", "load", "get", "put"]
"""Pages to host memory and back; and from the shared tier to host memory, and back."""


@dataclass(frozen=True, slots=True)
class WorkerLayout:
    """What a worker tells the scheduler side once, when its caches are registered.

    Attributes:
        layout: Its pages; addresses in it are of no meaning to others.
        host_bytes: Size of its arena.
        segments: None if segments cannot be stored and placed; ``segment_refusal`` says why, where
            they were asked for.
        probe_refusal: Why it cannot compare a question with segments; empty if it can.
        device: What decides the order of bytes in pages that only kernels understand.
        weights: What the weights of its models are known by; for a shared tier, as are the
            device and ``weights_refusal``, which says why they cannot be known.
    """

    layout: KVLayout
    host_bytes: int
    segments: SegmentLayout | None = None
    segment_refusal: str = ""
    probe_refusal: str = ""
    device: str = ""
    weights: tuple[str, ...] = ()
    weights_refusal: str = ""


@dataclass(frozen=True, slots=True)
class StoreJob:
    """Pages of one request to host memory, in one call.

    Attributes:
        number: Unique in the engine.
        block_ids: Parts of the request's block table, one per KV cache group, as far as ``chunks``
            need them.
        segments: Tokens of segments to store, from the same pages.
    """

    number: int
    chunks: tuple[PlacedChunk, ...]
    block_ids: tuple[TablePart, ...]
    segments: tuple[SegmentRows, ...] = ()


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
        segments: Tokens of segments that go into the same pages; what they cover is in ``holes``.
    """

    request_id: str
    tokens: TokenRange
    stored: tuple[StoredChunk, ...]
    block_ids: tuple[TablePart, ...]
    holes: tuple[TokenRange, ...] = ()
    hole_tails: tuple[HoleTails, ...] = ()
    may_lack: bool = False
    segments: tuple[SegmentRows, ...] = ()

    @property
    def places(self) -> set[int]:
        """Where in host memory what it reads begins."""
        return {
            *(stored.host_offset_bytes for stored in self.stored),
            *(tails.stored.host_offset_bytes for tails in self.hole_tails),
            *(rows.offset_bytes for rows in self.segments),
        }


@dataclass(frozen=True, slots=True)
class ProbeJob:
    """A row of the step, the queries of whose last tokens are compared with keys in pages.

    Attributes:
        row_id: Unique in the engine.
        tokens: These last ones.
        scored: Tokens whose scores are wanted, before those of the row; ascending and disjoint.
        block_ids: The row's block table, from its first page on, by KV cache group.
    """

    row_id: str
    tokens: TokenRange
    scored: tuple[TokenRange, ...]
    block_ids: tuple[TablePart, ...]


@dataclass(frozen=True, slots=True)
class ConnectorMetadata:
    """What the workers do in one step.

    Attributes:
        stores_before: Run to their end before the step overwrites the pages: of preempted requests.
        loads: Begin with the step.
        stores: Begin when the step has computed: what they read is written by it, or was before.
        has_forward: Whether the step computes anything.
        wants_stats: Whether workers are to send statistics, even empty ones.
        probes: Rows that the step computes, and whose scores are wanted.
        gets: Objects of the shared tier, which every worker brings into host memory.
        puts: Those which every worker puts there. Numbers are those of stores.
        touches: Objects there that were used. Numbers are those of stores.
    """

    stores_before: tuple[StoreJob, ...] = ()
    loads: tuple[LoadJob, ...] = ()
    stores: tuple[StoreJob, ...] = ()
    has_forward: bool = False
    wants_stats: bool = False
    probes: tuple[ProbeJob, ...] = ()
    gets: tuple[SharedObject, ...] = ()
    puts: tuple[SharedObject, ...] = ()
    touches: tuple[UsedObjects, ...] = ()


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
        stores_ended: By number: on how many workers a store, get, put or touch has ended, well or
            not.
        failed_stores: Numbers of those of them that failed on some worker.
        failed_loads: Requests whose load failed on some worker. All loads that have ended are
            reported to vLLM.
        unreadable: By request whose load failed, or left something out, on some worker: where in
            host memory that begins which could not be read.
        has_forward: Whether the step computed anything.
        key_checks: Stores of segments, summed over workers, whose keys were found to turn with
            their positions alone; see ``blending.key_check``.
        key_check_failure: The first that were not; empty if there are none.
        scores: Of the probes of the step, by row: of all tokens that are scored, one after the
            other, summed over workers. None if some worker has none.
        got_bytes: What has come from the shared tier, summed over workers.
        shared_failures: Gets and puts that failed on some worker, by kind.
        has_new_weights: Whether some worker has loaded weights again since it has told of them;
            for a shared tier.
        absent_objects: By number of a touch: which of its objects some worker has not found.
    """

    stores_ended: dict[int, int] = field(default_factory=dict)
    failed_stores: set[int] = field(default_factory=set)
    failed_loads: set[str] = field(default_factory=set)
    unreadable: dict[str, set[int]] = field(default_factory=dict)
    traffic: dict[Direction, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    has_forward: bool = False
    key_checks: int = 0
    key_check_failure: str = ""
    scores: dict[str, Scores | None] = field(default_factory=dict)
    got_bytes: int = 0
    shared_failures: Counter[str] = field(default_factory=Counter)
    has_new_weights: bool = False
    absent_objects: dict[int, set[int]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        """Whether there is anything to report."""
        return bool(
            self.has_forward
            or self.stores_ended
            or self.failed_loads
            or self.unreadable
            or self.scores
            or self.got_bytes
            or self.has_new_weights
            or self.traffic["load"].transfers
        )

    def add(self, other: WorkerOutput) -> None:
        """Join the report of another worker."""
        for number, count in other.stores_ended.items():
            self.stores_ended[number] = self.stores_ended.get(number, 0) + count
        self.failed_stores |= other.failed_stores
        self.failed_loads |= other.failed_loads
        for request_id, places in other.unreadable.items():
            self.unreadable.setdefault(request_id, set()).update(places)
        for direction, traffic in other.traffic.items():
            self.traffic[direction].add(traffic)
        self.key_checks += other.key_checks
        self.key_check_failure = self.key_check_failure or other.key_check_failure
        # Every worker reports every probe of the step.
        for row_id, scores in other.scores.items():
            own = self.scores.get(row_id)
            self.scores[row_id] = None if own is None or scores is None else own + scores
        self.got_bytes += other.got_bytes
        self.shared_failures += other.shared_failures
        self.has_new_weights |= other.has_new_weights
        for number, absent in other.absent_objects.items():
            self.absent_objects.setdefault(number, set()).update(absent)
