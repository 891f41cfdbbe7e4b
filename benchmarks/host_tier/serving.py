# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Serves a trace on an `Engine`. There is no model and no clock, so the result is exact.

Time is counted as in `retention.serving`: a decoding request advances by bursts of tokens.
"""

from __future__ import annotations

from retention.arrivals import Arrivals
from retention.losses import ComputedPrefixes
from retention.serving import Job
from retention.traces import Trace, TracedRequest

from host_tier.engine import Engine
from vllm_ascend_kvext.replay import serving
from vllm_ascend_kvext.replay.serving import BURST_TOKENS, Outcome


class TracedJob(Job):
    """A request of a trace, as a play serves it."""

    __slots__ = ("_prefixes",)

    def __init__(
        self,
        number: int,
        traced: TracedRequest,
        hash_block_tokens: int,
        prefixes: ComputedPrefixes,
    ) -> None:
        super().__init__(number, traced, hash_block_tokens)
        self._prefixes = prefixes

    @property
    def num_prompt_tokens(self) -> int:
        return self.traced.num_prompt_tokens

    def shared_tokens(self) -> int:
        return self._prefixes.longest(self.traced.prompt)

    def note_computed(self, start_tokens: int, end_tokens: int) -> None:
        self._prefixes.extend(self.traced.answered, start_tokens, end_tokens)


class Serving:
    """Serves one trace on one engine.

    Args:
        shared_unit_tokens: The unit of ``shared_tokens``.
        burst_tokens: The tokens by which a decoding request advances in a step.

    Attributes:
        admitted: The numbers of the requests, in the order in which they began to run.
    """

    def __init__(
        self,
        engine: Engine,
        trace: Trace,
        hash_block_tokens: int,
        shared_unit_tokens: int,
        burst_tokens: int = BURST_TOKENS,
    ) -> None:
        self.admitted: list[int] = []
        self._burst_tokens = burst_tokens
        self._trace = trace
        self._hash_block_tokens = hash_block_tokens
        self._prefixes = ComputedPrefixes()
        self._numbers: dict[str, int] = {}
        self._arrivals = Arrivals(trace)
        self._serving = serving.Serving(engine, shared_unit_tokens)

    def run(self) -> Outcome:
        """Serve the whole trace.

        Raises:
            DoesNotFitError: A request does not fit into the pool.
        """
        step = 0
        while self._arrivals or self._serving.has_requests:
            if not self._serving.has_requests:
                step = max(step, self._arrivals.next_step)
            for number in self._arrivals.take(step):
                self._arrive(number)
            served = self._serving.run_step(self._burst_tokens)
            self.admitted += [self._numbers[request_id] for request_id in served.begun]
            for request_id in served.ended:
                self._arrivals.note_end(self._numbers.pop(request_id), step)
            step += 1
        self._serving.settle()  # The last stores end here.
        return self._serving.outcome

    def _arrive(self, number: int) -> None:
        traced = self._trace.requests[number]
        job = TracedJob(number, traced, self._hash_block_tokens, self._prefixes)
        self._numbers[job.request.request_id] = number
        self._serving.add(job)
