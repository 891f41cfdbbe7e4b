# SPDX-License-Identifier: Apache-2.0
"""The scheduler side of the connector: puts loads, stores, costs and counters together.

Life of it::

    SchedulerSide()  the options are right
    bind             the scheduler is there: its block tables, its pool
    set_workers      the workers have registered their pages: from here on it works

In a step, vLLM calls: ``match`` and ``allocated`` for requests that are admitted, ``plan_step``,
then ``note_output`` with what the workers report, and ``finish`` for requests that have ended.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm_ascend_kvext.blending.question_selection import Scores
from vllm_ascend_kvext.blending.segment_store import is_segment
from vllm_ascend_kvext.connector.blending_parts import Blending, BlendingPlace, make_blending
from vllm_ascend_kvext.connector.block_references import BlockReferences
from vllm_ascend_kvext.connector.boundaries import BoundaryPlanner
from vllm_ascend_kvext.connector.counters import ConnectorCounters, Report
from vllm_ascend_kvext.connector.engine import Engine, Request
from vllm_ascend_kvext.connector.errors import ConnectorError
from vllm_ascend_kvext.connector.host_layout import HostLayout, common_layout
from vllm_ascend_kvext.connector.load_cost import LoadCost
from vllm_ascend_kvext.connector.loads import Loads
from vllm_ascend_kvext.connector.messages import (
    JobResults,
    LoadJob,
    ProbeJob,
    StepJobs,
    StoreJob,
    WorkerLayout,
)
from vllm_ascend_kvext.connector.options import ConnectorOptions
from vllm_ascend_kvext.connector.room import PoolRoom
from vllm_ascend_kvext.connector.segment_learning import SegmentLearning, WantedSegment
from vllm_ascend_kvext.connector.segment_tokens import NO_SEGMENT_TOKENS, SegmentTokens
from vllm_ascend_kvext.connector.store_jobs import StoreJobs
from vllm_ascend_kvext.connector.stores import Events, Stores
from vllm_ascend_kvext.holes.eligibility import EngineRefusal
from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow
from vllm_ascend_kvext.holes.window_blocks import WindowBlocks
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange
from vllm_ascend_kvext.layout.transfer_plan import TablePart
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.store_policy import StoreChooser
from vllm_ascend_kvext.store.tier import HostTier

logger = logging.getLogger("vllm.ascend_kvext.connector")

_STATS_EVERY_S = 1.0
"""How often workers are asked for statistics only so that the scheduler side's travel with them."""

MOST_STEPS_IN_FLIGHT = 64
"""Beyond it, some have ended without a word: their time is not measured."""


@dataclass(slots=True)
class _Parts:
    """What exists once the workers are known."""

    tier: HostTier
    layout: HostLayout
    chooser: StoreChooser
    room: PoolRoom
    loads: Loads
    jobs: StoreJobs
    stores: Stores
    blending: Blending | None


@dataclass(slots=True)
class _Step:
    """A step that computes something and whose output has not come."""

    planned_s: float
    num_tokens: int


class NewHoles(NamedTuple):
    """Holes of a request of which the scheduler does not know yet.

    Attributes:
        request_id: Whose they are.
        num_tokens: Of all of them.
        is_planned: Whether the load leaves them out, or has failed to bring them, or brought them
            in vain.
    """

    request_id: str
    num_tokens: int
    is_planned: bool


