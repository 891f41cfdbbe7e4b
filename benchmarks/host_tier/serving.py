# SPDX-License-Identifier: Apache-2.0
"""Serves a trace on an `Engine`. There is no model and no clock, so the result is exact.

Time is counted as in `retention.serving`: a decoding request advances by bursts of 16 tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from retention.arrivals import Arrivals
from retention.losses import ComputedPrefixes
from retention.serving import BURST_TOKENS, DoesNotFitError, Job
from retention.traces import Trace

from host_tier.engine import Engine

MAX_IDLE_STEPS = 1000
"""After this many steps without progress, the pool is too small."""


@dataclass(slots=True)
class Outcome:
    """The result of serving a trace.

    Attributes:
        hit_tokens: The tokens of all requests that were hit on the device and in host memory, when
            each request was first computed.
        computed_tokens: The computed tokens of prompts, also in holes. Tokens that are computed
            again after a preemption count again.
        computed_pairs: The pairs of a computed token and a token before it: the cost of attention.
        hole_tokens: The part of ``computed_tokens`` in holes.
    """

    num_requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    computed_pairs: int = 0
    hole_tokens: int = 0
    shared_tokens: int = 0
    num_preemptions: int = 0
    num_steps: int = 0
    scheduler_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class Serving:
    """Serves one trace on one engine.

    Args:
        shared_unit_tokens: The unit of ``shared_tokens``.
    """

    def __init__(
        self, engine: Engine, trace: Trace, hash_block_tokens: int, shared_unit_tokens: int
    ) -> None:
        self._engine = engine
        self._trace = trace
        self._hash_block_tokens = hash_block_tokens
        self._unit_tokens = shared_unit_tokens
        self._outcome = Outcome(num_requests=len(trace.requests))
        self._prefixes = ComputedPrefixes()
        self._jobs: dict[str, Job] = {}
        self._arrivals = Arrivals(trace)
        self._step = 0

    def run(self) -> Outcome:
        """Serve the whole trace.

        Raises:
            DoesNotFitError: A request does not fit into the pool.
        """
        idle_steps = 0
        while self._arrivals or self._jobs:
            if not self._jobs:
                self._step = max(self._step, self._arrivals.next_step)
            for number in self._arrivals.take(self._step):
                self._arrive(number)
            idle_steps = 0 if self._run_step() else idle_steps + 1
            if idle_steps > MAX_IDLE_STEPS:
                raise DoesNotFitError
            self._step += 1
            self._outcome.num_steps += 1
        self._outcome.scheduler_s = self._engine.scheduler_s
        while self._engine.has_work:  # The last stores end here.
            self._run_step()
        return self._outcome

    def _arrive(self, number: int) -> None:
        job = Job(number, self._trace.requests[number], self._hash_block_tokens)
        self._jobs[job.request.request_id] = job
        self._outcome.prompt_tokens += job.traced.num_prompt_tokens
        self._engine.add(job.request)

    def _run_step(self) -> bool:
        """Run one step. Returns whether it computed anything."""
        scheduled = self._engine.schedule()
        num_tokens_of = dict(scheduled.num_scheduled_tokens)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._jobs:
                self._note_hit(self._jobs[new.req_id], new.num_computed_tokens)
            else:  # The row of a hole is no request, and samples nothing.
                self._note_hole(new.num_computed_tokens, num_tokens_of.pop(new.req_id))
        for request_id, num_tokens in num_tokens_of.items():
            job = self._jobs[request_id]
            end = job.request.num_computed_tokens
            self._prefixes.extend(job.traced.answered, end - num_tokens, end)
            self._note_computed(end - num_tokens, min(end, job.traced.num_prompt_tokens))
        self._outcome.num_preemptions += len(scheduled.preempted_req_ids or ())
        sampled = {
            request_id: self._jobs[request_id].next_outputs(BURST_TOKENS)
            for request_id in num_tokens_of
        }
        self._engine.finish_step(scheduled, sampled)
        for request_id in sampled:
            if self._jobs[request_id].request.is_finished():
                self._finish(self._jobs.pop(request_id))
        return bool(scheduled.num_scheduled_tokens)

    def _note_hit(self, job: Job, hit_tokens: int) -> None:
        prompt = job.traced.prompt
        shared_tokens = min(self._prefixes.longest(prompt), len(prompt) - 1)
        self._outcome.hit_tokens += hit_tokens
        self._outcome.shared_tokens += shared_tokens - shared_tokens % self._unit_tokens

    def _note_hole(self, first_tokens: int, num_tokens: int) -> None:
        """Count computed tokens of a hole, which `_note_hit` has counted as hits."""
        self._outcome.hole_tokens += num_tokens
        self._outcome.hit_tokens -= num_tokens
        self._note_computed(first_tokens, first_tokens + num_tokens)

    def _note_computed(self, first_tokens: int, end_tokens: int) -> None:
        if first_tokens < end_tokens:
            self._outcome.computed_tokens += end_tokens - first_tokens
            self._outcome.computed_pairs += (end_tokens**2 - first_tokens**2) // 2

    def _finish(self, job: Job) -> None:
        self._arrivals.note_end(job.number, self._step)
