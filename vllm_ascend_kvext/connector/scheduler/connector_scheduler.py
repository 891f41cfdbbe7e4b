# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scheduler side of the connector: puts loads, stores, holes and counters together.

This side is made when the workers have registered their pages. In a step, vLLM calls::

    get_num_new_matched_tokens    for each request that may be admitted
    update_state_after_alloc      for each request that is admitted
    build_connector_meta          once
    update_connector_output       with the report of the workers
    request_finished              for each request that has ended
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.common.boundary_planner import NEVER
from vllm_ascend_kvext.connector.common.counters import ConnectorCounters
from vllm_ascend_kvext.connector.common.host_layout import HostLayout, common_layout
from vllm_ascend_kvext.connector.common.messages import (
    ConnectorMetadata,
    LoadJob,
    StoreJob,
    WorkerLayout,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.common.scheduler_view import Request, SchedulerView
from vllm_ascend_kvext.connector.scheduler.extension import LookupRule, SchedulerExtension
from vllm_ascend_kvext.connector.scheduler.loads import MAX_FAILED_LOADS, Loads
from vllm_ascend_kvext.connector.scheduler.parts import SchedulerParts
from vllm_ascend_kvext.connector.scheduler.request_report import PARAMETER
from vllm_ascend_kvext.connector.scheduler.request_state import (
    RequestOffloadState,
    RequestOffloadStates,
)
from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
from vllm_ascend_kvext.connector.scheduler.sharing_check import SharingCheck
from vllm_ascend_kvext.connector.scheduler.step_budget import StepBudget
from vllm_ascend_kvext.connector.scheduler.stores import Stores
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.connector.scheduler.worker_jobs import WorkerJobs
from vllm_ascend_kvext.holes.hole_blocks import HoleBlocks
from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow
from vllm_ascend_kvext.layout.model import StatePolicy
from vllm_ascend_kvext.store.tier import HostTier

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.events import TierEvents
    from vllm_ascend_kvext.connector.extension import ConnectorExtension
    from vllm_ascend_kvext.connector.secondary_tier import SecondaryTier
    from vllm_ascend_kvext.counted import Report

logger = logging.getLogger("vllm.ascend_kvext.connector")

_STATS_EVERY_S = 1.0
"""The time between two statistics of the workers. The scheduler side's statistics travel with
them."""

MAX_STEPS_IN_FLIGHT = 64
"""The most steps whose end is awaited. If there are more, some have ended without a report, and
their time is not measured."""


class ConnectorScheduler:
    """The scheduler side of one engine, whose workers have registered their pages.

    Args:
        workers: The layouts of the workers, by rank.
        clock: Seconds that only grow.
        extension: Reuses something else than exact prefixes; None if there is no extension.
        secondary: The tier behind host memory; None if there is none.

    Raises:
        ConnectorError: If workers differ, or options do not fit the engine.
        SettingsError: If the chunk does not suit the layout, or the secondary tier cannot be used.
        TierError: If the host memory is too small, or the tier cannot be made.

    Attributes:
        computes_holes: Whether steps may compute rows that belong to no scheduled request.
        keeps_preempted: Whether preempted requests are stored.
        references: Keeps blocks from being reallocated. Its new ids are the blocks that holes get
            in the step that is being scheduled.
        extension: The scheduler side of the extension. Without an extension, it has all defaults.
        secondary: The scheduler side of the secondary tier. Without such a tier, it has all
            defaults.
        holes: Requests that wait for their holes, or for `end_hole_step`.
        row_ids: The ids of the rows of holes in the latest step. The next step tells the workers
            that these rows have ended.
    """

    def __init__(
        self,
        view: SchedulerView,
        workers: Sequence[WorkerLayout],
        options: ConnectorOptions,
        events: TierEvents,
        clock: Callable[[], float] = time.monotonic,
        extension: ConnectorExtension | None = None,
        secondary: SecondaryTier | None = None,
    ) -> None:
        worker = common_layout(workers)
        layout = HostLayout(
            worker.layout,
            view.hash_block_size,
            partial(options.chunk_tokens_of, max_model_len=view.max_model_len),
            options.state_policy,
            has_steps_for_states=view.has_steps_for_states,
            has_finer_keys=view.hash_tokens is not None,
            sharing=worker.sharing,
        )
        self._view = view = view.with_keys_at(layout.tokens_per_key)
        self._clock = clock
        self.references = BlockReferences(view.block_pool, lambda: self._stores.give_way())
        self._tokens_per_page = layout.tokens_per_page.values()
        refusal = _why_no_holes(view, layout, options.state_policy)
        self.computes_holes = options.hole_reuse and refusal is None
        self.keeps_preempted = True
        if options.hole_reuse and refusal is not None:
            logger.warning("KvextConnector: hole_reuse is off: %s.", refusal)
        self.tier = HostTier(
            worker.host_bytes,
            layout.geometry,
            on_removed=lambda *removed: self._stores.note_removed(*removed),
            on_rows_lost=events.removed if events.are_on else None,
            spare_bytes=options.spare_bytes,
            layout=layout,
        )
        events.begin(layout.tokens_per_row_page)
        self.holes = HoleQueue(
            HoleBlocks(self.references, layout.window_pages, layout.tokens_per_page),
            view.on_extra_work,
            waits_for_load=view.has_draft_layers,
        )
        self.row_ids: set[str] = set()
        self.counters = ConnectorCounters(
            tier=self.tier.counters, capacity_bytes=self.tier.capacity_bytes
        )
        self._jobs = WorkerJobs(self.references, len(workers))
        parts = SchedulerParts(
            view,
            layout,
            self.tier,
            self.references,
            self._jobs,
            self.holes,
            self.computes_holes,
            self.counters,
            clock,
        )
        self._layout = layout
        self._keeps_apart = False
        self._cost = TransferCost(is_ignored=options.load_if_slower)
        self._note_shares()
        self._finds_others = extension is not None or secondary is not None
        self.secondary = SecondaryTierScheduler()
        if secondary is not None:
            self.secondary = secondary.scheduler_side(parts, workers, self._cost, events)
        self.extension = self._make_extension(extension, parts, workers)
        self._check = SharingCheck(
            layout.sharing, len(workers), layout.stored_groups, self.extension.shares_rows
        )
        self._loads = Loads(parts, self.extension, self._cost)
        self._room = self._loads.room
        self._stores = Stores(parts, options.store_policy, events, self.secondary, self._cost)
        self._stores.are_compared = self._check.compares_groups
        self._step_budget = StepBudget()
        self._states = RequestOffloadStates()
        self._step_loads: list[LoadJob] = []
        self._swaps: list[StoreJob] = []
        # For each step that computes something and whose output has not come: the time of its
        # planning, and its tokens.
        self._steps: deque[tuple[float, int]] = deque(maxlen=MAX_STEPS_IN_FLIGHT)
        self._last_output_s = 0.0
        self._next_stats_s = 0.0
        self._hole_tokens = 0  # In the step that is being scheduled.
        self._has_news = False
        self._is_asked = False  # Whether the latest request asked about has not been admitted.
        self._lacked_blocks = False  # Whether vLLM lacked blocks while stores waited.
        min_prompt_tokens = self._stores.planner.min_prompt_tokens
        logger.info(
            "KvextConnector: %s; hits: prompts of %d tokens or more, in multiples of %d; chunks "
            "have %d tokens; store_policy=%s, state_policy=%s.",
            _memory_in_words(
                worker, len(workers), self.tier.num_tokens, layout.geometry.needs_tails
            ),
            min_prompt_tokens,
            layout.unit_tokens,
            layout.geometry.chunk_tokens,
            options.store_policy.value,
            options.state_policy.value,
        )
        if type(self.extension) is SchedulerExtension:
            _warn_if_no_prompt_can_hit(view, min_prompt_tokens)

    def _make_extension(
        self,
        extension: ConnectorExtension | None,
        parts: SchedulerParts,
        workers: Sequence[WorkerLayout],
    ) -> SchedulerExtension:
        if extension is None:
            return SchedulerExtension()
        on_used = self.secondary.on_entry_used
        return extension.scheduler_side(parts, workers, on_used) or SchedulerExtension()

    @property
    def has_work(self) -> bool:
        """Whether steps are needed: to end transfers and rows, and to report the last of them."""
        return self._has_news or self.has_transfers or bool(self.row_ids)

    @property
    def has_transfers(self) -> bool:
        """Whether transfers are planned or under way."""
        return bool(
            self._jobs.num_stores
            or self._stores.queue
            or self._stores.fleeting
            or self._loads.num_under_way
            or self._step_loads
            or self._swaps
            or self.secondary.has_transfers
        )

    # Admission.

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """The number of tokens behind the device's that can be loaded; None to be asked again."""
        rule = self.extension.lookup_rule(request)
        if rule is LookupRule.WAIT:
            return None
        # Before the first comparison, what may be found are rows of an extension that no workers
        # share, and what a tier brings, which was compared where it was computed.
        is_compared = self._finds_others or not self._check.is_first
        may_load = rule is LookupRule.LOOK_UP and is_compared and not self._is_sent(request)
        state = self._states[request.request_id]
        if may_load:
            pieces = partial(self.extension.pieces_to_get, request.request_id)
            if self.secondary.has_to_wait(request, state, num_computed_tokens, pieces):
                return None
        num_tokens = self._loads.match(request, state, num_computed_tokens, may_load)
        self._is_asked = num_tokens is not None
        return num_tokens

    def _is_sent(self, request: Request) -> bool:
        """Whether a prefill node sends the KV of a request, which another connector receives.

        That connector also tells the prefill node to release the KV. vLLM-Ascend's connectors end
        the engine if they are told of such a request, and do not load it. In their first call, they
        set the parameter to False.
        """
        if not self._view.has_other_connectors:
            return False
        params = getattr(request, "kv_transfer_params", None)
        return bool(params and params.get("do_remote_prefill"))

    def update_state_after_alloc(
        self, request: Request, block_ids: tuple[list[int], ...], num_external_tokens: int
    ) -> None:
        """A request has got its blocks, including blocks for tokens that are to be loaded."""
        self._is_asked = False
        state = self._states[request.request_id]
        before = state.report
        job = self._loads.begin(request, state, num_external_tokens, block_ids)
        if state.report is not before:
            self._complete_report(request, state)
        if job is None:
            return
        assert state.under_way is not None
        plan = state.under_way.plan
        self._step_loads.append(job)
        self._step_budget.note_hit(num_external_tokens)
        # The plan's holes are computed. The job's holes are all tokens without loaded prompt rows.
        if plan.holes:
            self.holes.note_new_holes(request.request_id, plan.holes, is_planned=True)
        tails = plan.tails.get(plan.exact_tokens)
        if tails is not None:
            self._stores.note_hit(tails)

    def _complete_report(self, request: Request, state: RequestOffloadState) -> None:
        """Add the tokens that a secondary tier has brought for a request, and log the report."""
        assert state.report is not None
        tier_tokens = self.secondary.got_tokens(state)
        state.report = replace(state.report, tier_tokens=tier_tokens)
        if logger.isEnabledFor(logging.DEBUG):
            logger.debug("Request %s: %s.", request.request_id, state.report)

    def is_looked_up_again(self, request_id: str) -> bool:
        """Whether a request whose load has failed is to load what is left."""
        state = self._states.get(request_id)
        return state is not None and 0 < state.num_failed_loads < MAX_FAILED_LOADS

    def note_session_update(self, request: Request) -> None:
        """A session goes on, and has new tokens and parameters."""
        self._states.renew_options(request)
        if self._view.fine_keys is not None:
            self._view.fine_keys.forget(request)
        state = self._states.get(request.request_id)
        if state is not None and not self._may_store(request):
            self._stores.release_held(state.progress)

    # Steps.

    def pages_to_load(self) -> set[int]:
        """Block ids of the loads that begin in the step that is being scheduled."""
        return {page for job in self._step_loads for part in job.block_ids for page in part.ids}

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int:
        """Where a prefill step from ``computed_tokens`` on has to end, at the latest."""
        if not self._states.options_of(request).may_store:
            return NEVER
        state = self._states[request.request_id]
        return self._stores.next_stop_tokens(request, state, computed_tokens, self._step_budget)

    def note_early_end(self, request_id: str, num_tokens: int) -> None:
        """See `StepBudget.note_early_end`."""
        self._step_budget.note_early_end(request_id, num_tokens)

    def end_hole_step(self) -> list[str]:
        """The latest step has been handed to the workers; see ``HoleQueue.end_step``."""
        return self.holes.end_step()

    def restart_holes(self, request_id: str) -> bool:
        """See ``HoleQueue.restart``."""
        return self.holes.restart(request_id)

    def take_hole_rows(
        self, budget: tuple[int, int, int], other_ids: Collection[str]
    ) -> list[HoleRow]:
        """Rows for the step that is scheduled next; see ``HoleQueue.take_rows``."""
        rows = self.holes.take_rows(*budget, other_ids)
        self._hole_tokens = sum(row.run.num_tokens for row in rows)
        self.counters.hole_tokens += sum(row.run.num_tokens for row in rows if row.is_kept)
        return rows

    def build_connector_meta(
        self, num_scheduled_tokens: Mapping[str, int], preempted_req_ids: Iterable[str]
    ) -> ConnectorMetadata:
        """What the workers do in the step that has just been scheduled.

        Called before the requests' computed tokens are advanced.
        """
        now_s = self._clock()
        num_tokens = sum(num_scheduled_tokens.values()) + self._hole_tokens
        self._hole_tokens = 0  # `take_hole_rows` is not called if no request has holes.
        self.references.new_ids.clear()
        if num_tokens:
            self._steps.append((now_s, num_tokens))
        preempted_ids = list(preempted_req_ids)
        for request_id in preempted_ids:
            state = self._states.get(request_id)
            if state is not None:
                self._stores.release_held(state.progress)
        # vLLM stops admitting at the first request that lacks blocks, or for which the step has no
        # tokens left. While stores wait, `give_way` is called in the first case only. So stores
        # also begin in steps that have no tokens left.
        has_stopped = self._is_asked and (self._lacked_blocks or not self._stores.queue)
        self._stores.queue.lacks_blocks = has_stopped or bool(preempted_ids)
        self._lacked_blocks = False
        self._stores.queue.is_idle = not num_tokens
        self._is_asked = False
        planned = self.extension.on_step(num_scheduled_tokens, preempted_ids)
        fleeting = self._stores.take_fleeting_jobs()
        self.counters.added_steps += self._step_budget.note_step(num_scheduled_tokens)
        self._note_step(num_scheduled_tokens)
        self._leave_blocks_for_next_step(num_scheduled_tokens)
        self._room.end_step()
        self._loads.end_step()
        # Upstream has counted the hits of all requests that it has admitted in this step.
        for new in self.holes.take_new_holes():
            self._view.on_new_holes(new)
        stores_before = (*self._swaps, *fleeting)
        loads = tuple(self._step_loads)
        self._swaps.clear()
        self._step_loads.clear()
        # A step that computes nothing may be the last step for a while.
        wants_stats = not num_tokens or now_s >= self._next_stats_s
        self._has_news = False
        if wants_stats:
            self._next_stats_s = now_s + _STATS_EVERY_S
        of_extension = planned.stores
        if self._check.compares_extras:
            of_extension = [replace(job, is_compared=True) for job in of_extension]
        stores = (*self._stores.take_jobs(), *of_extension)
        return ConnectorMetadata(
            stores_before,
            loads,
            stores,
            bool(num_tokens),
            wants_stats,
            planned.extras,
            self.secondary.on_step(may_wait=not num_tokens),
            self._keeps_apart,
        )

    def _leave_blocks_for_next_step(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Release blocks that are held for stores if the requests of this step may lack blocks."""
        left_tokens = self._view.max_num_batched_tokens
        pages = self._tokens_per_page
        # Each request may begin a page of each group.
        max_blocks = sum(left_tokens // each + len(num_scheduled_tokens) for each in pages)
        if self.references.num_free >= max_blocks:
            return
        num_blocks = 0
        for request_id, num_tokens in num_scheduled_tokens.items():
            request = self._view.requests[request_id]
            last = request.num_computed_tokens + num_tokens - 1
            wanted_tokens = min(left_tokens, max(1, request.num_tokens - last - 1))
            left_tokens -= wanted_tokens
            num_blocks += sum((last + wanted_tokens) // each - last // each for each in pages)
        self._stores.leave_free(num_blocks, [self._states[each] for each in num_scheduled_tokens])

    def _note_step(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """Plan the stores of the requests that the step computes."""
        for request_id, num_new_tokens in num_scheduled_tokens.items():
            if self._room.num_parked:
                self._room.unpark(request_id)
            request = self._view.requests[request_id]
            if self._may_store(request):
                self._stores.note_step(request, self._states[request_id], num_new_tokens)

    def _may_store(self, request: Request) -> bool:
        """Whether KV of a request may be stored under the keys of its tokens."""
        is_private = self.extension.is_private(request.request_id)
        return not is_private and self._states.options_of(request).may_store

    def update_connector_output(
        self, results: WorkerOutput | None, finished_recving: Iterable[str]
    ) -> frozenset[str]:
        """A step has ended.

        Args:
            results: What workers report; None if there is nothing.
            finished_recving: Requests whose load has ended on all workers.

        Returns:
            The requests of ``finished_recving`` whose holes are still to be computed.
        """
        if results is not None:
            self._note_results(results)
        with_holes = set()
        for request_id in finished_recving:
            state = self._states.get(request_id)
            if state is not None:  # A load of another connector has no state.
                holes = self._loads.end(request_id, state)
                self._states.drop_ended(request_id)
                if holes:
                    self.holes.add(request_id, holes)
                    self.holes.note_new_holes(request_id, holes)
            if self.holes.note_load_ended(request_id):
                with_holes.add(request_id)
        return frozenset(with_holes)

    def _note_results(self, results: WorkerOutput) -> None:
        if results.secondary is not None:
            self.secondary.on_output(results.secondary)
        if results.has_forward:
            self._measure_step()
        self._has_news |= bool(results.jobs_ended or results.traffic["load"].transfers)
        self.counters.add_traffic(results.traffic)
        for direction, moved in results.traffic.items():
            self._cost.note_copies(direction, moved.num_bytes, moved.seconds)
        for request_id in results.failed_loads | results.unreadable.keys():
            state = self._states.get(request_id)
            if state is not None and state.under_way is not None:
                state.under_way.has_failed |= request_id in results.failed_loads
                state.under_way.unreadable |= results.unreadable.get(request_id, set())
        if results.extras is not None:
            self.extension.on_output(results.extras)
        for number, num_workers in results.jobs_ended.items():
            self._jobs.end(number, num_workers, number in results.failed_jobs)
        if self._check.is_pending:
            self._check_sharing(results)
        self.secondary.on_jobs_ended()

    def _check_sharing(self, results: WorkerOutput) -> None:
        """Compare what workers share. What is stored now has not been looked up yet."""
        self._check.note(results)
        self._stores.are_compared = self._check.compares_groups
        if self._check.difference is None:
            if not self._check.is_pending:
                logger.info("KvextConnector: what the workers share is equal.")
            return
        logger.warning(
            "KvextConnector: each worker keeps all of its bytes from now on, so host memory holds "
            "fewer tokens. What the configuration says to be equal differs: %s. Does a collective "
            "operation add up in another order on each rank?",
            self._check.difference,
        )
        self._keeps_apart = True
        for state in self._states.values():
            self._loads.cancel_pinned(state)  # Row maps are those of the old places.
        self.abandon_stores()
        self._layout.keep_apart()
        self.extension.keep_apart()
        self.tier.forget_sizes()
        self._forget_stored()
        self.secondary.keep_apart()
        self._note_shares()

    def _note_shares(self) -> None:
        """Take note of what one worker copies of a piece, and of what host memory holds."""
        sharing = self._layout.sharing
        is_shared = sharing is not None and bool(sharing.shared_groups)
        self.counters.sharing_workers = sharing.num_ranks if sharing and is_shared else 1
        self.counters.capacity_tokens = self.tier.num_tokens
        self._cost.shares["store"] = self._layout.share_of_worker(is_store=True)
        self._cost.shares["load"] = self._layout.share_of_worker(is_store=False)

    def request_finished(self, request: Request, is_end_of_turn: bool) -> dict[str, Any] | None:
        """A request has ended; its blocks are about to be freed.

        Returns:
            What its response says in ``kv_transfer_params``.
        """
        request_id = request.request_id
        state = self._states[request_id]
        self._loads.forget(request_id, state)
        # While a load is under way, its pages do not yet hold the tokens that the request counts as
        # computed.
        is_whole = state.under_way is None and self._may_store(request)
        self._stores.finish(request, state, is_end_of_turn and is_whole)
        params: dict[str, Any] = dict(self.extension.on_request_finished(request) or {})
        if self._explains(request) and state.report is not None:
            params[PARAMETER] = state.report.params()
        self._states.end(request_id)
        return params or None

    def _explains(self, request: Request) -> bool:
        """Whether the response of a request says what was reused.

        If two connectors of a MultiConnector answer, the MultiConnector raises an error, which ends
        the engine.
        """
        is_alone = not self._view.has_other_connectors
        return is_alone and self._states.options_of(request).explains

    def give_way(self, to_running: bool) -> bool:
        """Release the blocks of a store for a request that lacks blocks; see `StoreQueue.give_way`.

        Returns:
            Whether blocks have become free, so that the request may be tried again.
        """
        self._lacked_blocks = True
        return self._stores.give_way(to_running)

    def preempt(self, request: Request, at_any_cost: bool = False) -> bool:
        """A running request is about to be preempted; its blocks are still there.

        Args:
            at_any_cost: Whether it is stored although computing its tokens may cost less.

        Returns:
            Whether it can go on from host memory. Otherwise it computes its tokens again.
        """
        if not (self.keeps_preempted and self._may_store(request)):
            return False
        state = self._states[request.request_id]
        is_whole = False
        num_bytes = self._stores.swap_bytes(request, state)
        if at_any_cost or self._cost.pays_out_and_back(num_bytes, request.num_computed_tokens):
            jobs, is_whole = self._stores.swap_out(request, state)
            self._swaps += jobs
            if is_whole:
                self.counters.swapped_requests += 1
        self._stores.release_held(state.progress)
        return is_whole

    # Resets and reports.

    def release_pages(self) -> None:
        """Release pages that no transfer reads yet: the prefix cache is going to be reset."""
        for state in self._states.values():
            self._stores.release_held(state.progress)
        self.extension.release_pages()

    def abandon_stores(self) -> None:
        """Release all pages at once. What is being stored is lost."""
        self.release_pages()
        self._stores.abandon()
        swaps, self._swaps = self._swaps, []
        for job in swaps:  # No worker has been given them, so none will end them.
            self._jobs.end(job.number, self._jobs.num_workers, has_failed=True)
        self._jobs.abandon_stores()

    def reset_cache(self) -> None:
        """Forget what is stored. Transfers under way end by themselves."""
        self._forget_stored()
        self.secondary.reset()

    def _forget_stored(self) -> None:
        self.tier.clear()
        self._stores.reset()
        self.extension.reset()

    def take_report(self) -> Report:
        """What has been counted since the last report, including the extension's counters."""
        report = self.counters.take()
        found = self.extension.take_report()
        return {**report, **found}

    def _measure_step(self) -> None:
        """Measure a step that has ended. Steps end in the order in which they were planned."""
        if not self._steps:
            return
        planned_s, num_tokens = self._steps.popleft()
        now_s = self._clock()
        began_s = max(planned_s, self._last_output_s)
        self._last_output_s = now_s
        self._stores.queue.step_s = now_s - began_s
        self._cost.note_step(num_tokens, now_s - began_s)


def _memory_in_words(
    worker: WorkerLayout, num_workers: int, num_tokens: int, has_tails: bool
) -> str:
    """The host memory of an engine: how much there is, what it holds, and who shares it."""
    gib = worker.host_bytes / (1 << 30)
    # Where requests will resume is not known beforehand, nor what the tails there take.
    less = " less what windows and states take" if has_tails else ""
    holds = f" that holds {num_tokens} tokens{less}" if num_tokens else ""
    if worker.sharing is None:
        why = "" if worker.no_sharing is None else f", not shared ({worker.no_sharing})"
        return f"{gib:.2f} GiB of host memory on each of {num_workers} worker(s){holds}{why}"
    num_ranks = worker.sharing.num_ranks
    copies = [each for group in worker.sharing.num_copies for each in group]
    shared = [each for each in copies if each < num_ranks]
    num_copies = " or ".join(str(each) for each in sorted(set(shared)))
    what = f"{num_copies} {'copy' if num_copies == '1' else 'copies'} for {num_ranks} ranks"
    if len(shared) < len(copies):
        what += f" of {len(shared)} of {len(copies)} planes"
    hosts = f", on each of {num_workers // num_ranks} hosts" if num_ranks < num_workers else ""
    return f"{gib:.2f} GiB of host memory{holds}, shared by {num_ranks} workers ({what}){hosts}"


def _why_no_holes(view: SchedulerView, layout: HostLayout, states: StatePolicy) -> str | None:
    """Why no request of this engine can compute holes; None if some can."""
    if not layout.geometry.needs_rows:
        return "the model has no full attention: what lies before a window need not be computed"
    if any(group.is_snapshot for group in layout.all_groups):
        return "the model has recurrent states, which are not kept where holes begin"
    if states is StatePolicy.SKIP:
        return "holes are exact, and state_policy=skip is not"
    if view.has_draft_layers:
        return _why_no_holes_beside_drafts(view, layout)
    return None


def _why_no_holes_beside_drafts(view: SchedulerView, layout: HostLayout) -> str | None:
    """Why no request of an engine with draft layers can compute holes; None if some can.

    A worker drafts behind the row of a hole as behind any part of a prompt. It so writes keys of
    draft layers, and of no others, behind the hole, where its request has loaded rows. So a later
    draft may be a worse guess, and no token is another one: the model itself computes each token
    that is accepted. All ranks have to write the same: they might feed their own drafts to their
    next steps. So the row waits for the load (see `HoleQueue`).
    """
    if layout.geometry.needs_tails:
        return "drafts are computed behind the end of a hole, where its blocks for windows end"
    if view.num_lookahead_tokens > layout.geometry.unit_tokens:
        return (
            f"{view.num_lookahead_tokens} places for drafts may lie behind what is loaded behind "
            f"a hole, which is {layout.geometry.unit_tokens} tokens at least"
        )
    if view.num_draft_slots:
        return (
            "a drafter that is a model of its own, or drafts in parallel, lengthens each request, "
            "and steps with holes leave no room for that"
        )
    if view.num_prefill_lookahead_tokens > 1:
        return "a drafter of several MTP modules reads tokens behind the end of a hole"
    return None


def _warn_if_no_prompt_can_hit(view: SchedulerView, min_prompt_tokens: int) -> None:
    # With state layers, vLLM leaves prefix caching off by default. A block is then as long as the
    # longest request, and so is the shortest hit.
    if min_prompt_tokens <= view.max_model_len:
        return
    remedy = "Raise --max-model-len, or leave the connector out."
    if not view.enable_caching:
        remedy = "Add --enable-prefix-caching."
    logger.warning(
        "KvextConnector: nothing will be reused. A prompt needs %d tokens to hit, and a request "
        "has at most %d with its answer. %s",
        min_prompt_tokens,
        view.max_model_len,
        remedy,
    )
