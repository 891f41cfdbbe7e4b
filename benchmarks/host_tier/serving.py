# SPDX-License-Identifier: Apache-2.0
"""Serves a trace on an `Engine`. No model, no clock: the result is exact for the trace.

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
"""With work to do and none done: the pool is too small."""


@dataclass(slots=True)
class Outcome:
    """What serving a trace came to.

    Attributes:
        hit_tokens: On the device and in host memory, of all requests, when they are first computed.
        computed_tokens: Of prompts, in holes too, and again after preemptions.
        computed_pairs: The same, each token with all before it: what attention costs.
        hole_tokens: Those of them that lay in holes.
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
    """One engine and one trace.

    Args:
        shared_unit_tokens: Unit of ``shared_tokens``.
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
        """Serve it all.

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
        while self._engine.has_work:  # the last stores
            self._run_step()
        return self._outcome

    def _arrive(self, number: int) -> None:
        job = Job(number, self._trace.requests[number], self._hash_block_tokens)
        self._jobs[job.request.request_id] = job
        self._outcome.prompt_tokens += job.traced.num_prompt_tokens
        self._engine.add(job.request)

    def _run_step(self) -> bool:
        """Whether it computed anything."""
        scheduled = self._engine.schedule()
        num_tokens_of = dict(scheduled.num_scheduled_tokens)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._jobs:
                self._note_hit(self._jobs[new.req_id], new.num_computed_tokens)
            else:  # A row of a hole: no request of its own, and nothing is sampled.
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
        """Tokens that `_note_hit` takes for hits are computed."""
        self._outcome.hole_tokens += num_tokens
        self._outcome.hit_tokens -= num_tokens
        self._note_computed(first_tokens, first_tokens + num_tokens)

    def _note_computed(self, first_tokens: int, end_tokens: int) -> None:
        if first_tokens < end_tokens:
            self._outcome.computed_tokens += end_tokens - first_tokens
            self._outcome.computed_pairs += (end_tokens**2 - first_tokens**2) // 2

    def _finish(self, job: Job) -> None:
        self._arrivals.note_end(job.number, self._step)