class SchedulerSide:
    """The scheduler side of one engine.

    Args:
        options: Of the connector.
        has_chosen_chunk: Whether the chunk is the user's choice: the default gives way to the
            layout, a choice is refused.
        events: Of the tier.
        clock: Seconds that only grow.
        segment_tokens: With ``blending``.
    """

    def __init__(
        self,
        options: ConnectorOptions,
        has_chosen_chunk: bool,
        events: Events,
        clock: Callable[[], float] = time.monotonic,
        segment_tokens: SegmentTokens = NO_SEGMENT_TOKENS,
    ) -> None:
        self._options = options
        self._segment_tokens = segment_tokens
        self._has_chosen_chunk = has_chosen_chunk
        self._events = events
        self._clock = clock
        self._engine: Engine | None = None
        self._references: BlockReferences | None = None
        self._parts: _Parts | None = None
        self.counters = ConnectorCounters()
        self._cost = LoadCost()
        self._step_loads: list[LoadJob] = []
        self._swaps: list[StoreJob] = []
        self._failed_loads: set[str] = set()
        self._unreadable: dict[str, set[int]] = {}
        self._steps: deque[_Step] = deque(maxlen=MOST_STEPS_IN_FLIGHT)
        self._last_output_s = 0.0
        self._next_stats_s = 0.0
        self._holes: HoleQueue | None = None
        self._new_holes: list[NewHoles] = []
        self._hole_tokens = 0  # of the step that is being scheduled
        self._probes: list[ProbeJob] = []  # of the same
        self._has_warned = False
        self._has_news = False

    def bind(self, engine: Engine) -> None:
        """The scheduler is there."""
        self._engine = engine
        self._references = BlockReferences(engine.block_pool)

    def set_workers(self, workers: Sequence[WorkerLayout]) -> None:
        """The workers have registered their pages.

        Raises:
            ConnectorError: If `bind` was not called, or workers differ.
            SettingsError: If the chunk does not suit the layout.
            TierError: If the tier cannot be made.
            ArenaError: If the host memory is too small.
        """
        if self._engine is None or self._references is None:
            raise ConnectorError(
                "KvextConnector: expected a scheduler that vllm-ascend-kvext has prepared, found "
                "one that it has not; install the package where the engine runs, do not leave its "
                "plugin out of VLLM_PLUGINS, and see `python -m vllm_ascend_kvext status`"
            )
        worker = common_layout(workers)
        states = self._options.state_policy
        engine = self._engine
        layout = HostLayout(
            worker.layout,
            engine.hash_tokens,
            self._chunk_tokens,
            states,
        )
        tier = HostTier(
            worker.host_bytes,
            layout.geometry,
            on_removed=self._note_removed,
            eviction=self._options.eviction,
        )
        chooser = StoreChooser(self._options.store_policy)
        planner = BoundaryPlanner(layout.groups, layout.unit_tokens, engine.interval_tokens)
        if self._options.hole_reuse:
            refusal = self._why_no_holes(layout)
            if refusal is None:
                self._holes = HoleQueue(self._window_blocks(layout))
            else:
                logger.warning("KvextConnector: hole_reuse is off: %s.", refusal.text)
        if self._holes is None and self._options.eviction.leaves_holes:
            raise ConnectorError(
                "KvextConnector: expected eviction=latest_use where holes are not computed, found "
                f"{self._options.eviction.value}, which lets the beginnings of prompts go; leave "
                "the key out"
            )
        room = PoolRoom(
            worker.layout.groups,
            engine.num_blocks,
            engine.step_tokens,
            engine.num_running,
            engine.block_pool.get_num_free_blocks,
        )
        jobs = StoreJobs(self._references, len(workers))
        blending = None
        if self._options.blending:
            blending = make_blending(
                BlendingPlace(
                    engine,
                    layout,
                    tier,
                    self._references,
                    jobs,
                    self._holes,
                    self.counters.blending,
                ),
                self._options,
                self._segment_tokens,
                workers,
            )
        loads = Loads(
            engine,
            tier,
            layout,
            room,
            None if self._options.load_if_slower else self._cost,
            self.counters,
            self._clock,
            self._holes,
            blending.requests if blending is not None else None,
        )
        stores = Stores(
            engine,
            tier,
            layout,
            planner,
            chooser,
            self._references,
            self._events,
            jobs,
            can_swap=self._options.swap_on_preemption,
        )
        self.counters.tier = tier.counters
        self.counters.capacity_bytes = tier.capacity_bytes
        self._parts = _Parts(tier, layout, chooser, room, loads, jobs, stores, blending)
        logger.info(
            "KvextConnector: %.2f GiB of host memory on each of %d worker(s); hits: prompts of %d "
            "tokens or more, in multiples of %d; chunks have %d tokens; store_policy=%s, "
            "state_policy=%s.",
            worker.host_bytes / (1 << 30),
            len(workers),
            planner.least_prompt_tokens,
            layout.unit_tokens,
            layout.geometry.chunk_tokens,
            self._options.store_policy.value,
            states.value,
        )
        if blending is None:
            _warn_if_no_prompt_can_hit(engine, planner.least_prompt_tokens)

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: to end transfers, and one to report the last of them."""
        return self._has_news or self.has_transfers

    @property
    def has_transfers(self) -> bool:
        """Whether transfers are planned or under way."""
        parts = self._parts
        return parts is not None and bool(
            parts.jobs
            or parts.stores.num_planned
            or parts.loads.num_under_way
            or self._step_loads
            or self._swaps
        )

    @property
    def num_references(self) -> int:
        """Blocks that are kept from being reallocated."""
        return self._references.num_references if self._references else 0

    @property
    def num_pinned(self) -> int:
        """Requests that pin entries of the tier."""
        return self._parts.loads.num_pinned if self._parts else 0

    # Admission.

    def note_new(self, request: Request) -> None:
        """A request has arrived, and nobody has looked at it yet. It may be changed."""
        blending = self.blending
        if blending is not None and not blending.stores.note_new(request):
            blending.requests.note_new(request)

    @property
    def blending(self) -> Blending | None:
        """Where segments are reused; None if they are not, or the workers are not known."""
        return None if self._parts is None else self._parts.blending

    @property
    def learning(self) -> SegmentLearning | None:
        """Wants segments to be computed; None if nothing does."""
        blending = self.blending
        return None if blending is None else blending.learning

    def take_wanted(self) -> WantedSegment | None:
        """A segment that is to be computed now; None if there is none, or it would have to wait."""
        blending = self.blending
        if blending is None or blending.learning is None:
            return None
        return blending.learning.take(blending.stores.has_room)

    def expect_store(self, request: Request) -> None:
        """A request for what `take_wanted` has returned is queued: others may have to wait for it.

        Not only once it is admitted: until then, the next segment would be taken, too.
        """
        blending = self.blending
        if blending is not None:
            blending.stores.has_to_wait(request)

    def shared_tokens(self, request_id: str) -> int | None:
        """Before which token blocks of a request are for everyone; None if all of them are.

        Behind it, its KV is approximate, or that of a segment behind a sink of its own.
        """
        blending = self.blending
        if blending is None:
            return None
        exact_tokens = blending.requests.exact_tokens(request_id)
        return blending.stores.shared_tokens(request_id) if exact_tokens is None else exact_tokens

    def params(self, request: Request) -> dict[str, int] | None:
        """What the response is to say of a request that ends.

        See ``BlendedRequests.params`` and ``SegmentStores.params``.
        """
        blending = self.blending
        if blending is None:
            return None
        return blending.stores.params(request.request_id) or blending.requests.params(request)

    def match(self, request: Request, local_tokens: int) -> int | None:
        """Tokens past those on the device that can be loaded; None to be asked again later."""
        if self._parts is None:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(
                    "KvextConnector stores and loads nothing: its workers have not told what their "
                    "pages look like. Is another connector of the same MultiConnector before it?"
                )
            return 0
        blending = self._parts.blending
        is_segment = blending is not None and blending.stores.is_segment(request.request_id)
        if blending is not None and blending.stores.has_to_wait(request):
            return None
        return self._parts.loads.match(request, local_tokens, may_load=not is_segment)

    def allocated(
        self, request: Request, block_ids: tuple[list[int], ...], num_tokens: int
    ) -> None:
        """A request has got blocks, those for ``num_tokens`` that are to be loaded among them."""
        if self._parts is None:
            return
        job = self._parts.loads.begin(request.request_id, num_tokens, block_ids)
        if job is None:
            return
        self._step_loads.append(job)
        # Not those of the job, whose holes are what workers find no rows of prompts for.
        hole_tokens = self._parts.loads.hole_tokens_of(request.request_id)
        if hole_tokens:
            self._new_holes.append(NewHoles(request.request_id, hole_tokens, is_planned=True))
        tails = self._parts.loads.tails_of(request.request_id)
        if tails is not None:
            self._parts.stores.note_hit(tails)

    def is_looked_up_again(self, request_id: str) -> bool:
        """Whether a request whose load has failed is to load what is left."""
        return self._parts is not None and self._parts.loads.is_looked_up_again(request_id)

    # Steps.

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Where a prefill step from there is to end; None if that does not matter."""
        if self._parts is None:
            return None
        return self._parts.stores.next_stop_tokens(request, computed_tokens)

    @property
    def fills_holes(self) -> bool:
        """Whether steps may compute rows that are not those of a scheduled request."""
        return self._holes is not None

    @property
    def has_holes(self) -> bool:
        """Whether requests wait for their holes, or for `end_hole_step`."""
        return bool(self._holes)

    @property
    def lacks_hole_rows(self) -> bool:
        """Whether a hole that could be computed does not fit into the step that is scheduled."""
        return self._holes is not None and self.has_holes and self._holes.lacks_room

    def end_hole_step(self) -> list[str]:
        """The latest step has been handed to the workers; see ``HoleQueue.end_step``."""
        if self._holes is None:
            return []
        filled = self._holes.end_step()
        self.counters.blending.lost_probes += self._holes.take_lost_probes()
        return filled

    def restart_holes(self, request_id: str) -> bool:
        """See ``HoleQueue.restart``. What is known of its load does not matter any more."""
        if self._holes is None or not self._holes.restart(request_id):
            return False
        self._new_holes = [new for new in self._new_holes if new.request_id != request_id]
        return True

    def take_hole_rows(
        self,
        most_tokens: int,
        most_rows: int,
        most_row_tokens: int,
        other_ids: Collection[str] = (),
    ) -> list[HoleRow]:
        """Rows for the step that is scheduled next; see ``HoleQueue.take_rows``."""
        rows = []
        if self._holes is not None:
            rows = self._holes.take_rows(most_tokens, most_rows, most_row_tokens, other_ids)
        self._hole_tokens = sum(row.run.num_tokens for row in rows)
        self._probes = [self._probe_job(row) for row in rows if row.is_probe]
        probed_tokens = sum(row.run.num_tokens for row in rows if not row.is_kept)
        self.counters.hole_tokens += self._hole_tokens - probed_tokens
        self.counters.blending.probed_tokens += probed_tokens
        return rows

    def _probe_job(self, row: HoleRow) -> ProbeJob:
        engine, parts = self._engine, self._parts
        assert engine is not None and parts is not None and parts.blending is not None
        request_ids = [
            [block.block_id for block in manager.req_to_blocks.get(row.request_id, ())]
            for manager in engine.managers
        ]
        scored = parts.blending.requests.scored(row.request_id)
        return ProbeJob(
            row.row_id,
            TokenRange(*row.run),
            tuple(TokenRange(*run) for run in scored),
            tuple(TablePart(0, tuple(ids)) for ids in row.tables(request_ids)),
        )

    def take_new_holes(self) -> list[NewHoles]:
        """Of loads that have begun, or left something out, since the last call."""
        new, self._new_holes = self._new_holes, []
        return new

    def plan_step(
        self, num_scheduled_tokens: Mapping[str, int], preempted_ids: Iterable[str]
    ) -> StepJobs:
        """What the workers do in the step that has just been scheduled.

        Called before the requests' computed tokens are advanced.
        """
        now_s = self._clock()
        num_tokens = sum(num_scheduled_tokens.values()) + self._hole_tokens
        self._hole_tokens = 0  # Nobody asks for rows where no request has holes.
        if num_tokens:
            self._steps.append(_Step(now_s, num_tokens))
        if self._parts is None or self._engine is None:
            return StepJobs(has_forward=bool(num_tokens))
        stores = self._parts.stores
        blending = self._parts.blending
        for request_id in preempted_ids:
            stores.preempted(request_id)
            if blending is not None:
                blending.stores.preempted(request_id)
        requests = self._engine.requests
        room = self._parts.room
        segment_jobs: list[StoreJob] = []
        for request_id, num_new_tokens in num_scheduled_tokens.items():
            if room.num_parked:
                room.unpark(request_id)
            request = requests[request_id]
            if blending is not None:
                job = blending.stores.note_step(request, num_new_tokens)
                segment_jobs += [job] if job is not None else []
                if not blending.stores_prompt(request_id):
                    continue
            stores.note_step(request, num_new_tokens)
        room.end_step()
        self._parts.loads.end_step()
        swaps, self._swaps = tuple(self._swaps), []
        loads, self._step_loads = tuple(self._step_loads), []
        # A step that computes nothing may be the last for a while.
        wants_stats = not num_tokens or now_s >= self._next_stats_s
        self._has_news = False
        if wants_stats:
            self._next_stats_s = now_s + _STATS_EVERY_S
        jobs = (*stores.take_jobs(), *segment_jobs)
        probes, self._probes = tuple(self._probes), []
        return StepJobs(swaps, loads, jobs, bool(num_tokens), wants_stats, probes)

    def note_output(
        self, results: JobResults | None, finished_load_ids: Iterable[str]
    ) -> frozenset[str]:
        """A step has ended.

        Args:
            results: What workers report; None if there is nothing.
            finished_load_ids: Requests whose load has ended on all workers.

        Returns:
            Those of them whose holes are still to be computed.
        """
        if results is not None and results.has_forward:
            self._measure_step()
        parts = self._parts
        if parts is None:
            return frozenset()
        if results is not None:
            self._has_news |= bool(results.stores_ended or results.traffic["load"].transfers)
            self.counters.add_traffic(results.traffic)
            self._failed_loads |= results.failed_loads
            for request_id, places in results.unreadable.items():
                self._unreadable.setdefault(request_id, set()).update(places)
            moved = results.traffic["load"]
            self._cost.note_copies(moved.num_bytes, moved.seconds)
            for number, num_workers in results.stores_ended.items():
                parts.jobs.end(number, num_workers, number in results.failed_stores)
            if parts.blending is not None:
                parts.blending.note_key_checks(results.key_checks, results.key_check_failure)
            for row_id, scores in results.scores.items():
                self._end_probe(parts, row_id, scores)
        with_holes = set()
        for request_id in finished_load_ids:
            self._end_load(parts, request_id)
            if self._holes is not None and self._holes.note_load_ended(request_id):
                with_holes.add(request_id)
        return frozenset(with_holes)

    def _end_load(self, parts: _Parts, request_id: str) -> None:
        has_failed = request_id in self._failed_loads
        self._failed_loads.discard(request_id)
        holes = parts.loads.end(request_id, has_failed, self._unreadable.pop(request_id, ()))
        if holes and self._holes is not None:
            self._holes.add(request_id, holes)
            hole_tokens = sum(hole.num_tokens for hole in holes)
            self._new_holes.append(NewHoles(request_id, hole_tokens, is_planned=False))

    def _end_probe(self, parts: _Parts, row_id: str, scores: Scores | None) -> None:
        """A question has been compared with segments; its request may have ended meanwhile."""
        assert self._holes is not None and parts.blending is not None
        request_id = self._holes.probed_request(row_id)
        if request_id is None:
            return
        runs = parts.blending.requests.choose(request_id, scores)
        self._holes.end_probe(request_id, runs)
        if runs:
            num_tokens = sum(run.num_tokens for run in runs)
            self._new_holes.append(NewHoles(request_id, num_tokens, is_planned=False))

    def finish(self, request: Request, is_end_of_turn: bool) -> None:
        """A request has ended; its blocks are about to be freed."""
        parts = self._parts
        if parts is None:
            return
        request_id = request.request_id
        # While a load is under way, its pages do not hold what the request's count says.
        is_loading = parts.loads.is_under_way(request_id)
        parts.loads.forget(request_id)
        blending = parts.blending
        is_prompt = blending is None or blending.stores_prompt(request_id)
        parts.stores.finish(request, is_end_of_turn and is_prompt and not is_loading)
        if blending is not None:
            blending.stores.forget(request_id)
            blending.requests.forget(request_id)

    def preempt(self, request: Request) -> None:
        """A running request is about to be preempted; its blocks are still there."""
        parts = self._parts
        if parts is None or not self._options.swap_on_preemption:
            return
        if self.shared_tokens(request.request_id) is not None:
            return  # It is planned anew.
        num_bytes = parts.stores.swap_bytes(request)
        compute_s = self._cost.compute_s(request.num_computed_tokens)
        # Out and back.
        if compute_s is not None and 2 * self._cost.load_s(num_bytes) > compute_s:
            self.counters.too_dear_loads += 1
        else:
            job, is_whole = parts.stores.swap_out(request)
            self._swaps += [job] if job is not None else []
            self.counters.swapped_requests += is_whole
        parts.stores.preempted(request.request_id)

    def release_pages(self) -> None:
        """Let go of pages that no transfer reads yet: the prefix cache is going to be reset."""
        if self._parts is not None:
            self._parts.stores.release_all_held()
            if self._parts.blending is not None:
                self._parts.blending.stores.release_all_held()

    def abandon_stores(self) -> None:
        """Let go of all pages at once: what is being stored is lost."""
        if self._parts is not None:
            self.release_pages()
            self._parts.stores.abandon()
            self._parts.jobs.abandon()

    def clear(self) -> None:
        """Forget what is stored; transfers under way end by themselves."""
        if self._parts is not None:
            self._parts.tier.clear()
            self._parts.chooser.clear()
            if self.learning is not None:
                self.learning.clear()

    def begin_anew(self) -> None:
        """Forget all that was computed so far, what was counted and measured of it included."""
        self.clear()
        self.counters.forget()
        self._cost.forget()
        self._events.take()

    def take_events(self) -> list[Any]:
        """KV events of the tier since the last call."""
        return self._events.take()

    def take_report(self) -> Report:
        """What has been counted since the last call."""
        return self.counters.take()

    def _why_no_holes(self, layout: HostLayout) -> EngineRefusal | None:
        engine = self._engine
        assert engine is not None
        if not layout.geometry.needs_rows:
            return EngineRefusal.NO_ROWS
        if any(group.is_snapshot for group in layout.all_groups):
            return EngineRefusal.STATES
        if self._options.state_policy is StatePolicy.SKIP:
            return EngineRefusal.SKIPPED_STATES
        if engine.looks_ahead or engine.num_lookahead_tokens:
            return EngineRefusal.DRAFTS
        return None

    def _window_blocks(self, layout: HostLayout) -> WindowBlocks | None:
        """Where holes compute what they have in windows."""
        if not layout.geometry.needs_tails:
            return None
        assert self._references is not None
        return WindowBlocks(self._references, layout.window_pages, layout.tokens_per_page)

    def _chunk_tokens(self, unit_tokens: int) -> int:
        options = self._options
        if self._has_chosen_chunk:
            options.refuse_unsuited_chunk(unit_tokens)
            return options.chunk_tokens
        return -(-options.chunk_tokens // unit_tokens) * unit_tokens

    def _note_removed(self, entry: Entry, removal: Removal) -> None:
        if self._parts is not None and not is_segment(entry):  # No key of it was reported.
            self._parts.stores.note_removed(entry, removal)

    def _measure_step(self) -> None:
        """Steps end in the order in which they were planned."""
        if not self._steps:
            return
        step = self._steps.popleft()
        now_s = self._clock()
        began_s = max(step.planned_s, self._last_output_s)
        self._last_output_s = now_s
        self._cost.note_step(step.num_tokens, now_s - began_s)


def _warn_if_no_prompt_can_hit(engine: Engine, least_prompt_tokens: int) -> None:
    # With state layers vLLM leaves prefix caching off unless it is asked for. Blocks, and so what
    # can be hit, are then as long as the longest request.
    if least_prompt_tokens <= engine.most_request_tokens:
        return
    remedy = "Raise --max-model-len, or leave the connector out."
    if not engine.caches_prefixes:
        remedy = "Add --enable-prefix-caching."
    logger.warning(
        "KvextConnector: nothing will be reused. A prompt needs %d tokens to hit, and a request "
        "has at most %d with its answer. %s",
        least_prompt_tokens,
        engine.most_request_tokens,
        remedy,
    )
