# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: a failed load costs a recomputation, not the server.

A KV connector names the blocks that it failed to load. Upstream looks for these blocks in the only
block table of each request, and fails if a request has several tables (vLLM 0.30 then computes
wrong tokens).

With this repair, the requests that have read such blocks are preempted. The blocks that they have
loaded and computed since leave the prefix cache, and their outputs in flight are dropped. When the
requests are admitted again, the hits of the connector are not used. An exception is a connector
with the attribute ``forgets_failed_loads``, which never offers again what could not be loaded.

A worker may name requests instead of blocks, in the attribute ``failed_recving`` of the
``KVConnectorWorkerMetadata`` that it sends. The worker also reports these requests as received.

The repair changes only schedulers that have a connector and a model that is not all full attention
in one group.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.groups.kinds import is_all_full_attention
from vllm_ascend_kvext.patches.upstream import set_external_hit_tokens, tokens_per_block, uncache
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.prefix_cache.failed_blocks import Holder, reach_of
from vllm_ascend_kvext.upstream_state import PoolState, RequestState

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    BlockTables = Iterable[list[int]]
    """The block ids of a request, one list per group."""

FAILED_RECVING = "failed_recving"
"""The attribute of a connector's worker metadata with the ids of requests whose loads failed."""

FORGETS_FAILED_LOADS = "forgets_failed_loads"
"""The attribute of a connector that says that it never offers a failed load again."""


