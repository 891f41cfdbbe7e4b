# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: requests of our own, which compute segments to be stored.

To a scheduler, our requests look like requests of a client. They begin only while no request of a
client waits to be admitted. They are aborted as soon as a client's request may have to wait for
them. No client gets the answers of our requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from vllm_ascend_kvext.patches.connector.hole_rows import budget_of_holes
from vllm_ascend_kvext.segments.prompt_segments import STORE_KEY

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.request import Request

    from vllm_ascend_kvext.holes.hole_queue import HoleQueue
    from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning, WantedSegment
    from vllm_ascend_kvext.segments.scheduler.segments_side import SegmentsSide

_LAST_PRIORITY = 1 << 62
"""With scheduling by priority, a request of this priority is admitted last, and preempted first."""


class LearnedRequests:
    """The `StepPart` for the requests by which one scheduler learns segments."""

    def __init__(
        self,
        scheduler: Scheduler,
        holes: HoleQueue,
        segments: SegmentsSide,
        learning: SegmentLearning,
    ) -> None:
        self._scheduler = scheduler
        self._holes = holes
        self._segments = segments
        self._learning = learning
        self._ids: set[str] = set()  # The ids of requests whose answer has not come.
        self._new: list[Request] = []  # The requests that begin in the step being scheduled.

    @property
    def has_work(self) -> bool:
        """Whether segments wait to be computed, or are being computed."""
        return self._learning.has_queue or bool(self._learning.request_ids)

    def schedule(
        self, wrapped: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Schedule a step that computes segments with the tokens that other requests leave."""
        self._begin_step()
        output = wrapped(*args, **kwargs)
        self._end_step(output.num_scheduled_tokens)
        return output

    def _begin_step(self) -> None:
        """Queue the segments that are to be computed in the step that is about to be scheduled.

        Nothing is queued while another request waits.
        """
        scheduler = self._scheduler
        learning = self._learning
        if learning.request_ids:
            # Own requests go behind all others. The first requests get tokens first, and the last
            # one is preempted if blocks are short.
            scheduler.running.sort(key=lambda request: request.request_id in self._ids)
        if not learning.has_queue:
            return
        _, num_waiting = scheduler.get_request_counts()
        if num_waiting > scheduler.num_waiting_for_streaming_input:
            return
        left_tokens, left_rows, _ = budget_of_holes(scheduler)
        while left_tokens > 0 and left_rows > 0:
            wanted = learning.take(self._segments.stores.has_room)
            if wanted is None:
                return
            request = _request_of(wanted)
            left_tokens -= request.num_tokens
            left_rows -= 1
            learning.begin(request.request_id, wanted)
            self._ids.add(request.request_id)
            self._new.append(request)
            scheduler.add_request(request)
            self._segments.stores.has_to_wait(request)

    def _end_step(self, num_scheduled_tokens: Mapping[str, int]) -> None:
        """A step has been scheduled. Abort own requests if others have to wait for them."""
        from vllm.v1.request import RequestStatus

        scheduler = self._scheduler
        learning = self._learning
        new, self._new = self._new, []
        if not learning.request_ids:
            return
        for request in new:
            if request.status == RequestStatus.RUNNING:
                num_tokens = num_scheduled_tokens[request.request_id]
                _forget_query(scheduler, request, request.num_computed_tokens - num_tokens)
        holes_wait = bool(self._holes and self._holes.lacks_room)
        others_wait = holes_wait or _others_wait(scheduler, self._ids)
        for request_id in learning.request_ids:
            request = scheduler.requests[request_id]
            is_computing = request.num_computed_tokens < request.num_prompt_tokens
            if request.status != RequestStatus.RUNNING or (others_wait and is_computing):
                scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def drop_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Take the answers of own requests out of a step's outputs, which are grouped by client."""
        if not self._ids:
            return
        for client, of_client in list(outputs.items()):
            of_others = [each for each in of_client.outputs if each.request_id not in self._ids]
            if len(of_others) == len(of_client.outputs):
                continue
            of_client.outputs = of_others
            if not (of_others or of_client.scheduler_stats or of_client.finished_requests):
                del outputs[client]
        self._ids = {each for each in self._ids if each in self._scheduler.requests}


def cancel_learning(scheduler: Scheduler, learning: SegmentLearning) -> None:
    """Abort all requests of our own."""
    from vllm.v1.request import RequestStatus

    scheduler.finish_requests(learning.request_ids, RequestStatus.FINISHED_ABORTED)


def _request_of(wanted: WantedSegment) -> Request:
    """The request that a client would send, but with the sink in front.

    The sink is always put there, because the segment itself may begin with the same tokens.
    """
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    return Request(
        request_id=f"kvext-learns-{uuid4().hex}",
        prompt_token_ids=[*wanted.prefix.sink.token_ids, *wanted.prefix.token_ids],
        sampling_params=SamplingParams(temperature=0.0, max_tokens=1, extra_args={STORE_KEY: True}),
        pooling_params=None,
        cache_salt=wanted.cache_salt,
        priority=_LAST_PRIORITY,
        block_hasher=wanted.block_hasher,
    )


def _others_wait(scheduler: Scheduler, own_ids: set[str]) -> bool:
    """Whether a request could not be admitted because tokens, blocks or a place are lacking."""
    from vllm.v1.request import RequestStatus

    if scheduler.finished_recving_kv_req_ids:
        return True  # Upstream looks at requests that have loaded only while tokens are left.
    waits = (RequestStatus.WAITING, RequestStatus.PREEMPTED)
    return any(
        request.status in waits and request.request_id not in own_ids
        for request in scheduler.requests.values()
    )


def _forget_query(scheduler: Scheduler, request: Request, cached_tokens: int) -> None:
    """Take an own request out of the statistics of queries to the connector.

    Upstream counts every admitted request as a query for the tokens behind ``cached_tokens``, which
    the device has.
    """
    stats: Any = scheduler.connector_prefix_cache_stats
    if stats is not None:
        stats.requests -= 1
        stats.queries -= request.num_tokens - cached_tokens
