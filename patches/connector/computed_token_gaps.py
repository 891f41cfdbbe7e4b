# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/sched/scheduler.py``: gaps in what any connector has matched are computed.

vLLM's pull request 32785, which is not merged, adds a method to connectors,
``get_computed_token_gaps(request)``: None, or pairs of a first token and an end, within the tokens
that ``get_num_new_matched_tokens`` has just reported, whose KV the connector does not have. It is
asked between these two calls of upstream's::

    get_num_new_matched_tokens ── get_computed_token_gaps ── update_state_after_alloc

What is loaded between steps is then as a load of KvextConnector. What is loaded within a step has
its gaps computed by rows of the same step: within a layer, all of a step's keys and values are
written before any is read. A request whose gaps cannot be computed is told that nothing was
matched.

Only a scheduler one of whose connectors has that method is changed, in its own methods and those
of these connectors.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from vllm_ascend_kvext.connector.scheduler_side import NewHoles
from vllm_ascend_kvext.groups.specs import is_all_full_attention
from vllm_ascend_kvext.holes.eligibility import why_no_holes
from vllm_ascend_kvext.holes.errors import HoleError
from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.holes.token_gaps import Answer, GapsInSteps, Room, gaps_within
from vllm_ascend_kvext.patches.connector.hole_rows import (
    add_rows,
    budget_of_holes,
    correct_hits,
    go_on_behind_holes,
)
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.ascend_kvext.connector")

_AFTER_THE_LOAD = -1
"""Of no token is it known that the device has all before it."""

METHOD = "get_computed_token_gaps"


