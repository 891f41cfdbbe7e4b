# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scheduler side of segments, as the connector's scheduler side calls it.

``segment_stores`` has the requests whose prompt is a segment to be stored. ``blended_requests`` has
all other requests.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.messages import LoadJob
from vllm_ascend_kvext.connector.common.scheduler_view import Request, SchedulerView
from vllm_ascend_kvext.connector.scheduler.extension import (
    LookupRule,
    SchedulerExtension,
    StepPlan,
)
from vllm_ascend_kvext.counted import Report
from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.messages import SegmentOutput
from vllm_ascend_kvext.segments.scheduler.blended_plan import BlendedPlan
from vllm_ascend_kvext.segments.scheduler.blended_requests import BlendedRequests
from vllm_ascend_kvext.segments.scheduler.key_checks import KeyChecks
from vllm_ascend_kvext.segments.scheduler.segment_learning import SegmentLearning
from vllm_ascend_kvext.segments.scheduler.segment_store import SegmentStore
from vllm_ascend_kvext.segments.scheduler.segment_stores import SegmentStores
from vllm_ascend_kvext.store.entries import WantedPiece
from vllm_ascend_kvext.store.lookup import Hit

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
    from vllm_ascend_kvext.segments.scheduler.questions import Questions


def segments_of(side: ConnectorScheduler | None) -> SegmentsSide | None:
    """The segments of a connector's scheduler side; None if segments are off."""
    extension = None if side is None else side.extension
    return extension if isinstance(extension, SegmentsSide) else None


class SegmentsSide(SchedulerExtension):
    """The segments of one engine.

    Attributes:
        stores: The requests that store a segment.
        blended: The requests that reuse segments.
        learning: Has segments computed that no client has stored; None if nothing is learned.
        checks: Says whether segments may be reused.
    """

    def __init__(
        self,
        view: SchedulerView,
        store: SegmentStore,
        stores: SegmentStores,
        blended: BlendedRequests,
        learning: SegmentLearning | None,
        checks: KeyChecks,
        counters: SegmentCounters,
        num_sharing: int = 1,
    ) -> None:
        self._view = view
        self._num_sharing = num_sharing
        self.store = store
        self.stores = stores
        self.blended = blended
        self.learning = learning
        self.checks = checks
        self.counters = counters

    @property
    def questions(self) -> Questions | None:
        """Compares questions of requests with segments; None if questions are not compared."""
        return self.blended.questions

    @property
    def shares_rows(self) -> bool:
        return self._num_sharing > self.store.num_sections

    def keep_apart(self) -> None:
        self.store.keep_apart(self._num_sharing)

    def add_request(self, request: Request) -> None:
        """Add a new request, before any part of the engine has looked at it.

        The method may change the request.
        """
        if not self.stores.note_new(request):
            self.blended.note_new(request)

    def visible_tokens(self, request_id: str) -> int | None:
        """The length of a request's beginning that all requests may use; None if there is no limit.

        Behind this beginning, KV is approximate, or belongs to a segment behind a sink of its own.
        """
        found = self.blended.visible_tokens(request_id)
        return self.stores.visible_tokens(request_id) if found is None else found

    # The methods that the connector calls.

    def lookup_rule(self, request: Request) -> LookupRule:
        if self.stores.has_to_wait(request):
            return LookupRule.WAIT
        is_segment = self.stores.is_segment(request.request_id)
        return LookupRule.COMPUTE if is_segment else LookupRule.LOOK_UP

    def pieces_to_get(self, request_id: str) -> list[WantedPiece]:
        return self.blended.pieces_to_get(request_id)

    def restart(self, request_id: str) -> None:
        self.blended.restart(request_id)

    def plan(
        self, request: Request, hit: Hit, has_room: Callable[[LoadPlan], bool]
    ) -> LoadPlan | None:
        return self.blended.plan(request, hit, has_room)

    def hold(self, request: Request, plan: LoadPlan) -> bool:
        return self.blended.hold(request, plan)

    def begin(self, request: Request, plan: LoadPlan, block_ids: tuple[list[int], ...]) -> LoadJob:
        assert isinstance(plan, BlendedPlan)
        return self.blended.begin(request, plan, block_ids)

    def is_private(self, request_id: str) -> bool:
        is_blended = self.blended.visible_tokens(request_id) is not None
        return is_blended or self.stores.is_segment(request_id)

    def on_step(
        self, num_scheduled_tokens: Mapping[str, int], preempted_ids: Collection[str]
    ) -> StepPlan:
        for request_id in preempted_ids:
            self.stores.preempted(request_id)
        jobs = []
        for request_id, num_new_tokens in num_scheduled_tokens.items():
            job = self.stores.note_step(self._view.requests[request_id], num_new_tokens)
            if job is not None:
                jobs.append(job)
        return StepPlan(jobs, self.blended.end_step() or None)

    def on_output(self, extras: SegmentOutput) -> None:
        # Checks are noted before stores end, so that segments with wrong keys are never found.
        self.checks.note(extras.key_checks, extras.key_check_failure)
        for row_id, scores in extras.scores.items():
            self.blended.end_probe(row_id, scores)

    def on_request_finished(self, request: Request) -> Mapping[str, int] | None:
        params = self.stores.params(request) or self.blended.params(request)
        self.stores.forget(request.request_id)
        self.blended.forget(request.request_id)
        return params

    def take_report(self) -> Report:
        return self.counters.take()

    def release_pages(self) -> None:
        self.stores.release_all_held()

    def reset(self) -> None:
        self.store.contexts.clear()
        if self.learning is not None:
            self.learning.clear()
