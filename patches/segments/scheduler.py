# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: requests have segments, and some store or learn one.

Only methods of a scheduler whose connector reuses segments are replaced. The ``schedule`` of such a
scheduler is replaced only while segments that the engine learns are queued or computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.scheduler import ON_CONNECTED, ConnectedScheduler
from vllm_ascend_kvext.patches.segments.learned_requests import LearnedRequests, cancel_learning
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.segments.scheduler.segments_side import SegmentsSide, segments_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning


def extend_schedulers() -> Callable[[], None]:
    """Extend each new `ConnectedScheduler` by what segments need."""
    ON_CONNECTED.append(_extend)

    def forget() -> None:
        ON_CONNECTED.remove(_extend)
        _replaced.take_back()

    return forget


def _extend(connected: ConnectedScheduler) -> None:
    segments = segments_of(connected.side)
    if segments is None:
        return
    SegmentedScheduler(connected, segments)  # The scheduler keeps its methods, and so the object.
    if segments.learning is not None:
        LearningScheduler(connected, segments, segments.learning)


class SegmentedScheduler:
    """A scheduler whose requests have segments. Methods of this object replace the scheduler's."""

    def __init__(self, connected: ConnectedScheduler, segments: SegmentsSide) -> None:
        self._scheduler = connected.scheduler
        self._segments = segments
        _replaced.replace(connected.scheduler, self.add_request)
        _replaced.replace(connected.scheduler.kv_cache_manager.coordinator, self.cache_blocks)

    def add_request(self, wrapped: Callable[[Request], None], request: Request) -> None:
        """Take note of a request's segments. A segment that is to be stored gets its sink here."""
        # A known id means that the request updates a session.
        if request.request_id not in self._scheduler.requests:
            self._segments.add_request(request)
        wrapped(request)

    def cache_blocks(
        self, wrapped: Callable[[Request, int], None], request: Request, num_computed_tokens: int
    ) -> None:
        """Cache the blocks of a request, but only blocks that other requests may use."""
        visible_tokens = self._segments.visible_tokens(request.request_id)
        if visible_tokens is not None:
            num_computed_tokens = min(num_computed_tokens, visible_tokens)
        wrapped(request, num_computed_tokens)


class LearningScheduler:
    """A scheduler with own requests that learn segments. Methods of this object replace its own.

    `LearnedRequests` is its part around ``schedule``.
    """

    def __init__(
        self, connected: ConnectedScheduler, segments: SegmentsSide, learning: SegmentLearning
    ) -> None:
        self._scheduler = connected.scheduler
        self._learning = learning
        holes = connected.side.holes
        self._learned = LearnedRequests(connected.scheduler, holes, segments, learning)
        connected.steps.add(self._learned)
        _replaced.replace(connected.scheduler, self.update_from_output)
        _replaced.replace(connected.scheduler, self.reset_prefix_cache)

    def update_from_output(
        self, wrapped: Callable[..., Any], scheduler_output: Any, from_model: Any
    ) -> Any:
        """Take the output of a step. No client is told of requests of our own."""
        outputs = wrapped(scheduler_output, from_model)
        self._learned.drop_outputs(outputs)
        return outputs

    def reset_prefix_cache(self, wrapped: Callable[..., bool], *args: Any, **kwargs: Any) -> bool:
        """Reset the prefix cache, which upstream refuses while a request of our own has blocks."""
        cancel_learning(self._scheduler, self._learning)
        return wrapped(*args, **kwargs)


_replaced = InstanceMethods()

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASCEND_PLATFORM = "vllm_ascend.patch.platform"
_ASCEND_BALANCE = f"{_ASCEND_PLATFORM}.patch_balance_schedule:BalanceScheduler"
_ASCEND_LIFETIME = f"{_ASCEND_PLATFORM}.patch_async_swa_kv_lifetime"

PATCHES = (
    Patch(
        id="KVX-417",
        target=f"{_SCHEDULER}.add_request",
        kind=Kind.HOOK,
        feature="connector",
        install=extend_schedulers,
        why="A connector is not told of requests before they are looked up, nor which blocks are "
        "to be cached, and cannot have an engine compute what no client has asked for.",
        retire_when="upstream shows its connectors new requests, lets them keep blocks out of the "
        "prefix cache, and takes requests from them",
        relies_on=(
            f"{_SCHEDULER}.add_request",
            f"{_SCHEDULER}.schedule",
            f"{_SCHEDULER}.update_from_output",
            f"{_SCHEDULER}.finish_requests",
            f"{_SCHEDULER}.get_request_counts",
            f"{_SCHEDULER}.reset_prefix_cache",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.cache_blocks",
            "vllm.v1.request:Request.__init__",
            "vllm.v1.request:Request.update_block_hashes",
        ),
        ascend=(
            f"{_ASCEND_BALANCE}.schedule",
            f"{_ASCEND_BALANCE}.reset_prefix_cache",
            f"{_ASCEND_LIFETIME}:_patched_update_from_output",
            f"{_ASCEND_LIFETIME}:_patched_request_init",
            f"{_ASCEND_PLATFORM}.patch_pp_mtp:_patch_scheduler_update_from_output.<locals>."
            "_patched_update_from_output",
        ),
    ),
)