def recover_from_failed_loads(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Let a new scheduler recover from failed loads, if upstream's code cannot."""
    wrapped(*args, **kwargs)
    if scheduler.connector is not None and not is_all_full_attention(scheduler.kv_cache_config):
        LoadRecovery(scheduler)  # It replaces methods of the scheduler.


def is_recovering(scheduler: Scheduler) -> bool:
    """Whether a scheduler recovers from a failed load by a recomputation."""
    return _replaced.has_any_of(scheduler)


@dataclass(slots=True)
class _Step:
    """A planned step whose output has not been processed.

    Attributes:
        output: The plan of the step.
        hit_tokens: For each request that the step admits, the tokens of its prefix-cache hit.
        stale: The requests of the step that have been preempted for a failed load since.
    """

    output: SchedulerOutput
    hit_tokens: dict[str, int]
    stale: set[str] = field(default_factory=set)


class LoadRecovery:
    """Recovers one scheduler from failed loads.

    Methods of this object replace some methods of the scheduler and of its connector.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._coordinator = scheduler.kv_cache_manager.coordinator
        self._null_id: int = scheduler.kv_cache_manager.block_pool.null_block.block_id
        self._steps: deque[_Step] = deque()
        self._failed_request_ids: frozenset[str] = frozenset()
        self._preempted_ids: set[str] = set()
        connector = scheduler.connector
        # If there are several connectors, all of them must have the attribute.
        self._forgets_failed_loads = all(
            getattr(each, FORGETS_FAILED_LOADS, False)
            for each in getattr(connector, "_connectors", None) or (connector,)
        )
        self._take_schedule_back: Callable[[], None] | None = None
        _replaced.replace(scheduler, self.update_from_output)
        _replaced.replace(scheduler, self._handle_invalid_blocks)
        _replaced.replace(connector, self.get_num_new_matched_tokens)
        _replaced.replace(connector, self.build_connector_meta)

    def schedule(
        self, wrapped: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Plan the one step that reports preemptions for failed loads, and admit no request in it.

        Upstream never admits a request in a step that reports its preemption. If both
        were in one step, connectors could not tell them apart.
        """
        from vllm.v1.core.sched.interface import PauseState

        scheduler = self.scheduler
        pause_state = scheduler._pause_state
        if pause_state == PauseState.UNPAUSED:
            scheduler._pause_state = PauseState.PAUSED_NEW
        try:
            return wrapped(*args, **kwargs)
        finally:
            scheduler._pause_state = pause_state
            if self._take_schedule_back is not None:
                self._take_schedule_back()
                self._take_schedule_back = None

    def build_connector_meta(
        self, wrapped: Callable[..., KVConnectorMetadata], scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        """Remember a planned step until its output is processed, and report what was preempted.

        The connector and the workers are told of preemptions for failed loads.
        """
        admitted = [new.req_id for new in scheduler_output.scheduled_new_reqs]
        admitted += scheduler_output.scheduled_cached_reqs.resumed_req_ids
        requests = self.scheduler.requests
        hit_tokens = {id: RequestState.of(requests[id]).hit_tokens for id in admitted}
        self._steps.append(_Step(scheduler_output, hit_tokens))
        if self._preempted_ids:
            waiting = self._preempted_ids & requests.keys()
            scheduler_output.preempted_req_ids = waiting | (
                scheduler_output.preempted_req_ids or set()
            )
            self._preempted_ids.clear()
        return wrapped(scheduler_output)

    def get_num_new_matched_tokens(
        self,
        wrapped: Callable[..., tuple[int | None, bool]],
        request: Request,
        num_computed_tokens: int,
    ) -> tuple[int | None, bool]:
        """Ask the connector, and use its answer unless it may offer a failed load again.

        The connector is always asked, because it forgets an earlier admission in this call.
        """
        state = RequestState.of(request)
        state.hit_tokens = num_computed_tokens
        num_external_tokens, is_async = wrapped(request, num_computed_tokens)
        may_fail_again = state.has_failed_load and not self._forgets_failed_loads
        if num_external_tokens and may_fail_again:
            return 0, False
        return num_external_tokens, is_async

    def update_from_output(
        self,
        wrapped: Callable[..., dict[int, EngineCoreOutputs]],
        scheduler_output: SchedulerOutput,
        model_runner_output: ModelRunnerOutput,
    ) -> dict[int, EngineCoreOutputs]:
        """Process the output of a step without the tokens of preempted requests."""
        while self._steps and self._steps[0].output is not scheduler_output:
            self._steps.popleft()  # The step was planned, but never executed.
        stale = self._steps[0].stale if self._steps else ()
        connector_output = model_runner_output.kv_connector_output
        self._failed_request_ids = _failed_request_ids(connector_output)
        if self._failed_request_ids or stale:
            if connector_output is None:
                from vllm.v1.outputs import KVConnectorOutput

                connector_output = KVConnectorOutput()
                model_runner_output.kv_connector_output = connector_output
            # If any block is invalid, upstream asks which requests to leave out. The null block
            # belongs to no request.
            connector_output.invalid_block_ids = connector_output.invalid_block_ids | {
                self._null_id
            }
        try:
            return wrapped(scheduler_output, model_runner_output)
        finally:
            if self._steps:
                self._steps.popleft()

    def _handle_invalid_blocks(
        self,
        _wrapped: Callable[..., set[str]],
        invalid_block_ids: set[int],
        num_scheduled_tokens: dict[str, int] | None = None,
    ) -> set[str]:
        """Preempt the requests that have read a failed load, or fail them, as the policy says.

        Returns:
            The requests to leave out of the step's output. With the policy ``fail``, these are the
            requests to end.
        """
        scheduler = self.scheduler
        num_blocks = len(scheduler.kv_cache_manager.block_pool.blocks)
        failed = {id for id in invalid_block_ids if 0 <= id < num_blocks} - {self._null_id}
        if not failed and not self._failed_request_ids:
            return set(self._steps[0].stale if self._steps else ())
        request_ids, block_ids = reach_of(failed, self._holders(), self._failed_request_ids)
        self._evict(block_ids)
        requests = [
            request
            for request in map(scheduler.requests.get, request_ids)
            if request is not None and _can_start_again(request)
        ]
        if requests:
            self._log(requests, failed)
        for request in requests:
            # The blocks that are freed below may stay cached up to this token.
            request.num_computed_tokens = self._valid_tokens(request, block_ids)
        if scheduler.recompute_kv_load_failures:
            self._start_again(requests)
        stale = self._steps[0].stale if self._steps else set()
        return stale | {request.request_id for request in requests}

    def _evict(self, block_ids: Iterable[int]) -> None:
        block_pool = self.scheduler.kv_cache_manager.block_pool
        blocks = [block_pool.blocks[block_id] for block_id in block_ids]
        cached = [block for block in blocks if block.block_hash is not None]
        if cached and PoolState.of(block_pool).on_uncached is not None:
            uncache(block_pool, cached)
        elif cached:
            block_pool.evict_blocks({block.block_id for block in cached})

    def _start_again(self, requests: list[Request]) -> None:
        from vllm.v1.request import RequestStatus

        scheduler = self.scheduler
        ids = {request.request_id for request in requests}
        for step in list(self._steps)[1:]:
            step.stale |= ids & step.output.num_scheduled_tokens.keys()
        running = [r for r in scheduler.running if r.request_id in ids]
        scheduler.running = [r for r in scheduler.running if r.request_id not in ids]
        timestamp = time.monotonic()
        for request in reversed(running):  # Each request goes to the head of the queue.
            scheduler._preempt_request(request, timestamp)
            self._preempted_ids.add(request.request_id)
        if self._preempted_ids and self._take_schedule_back is None:
            self._take_schedule_back = _replaced.replace(scheduler, self.schedule)
        for request in requests:
            RequestState.of(request).has_failed_load = True
            _forget_external_hits(request)
            if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
                # A load still writes into the request's blocks. Upstream frees them when the load
                # ends.
                scheduler.failed_recving_kv_req_ids.add(request.request_id)
            elif request not in running:
                scheduler.kv_cache_manager.free(request)
            request.num_computed_tokens = 0
            _forget_steps_in_flight(request)

    def _holders(self) -> Iterator[Holder]:
        """The blocks that each request holds, or has held since the oldest step in flight."""
        managers = self._coordinator.single_type_managers
        for request_id in set[str]().union(*(manager.req_to_blocks for manager in managers)):
            request = self.scheduler.requests.get(request_id)
            hit_tokens = RequestState.of(request).hit_tokens if request is not None else 0
            yield self._holder(request_id, self._block_tables(request_id), hit_tokens)
        since_planned: dict[str, Holder] = {}
        for step in self._steps:
            output = step.output
            cached = step.output.scheduled_cached_reqs
            tables: list[tuple[str, BlockTables | None]] = [
                *((new.req_id, new.block_ids) for new in output.scheduled_new_reqs),
                *zip(cached.req_ids, cached.new_block_ids, strict=True),
            ]
            for request_id, block_ids in tables:
                if request_id in step.hit_tokens:
                    hit_tokens = step.hit_tokens[request_id]
                    holder = self._holder(request_id, block_ids or (), hit_tokens)
                elif request_id in since_planned and block_ids:
                    added = self._holder(request_id, block_ids, 0)
                    before = since_planned[request_id]
                    holder = Holder(request_id, before.hit, {*before.own, *added.own})
                else:
                    continue
                since_planned[request_id] = holder
                yield holder

    def _block_tables(self, request_id: str) -> list[list[int]]:
        return [
            [block.block_id for block in manager.req_to_blocks.get(request_id, ())]
            for manager in self._coordinator.single_type_managers
        ]

    def _holder(self, request_id: str, block_tables: BlockTables, hit_tokens: int) -> Holder:
        hit: set[int] = set()
        own: set[int] = set()
        for manager, table in zip(
            self._coordinator.single_type_managers, block_tables, strict=False
        ):
            num_hit = hit_tokens // tokens_per_block(self._coordinator, manager)
            hit.update(table[:num_hit])
            own.update(table[num_hit:])
        return Holder(request_id, hit - {self._null_id}, own - {self._null_id})

    def _valid_tokens(self, request: Request, spoiled_ids: set[int]) -> int:
        """The number of tokens of a request before its first spoiled block."""
        valid_tokens = RequestState.of(request).hit_tokens
        for manager, table in zip(
            self._coordinator.single_type_managers,
            self._block_tables(request.request_id),
            strict=True,
        ):
            for index, block_id in enumerate(table):
                if block_id in spoiled_ids:
                    first_token = index * tokens_per_block(self._coordinator, manager)
                    valid_tokens = min(valid_tokens, first_token)
                    break
        return valid_tokens

    def _log(self, requests: list[Request], failed: set[int]) -> None:
        from vllm.logger import init_logger

        logger = init_logger("vllm.ascend_kvext.repairs")
        ids = ", ".join(sorted(request.request_id for request in requests))
        what = f"{len(failed)} block(s)" if failed else "what it had found"
        log = logger.error
        outcome = "fail (kv_load_failure_policy=fail)"
        if self.scheduler.recompute_kv_load_failures:
            without = "what has failed" if self._forgets_failed_loads else "its hits"
            log = logger.warning
            outcome = f"are computed again, without {without}"
        log(
            "The KV connector failed to load %s. %d request(s) %s: %s",
            what,
            len(requests),
            outcome,
            ids,
        )


_replaced = InstanceMethods()


def _failed_request_ids(connector_output: Any) -> frozenset[str]:
    metadata = getattr(connector_output, "kv_connector_worker_meta", None)
    # The metadata of a MultiConnector has the metadata of its connectors in a tuple.
    parts = (metadata, *(getattr(metadata, "metadata", None) or ()))
    return frozenset().union(*(getattr(part, FAILED_RECVING, None) or () for part in parts))


def _can_start_again(request: Request) -> bool:
    from vllm.v1.request import RequestStatus

    # A session that waits for its next input has no output to compute.
    return not request.is_finished() and request.status != RequestStatus.WAITING_FOR_STREAMING_REQ


def _forget_external_hits(request: Request) -> None:
    """Set the external hits of a request to 0.

    Since vLLM 0.30, upstream counts the first hits of a request, even if it did not use them.
    """
    found = request.prefill_stats
    if found is not None:
        set_external_hit_tokens(found, 0)


def _forget_steps_in_flight(request: Request) -> None:
    """Forget the steps in flight of a request, whose outputs are dropped as a whole."""
    request.num_output_placeholders = 0
    # A synchronous engine would add draft tokens after the step. They are dropped, too.
    request.is_prefill_chunk = True
    request.spec_token_ids = []
    request.async_tokens_to_discard = 0  # Before 0.30, a reset of the prefix cache sets it.


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_ASCEND_BALANCE = "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler"
_ASCEND_RECOMPUTE = "vllm_ascend.core.recompute_scheduler:RecomputeScheduler"
_ASCEND_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"

PATCHES = (
    Patch(
        id="KVX-305",
        target=f"{_SCHEDULER}.__init__",
        feature="failed-loads",
        wrapper=recover_from_failed_loads,
        undo=_replaced.take_back,
        why="If a model has several KV cache groups, a load that a KV connector reports as failed "
        "ends the engine with every request in it (vLLM issue 45474). If it has one group with a "
        "sliding window, the request goes on from a token whose window is gone. vLLM 0.30 computes "
        "a running request of several groups again in its own blocks, where its windows have left "
        "gaps. It also leaves in the prefix cache what was computed from the failed load.",
        retire_when="vLLM >= 0.32, where a failed load is reported by request",
        relies_on=(
            f"{_SCHEDULER}.schedule",
            f"{_SCHEDULER}._build_kv_connector_meta",
            f"{_SCHEDULER}.update_from_output",
            f"{_SCHEDULER}._handle_invalid_blocks",
            f"{_SCHEDULER}._preempt_request",
            f"{_SCHEDULER}._update_waiting_for_remote_kv",
            f"{_SCHEDULER}._try_promote_blocked_waiting_request",
            f"{_SCHEDULER}._update_from_kv_xfer_finished",
            f"{_SCHEDULER}.finish_requests",
            f"{_SCHEDULER}.update_draft_token_ids",
            f"{_ASYNC_SCHEDULER}._update_after_schedule",
            f"{_ASYNC_SCHEDULER}._update_request_with_output",
            "vllm.v1.core.block_pool:BlockPool.evict_blocks",
        ),
        ascend=(
            f"{_ASCEND_BALANCE}.__init__",
            f"{_ASCEND_BALANCE}.schedule",
            f"{_ASCEND_RECOMPUTE}.schedule",
            f"{_ASCEND_RECOMPUTE}.update_from_output",
            f"{_ASCEND_RECOMPUTE}._update_waiting_for_remote_kv",
            f"{_ASCEND_LIFETIME}:_patched_update_from_output",
            "vllm_ascend.patch.platform.patch_pp_mtp:_patch_scheduler_update_from_output.<locals>."
            "_patched_update_from_output",
        ),
    ),
)