def serve_gaps(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Have a new scheduler compute the gaps of its connectors, if one of them may report some."""
    wrapped(*args, **kwargs)
    connectors = connectors_with_gaps(scheduler.connector)
    if connectors:
        _serving.add(GapScheduler(scheduler, connectors))


def stop_serving() -> None:
    """Leave all schedulers and connectors as upstream made them."""
    for serving in _serving:
        serving.take_back()
    _serving.clear()


def connectors_with_gaps(connector: Any) -> list[Any]:
    """Those that may report gaps: the connector of a scheduler, or else some of its parts."""
    if callable(getattr(connector, METHOD, None)):
        return [connector]
    parts = getattr(connector, "_connectors", ())
    return [each for part in parts for each in connectors_with_gaps(part)]


def why_no_gaps(scheduler: Scheduler) -> str | None:
    """Why no request of an engine can have its gaps computed; None if some can."""
    parallel = scheduler.vllm_config.parallel_config
    if not is_all_full_attention(scheduler.kv_cache_config):
        return "the model is not all full attention in one KV cache group"
    if scheduler.num_lookahead_tokens or scheduler.use_eagle:
        return "draft tokens would be computed beyond the end of a gap"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "with context parallelism, no row has been tried"
    if parallel.pipeline_parallel_size > 1:
        return "with pipeline parallelism, no row has been tried"
    return None


class GapScheduler:
    """A scheduler with connectors that may report gaps.

    Args:
        scheduler: Gets methods of this object in place of some of its own.
        connectors: The same.
    """

    def __init__(self, scheduler: Scheduler, connectors: Sequence[Any]) -> None:
        self._scheduler = scheduler
        self._connectors = connectors
        self._in_steps = GapsInSteps()
        self._parked = HoleQueue()
        self._first_gap_tokens: dict[str, int] = {}  # of requests that are parked
        self._found: dict[str, tuple[tuple[Run, ...], bool]] = {}  # and whether loaded by steps
        self._admitted: dict[str, tuple[Run, ...]] = {}  # in the step that is being planned
        self._new_holes: list[NewHoles] = []
        self._row_ids: set[str] = set()  # of the latest step
        self._num_rows = 0
        self._has_rows = False  # perhaps, in the step that is being planned
        self._refusals: set[str] = set()
        self._engine_refusal = why_no_gaps(scheduler)
        if self._engine_refusal is not None:
            logger.warning(
                "%s may report gaps in what it has matched, and in this engine none are computed: "
                "%s. A request with gaps is computed as if nothing had been matched.",
                type(connectors[0]).__name__,
                self._engine_refusal,
            )
        self._schedule = scheduler.schedule
        self._has_finished_requests = scheduler.has_finished_requests
        manager = scheduler.kv_cache_manager
        self._count_common_blocks = manager.get_num_common_prefix_blocks
        self._finish_requests = scheduler.finish_requests
        for method in (self.schedule, self.has_finished_requests, self.finish_requests):
            setattr(scheduler, method.__name__, method)
        manager.get_num_common_prefix_blocks = self.get_num_common_prefix_blocks
        for connector in connectors:
            match = connector.get_num_new_matched_tokens
            connector.get_num_new_matched_tokens = partial(self._match, connector, match)
            allocated = connector.update_state_after_alloc
            connector.update_state_after_alloc = partial(self._allocated, allocated)

    def take_back(self) -> None:
        for name in ("schedule", "has_finished_requests", "finish_requests"):
            vars(self._scheduler).pop(name, None)
        vars(self._scheduler.kv_cache_manager).pop("get_num_common_prefix_blocks", None)
        for connector in self._connectors:
            for name in ("get_num_new_matched_tokens", "update_state_after_alloc"):
                vars(connector).pop(name, None)

    def has_finished_requests(self) -> bool:
        """Whether steps are needed although no request waits for any."""
        return self._has_finished_requests() or bool(self._row_ids)

    def get_num_common_prefix_blocks(self, running_request_id: str) -> list[int]:
        """Upstream compares references with the number of requests, and rows are none."""
        counts = self._count_common_blocks(running_request_id)
        return [0] * len(counts) if self._has_rows else counts

    def schedule(self) -> SchedulerOutput:
        """Schedule a step in which, besides what upstream plans, gaps are computed."""
        scheduler = self._scheduler
        self._note_ends()
        for request_id in self._parked.end_step():
            self._first_gap_tokens.pop(request_id, None)
            go_on_behind_holes(scheduler, request_id)
        rows: list[HoleRow] = []
        in_steps = Room(0, 0)
        if self._parked or self._in_steps:
            most_tokens, most_rows, most_row_tokens = budget_of_holes(scheduler)
            rows = self._parked.take_rows(
                most_tokens, most_rows, most_row_tokens, scheduler.requests
            )
            most_tokens -= sum(row.run.num_tokens for row in rows)
            in_steps = self._in_steps.begin_step(Room(most_tokens, most_rows - len(rows)))
        self._has_rows = bool(rows) or bool(in_steps.num_rows)
        limits = scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs
        scheduler.max_num_scheduled_tokens -= (
            sum(row.run.num_tokens for row in rows) + in_steps.num_tokens
        )
        scheduler.max_num_running_reqs -= len(rows) + in_steps.num_rows
        try:
            output = self._schedule()
        finally:
            scheduler.max_num_scheduled_tokens, scheduler.max_num_running_reqs = limits
        admitted, self._admitted = self._admitted, {}
        rows += [
            self._row(request_id, gap) for request_id, gaps in admitted.items() for gap in gaps
        ]
        output.finished_req_ids.update(self._row_ids)
        self._row_ids = {row.row_id for row in rows}
        add_rows(scheduler, output, rows)
        new_holes, self._new_holes = self._new_holes, []
        for new in new_holes:
            correct_hits(scheduler, new)
        return output

    def finish_requests(self, request_ids: Any, finished_status: Any) -> Any:
        """End requests: upstream takes one that waits for its gaps for one that still receives.

        Args:
            request_ids: One, several, or None for all.
            finished_status: As upstream's.
        """
        if request_ids is None:
            request_ids = list(self._scheduler.requests)
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            self._found.pop(request_id, None)
            self._in_steps.drop(request_id)
            if self._parked.restart(request_id):
                del self._first_gap_tokens[request_id]
                self._scheduler.finished_recving_kv_req_ids.add(request_id)
        return self._finish_requests(ids, finished_status)

    def _row(self, request_id: str, gap: Run) -> HoleRow:
        requests = self._scheduler.requests
        while True:
            self._num_rows += 1
            row_id = f"{request_id}-hole-in-step-{self._num_rows}"
            if row_id not in requests:
                return HoleRow(request_id, row_id, gap, {})

    def _note_ends(self) -> None:
        """Loads that have ended, well or not, and requests that have."""
        scheduler = self._scheduler
        received = scheduler.finished_recving_kv_req_ids
        for request_id, first_tokens in list(self._first_gap_tokens.items()):
            request = scheduler.requests.get(request_id)
            has_ended = request is None or request.is_finished()
            has_failed = (
                request_id in received and request_id in scheduler.failed_recving_kv_req_ids
            )
            if has_ended or has_failed:
                del self._first_gap_tokens[request_id]
                self._parked.drop(request_id)
            if has_ended:
                continue
            if has_failed:
                # Upstream has it go on where the first block is missing.
                request.num_computed_tokens = min(request.num_computed_tokens, first_tokens)
            elif request_id in received and self._parked.note_load_ended(request_id):
                received.discard(request_id)

    def _match(
        self,
        connector: Any,
        match: Callable[[Request, int], tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """What a connector has for a request, if its gaps can be computed.

        Returns:
            As upstream's: the number of tokens, None to be asked again, and whether they are loaded
            between steps.
        """
        request_id = request.request_id
        self._found.pop(request_id, None)
        num_tokens, between_steps = match(request, num_computed_tokens)
        if not num_tokens:
            return num_tokens, between_steps
        end_tokens = num_computed_tokens + num_tokens
        try:
            gaps = gaps_within(
                connector.get_computed_token_gaps(request) or (), num_computed_tokens, end_tokens
            )
        except HoleError as error:
            return self._refuse(request_id, str(error))
        if not gaps:
            self._in_steps.drop(request_id)
            return num_tokens, between_steps
        if self._engine_refusal is not None:
            return self._refuse(request_id, self._engine_refusal)
        refusal = why_no_holes(request)
        if refusal is not None:
            return self._refuse(request_id, refusal.text)
        if not between_steps:
            answer = self._in_steps.ask(
                request_id,
                gaps,
                self._own_tokens(request, end_tokens),
                self._most_room(),
                time.monotonic(),
            )
            if answer is Answer.LATER:
                return None, False
            if answer is Answer.NEVER:
                return self._refuse(request_id, "no step has room for all gaps of the request")
        self._found[request_id] = gaps, between_steps
        return num_tokens, between_steps

    def _refuse(self, request_id: str, reason: str) -> tuple[int, bool]:
        self._in_steps.drop(request_id)
        if reason not in self._refusals:
            self._refusals.add(reason)
            logger.warning(
                "request %s has gaps in what was matched for it, and is computed as if nothing had "
                "been matched, as all others will be for the same reason: %s.",
                request_id,
                reason,
            )
        return 0, False

    def _own_tokens(self, request: Request, end_tokens: int) -> int:
        if self._scheduler.scheduler_config.enable_chunked_prefill:
            return 1
        return int(request.num_tokens) - end_tokens

    def _most_room(self) -> Room:
        scheduler = self._scheduler
        threshold_tokens = scheduler.scheduler_config.long_prefill_token_threshold
        most_tokens = scheduler.scheduler_config.max_num_batched_tokens
        return Room(
            min(threshold_tokens or most_tokens, most_tokens),
            scheduler.scheduler_config.max_num_seqs,
        )

    def _allocated(
        self,
        allocated: Callable[[Request, Any, int], None],
        request: Request,
        blocks: Any,
        num_external_tokens: int,
    ) -> None:
        """A request has got blocks, those for what was matched among them."""
        request_id = request.request_id
        gaps, between_steps = self._found.pop(request_id, ((), False))
        if gaps and num_external_tokens:
            num_tokens = sum(gap.num_tokens for gap in gaps)
            self._new_holes.append(NewHoles(request_id, num_tokens, is_planned=True))
            if between_steps:
                self._parked.begin(request_id, gaps, _AFTER_THE_LOAD)
                self._first_gap_tokens[request_id] = gaps[0].first_tokens
            else:
                self._in_steps.drop(request_id)
                self._admitted[request_id] = gaps
        allocated(request, blocks, num_external_tokens)


_serving: WeakSet[GapScheduler] = WeakSet()

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASCEND_BALANCE = "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler"
_ASCEND_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"

PATCHES = (
    Patch(
        id="KVX-404",
        target=f"{_SCHEDULER}.__init__",
        kind=Kind.WRAP,
        feature="connector",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=serve_gaps,
        undo=stop_serving,
        why="A connector that is written for vLLM's pull request 32785 reports tokens as matched "
        "whose KV it does not have, and expects that they are computed.",
        retire_when="upstream asks connectors for their gaps",
        relies_on=(
            f"{_SCHEDULER}.has_finished_requests",
            f"{_SCHEDULER}.schedule",
            f"{_SCHEDULER}.finish_requests",
            f"{_SCHEDULER}._free_blocks",
            f"{_SCHEDULER}._update_from_kv_xfer_finished",
            f"{_SCHEDULER}.update_from_output",
            f"{_SCHEDULER}._update_waiting_for_remote_kv",
            f"{_SCHEDULER}._try_promote_blocked_waiting_request",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.get_num_common_prefix_blocks",
        ),
        ascend=(
            f"{_ASCEND_BALANCE}.__init__",
            f"{_ASCEND_BALANCE}.schedule",
            f"{_ASCEND_LIFETIME}:_patched_update_after_schedule",
            f"{_ASCEND_LIFETIME}:_patched_update_from_output",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
        ),
    ),
)
