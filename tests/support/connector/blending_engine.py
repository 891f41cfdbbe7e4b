# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A simulated engine that learns from reports which rows its blended requests have reused.

When a request gets blocks for placed rows, its stream is updated from the request's own tokens, and
not from stored rows. If the request begins again, or its load fails, all of its rows are exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from vllm.v1.request import Request

from support.connector.blended_stream import BlendedStream, Moved
from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.options import EngineOptions
from support.scheduler.token_stream import TokenStream
from support.scheduler.workload import RequestPlan
from vllm_ascend_kvext.connector.common.messages import ConnectorMetadata, LoadJob
from vllm_ascend_kvext.segments.scheduler.segments_side import SegmentsSide, segments_of
from vllm_ascend_kvext.segments.token_rows import SegmentRows


class Reused(NamedTuple):
    """The rows of segments that a request has loaded behind its ``exact_tokens``, ascending."""

    exact_tokens: int
    placed: tuple[SegmentRows, ...]

    @property
    def num_tokens(self) -> int:
        return sum(rows.num_tokens for rows in self.placed)


class BlendingEngine(SimulatedEngine):
    """A `SimulatedEngine` that blends.

    Attributes:
        reused: By request: the request's reused rows, as long as it has some.
        own_plans: The requests of the engine itself. They learn ``own_segments``.
    """

    def __init__(
        self,
        layout: PagedLayout,
        options: EngineOptions,
        script: TransferScript,
        num_contents: Sequence[int] | None = None,
    ) -> None:
        super().__init__(layout, options, script, num_contents)
        assert options.offloading is not None
        self.reused: dict[str, Reused] = {}
        self.num_loaded_tokens = 0
        self.own_plans: list[RequestPlan] = []
        self.own_segments: list[tuple[int, ...]] = []
        self._streams: dict[str, BlendedStream] = {}
        side = self.side
        self._allocated = side.update_state_after_alloc
        self._plan_step = side.build_connector_meta
        self._note_output = side.update_connector_output
        side.update_state_after_alloc = self._learn_admission  # type: ignore[method-assign]
        side.build_connector_meta = self._learn_loads  # type: ignore[method-assign]
        side.update_connector_output = self._learn_results  # type: ignore[method-assign]
        self._queue_request = self.scheduler.add_request
        self.scheduler.add_request = self._expect_own  # type: ignore[method-assign]

    @property
    def segments(self) -> SegmentsSide:
        """The segments of an engine that reuses some."""
        found = segments_of(self.side)
        assert found is not None
        return found

    @property
    def sink_ids(self) -> tuple[int, ...]:
        """The tokens that segments are computed behind. Empty if no segments are reused."""
        segments = segments_of(self.side)
        return () if segments is None else segments.store.contexts.sink_ids

    def choose(self, **options: int) -> None:
        """Use other ``BlendOptions``, including options that users cannot choose."""
        blended = self.segments.blended
        blended.options = replace(blended.options, **options)

    def add_request(self, plan: RequestPlan) -> Request:
        """Add a request. The connector may change its prompt, see ``connector.segment_stores``."""
        request = super().add_request(plan)
        self._expect(request, plan)
        return request

    def _expect(self, request: Request, plan: RequestPlan) -> None:
        stream = BlendedStream(request.prompt_token_ids, plan.seed)
        self._streams[plan.request_id] = stream
        self.runner.expect(plan.request_id, stream)

    def _expect_own(self, request: Request) -> None:
        self._queue_request(request)
        if request.request_id in self.requests:
            return
        assert request.sampling_params is not None
        plan = RequestPlan(
            request_id=request.request_id,
            arrival_step=0,
            prompt=tuple(request.prompt_token_ids or ()),
            max_tokens=request.max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            extra_args=tuple((request.sampling_params.extra_args or {}).items()),
        )
        self.requests[plan.request_id], self.plans[plan.request_id] = request, plan
        self.own_plans.append(plan)
        assert self.segments.learning is not None
        wanted = self.segments.learning.wanted(plan.request_id)
        assert wanted is not None
        prefix = wanted.prefix
        self.own_segments.append(tuple(prefix.token_ids))
        self._expect(request, plan)

    def _learn_admission(self, request: Request, block_ids: Any, num_tokens: int) -> None:
        self._allocated(request, block_ids, num_tokens)
        if not num_tokens and not request.num_computed_tokens:
            self._place(request.request_id, None)  # Otherwise it keeps its loaded rows.

    def _learn_loads(self, *args: Any) -> ConnectorMetadata:
        jobs = self._plan_step(*args)
        for load in jobs.loads:
            self.num_loaded_tokens += loaded_tokens(load)
            exact_tokens = load.tokens.first_tokens if load.holes else load.tokens.end_tokens
            reused = Reused(exact_tokens, load.extras) if load.extras else None
            self._place(load.request_id, reused)
        return jobs

    def _learn_results(self, results: Any, finished_load_ids: Iterable[str]) -> frozenset[str]:
        for request_id in results.failed_loads if results is not None else ():
            self._place(request_id, None)
        return self._note_output(results, finished_load_ids)

    def _place(self, request_id: str, reused: Reused | None) -> None:
        placed: dict[int, Moved] = {}
        self.reused.pop(request_id, None)
        if reused is not None:
            self.reused[request_id] = reused
            seed = self.plans[request_id].seed
            tokens = self.requests[request_id].all_token_ids
            for rows in reused.placed:
                # The segment was computed behind a sink, and its rows are moved from there.
                sink_ids = self._sink_of(request_id, rows)
                start = rows.shift_tokens + len(sink_ids)
                alone = TokenStream([*sink_ids, *tokens[start : rows.end_tokens]], seed)
                for position in range(rows.first_tokens, rows.end_tokens):
                    index = len(sink_ids) + position - start
                    placed[position] = Moved(alone.digests[index], position - index)
        if placed or self._streams[request_id].placed:
            self._streams[request_id].place(placed)

    def _sink_of(self, request_id: str, rows: SegmentRows) -> tuple[int, ...]:
        """The tokens behind which a segment was stored: a context, or only the first tokens."""
        for segment, prefixes in self.segments.blended._states[request_id].known:
            for prefix in prefixes:
                begins = rows.shift_tokens + prefix.sink_tokens == segment.first_tokens
                is_within = segment.first_tokens <= rows.first_tokens
                if begins and is_within and rows.end_tokens <= segment.end_tokens:
                    return prefix.sink.token_ids
        raise AssertionError(f"{request_id}: {rows} are of none of its segments")


def loaded_tokens(load: LoadJob) -> int:
    """The number of tokens of a load, both of the request's own prefix and of segments."""
    left_out = {token for hole in load.holes for token in range(*hole)}
    own_tokens = len(set(range(*load.tokens)) - left_out)
    return own_tokens + sum(rows.num_tokens for rows in load.extras)
