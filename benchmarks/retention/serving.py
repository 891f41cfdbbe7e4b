# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Serves a trace on vLLM's real ``KVCacheManager``, the way its V1 scheduler does.

Every step distributes the layout's number of tokens, first to running requests, and then to waiting
requests in order of arrival. At most 16 requests run. Prefills are chunked. Decoding requests
advance by bursts of 16 tokens. Bursts take the same blocks as single tokens, in a sixteenth of the
time. When a request gets no blocks, the last running request is preempted. There is no model and no
clock, so the result is exact for the trace.

The module knows no policy. It measures the retention that is in effect in this process.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field

from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from retention.arrivals import Arrivals
from retention.engine import Engine, RecordingTable
from retention.layouts import BenchLayout
from retention.losses import CachedOnce, ComputedPrefixes, Losses, split_losses
from retention.traces import Trace, TracedRequest
from vllm_ascend_kvext.replay.serving import BURST_TOKENS, DoesNotFitError

MAX_RUNNING = 16
SAMPLE_EVERY_STEPS = 64


@dataclass(slots=True)
class Outcome:
    """The result of serving a trace.

    Attributes:
        computed_tokens: The computed prompt tokens. Tokens that are computed again after a
            preemption count again.
        readmission_tokens: The tokens to restore after preemptions.
        readmission_hit_tokens: The part of ``readmission_tokens`` that was hit.
        num_footprint_blocks: The number of different blocks that were cached at some time.
        cached_blocks: The cached blocks per group, averaged over time.
        scheduler_s: The CPU time in the block manager, without hashing.
    """

    prompt_tokens: int = 0
    hit_tokens: int = 0
    computed_tokens: int = 0
    readmission_tokens: int = 0
    readmission_hit_tokens: int = 0
    num_preemptions: int = 0
    num_evictions: int = 0
    num_footprint_blocks: int = 0
    cached_blocks: list[float] = field(default_factory=list)
    losses: Losses = field(default_factory=Losses)
    zero_hit_requests: int = 0
    num_steps: int = 0
    scheduler_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        return self.hit_tokens / self.prompt_tokens


class Job:
    """A request on its way through the engine."""

    __slots__ = ("_output_tokens", "number", "request", "traced")

    def __init__(self, number: int, traced: TracedRequest, hash_block_tokens: int) -> None:
        hashes = traced.answered.block_hashes(hash_block_tokens)

        def next_hashes(request: Request) -> list[bytes]:
            return hashes[len(request.block_hashes) : request.num_tokens // hash_block_tokens]

        all_tokens = traced.answered.tokens()
        self.number = number
        self.traced = traced
        self._output_tokens = all_tokens[traced.num_prompt_tokens :]
        self.request = Request(
            request_id=f"request-{number}",
            prompt_token_ids=all_tokens[: traced.num_prompt_tokens],
            sampling_params=SamplingParams(max_tokens=traced.num_output_tokens),
            pooling_params=None,
            block_hasher=next_hashes,
        )

    @property
    def is_decoding(self) -> bool:
        """Whether all tokens are computed except the last one, which was just sampled."""
        request = self.request
        return (
            request.num_output_tokens > 0 and request.num_computed_tokens >= request.num_tokens - 1
        )

    @property
    def num_missing_outputs(self) -> int:
        return len(self._output_tokens) - self.request.num_output_tokens

    def next_outputs(self, limit_tokens: int) -> list[int]:
        """The tokens that are sampled next; none before all known tokens are computed.

        The last token is sampled alone, because it is not computed.
        """
        request = self.request
        if request.num_computed_tokens < request.num_tokens:
            return []
        done = request.num_output_tokens
        num_tokens = max(1, min(limit_tokens, self.num_missing_outputs - 1))
        return self._output_tokens[done : done + num_tokens]

    def sample(self, num_tokens: int) -> None:
        done = self.request.num_output_tokens
        self.request.append_output_token_ids(self._output_tokens[done : done + num_tokens])


class Serving:
    """Serves one trace on one engine."""

    def __init__(self, layout: BenchLayout, engine: Engine, trace: Trace) -> None:
        self._layout = layout
        self._engine = engine
        self._trace = trace
        self._prefixes = ComputedPrefixes()
        self.outcome = Outcome()
        self._cached_blocks: Counter[int] = Counter()
        self._num_samples = self.num_arrived = 0
        self._running: list[Job] = []
        self._waiting: deque[Job] = deque()
        self._arrivals = Arrivals(trace)
        self._step = 0

    def run(self) -> Outcome:
        """Serve the whole trace.

        Raises:
            DoesNotFitError: A request does not fit into the pool.
        """
        while self.has_work:
            self.advance()
        outcome = self.outcome
        table = self._engine.table
        if table is not None:
            outcome.cached_blocks = [
                round(self._cached_blocks[group] / max(1, self._num_samples), 1)
                for group in range(len(self._layout.groups))
            ]
            outcome.num_evictions = table.num_dropped
            outcome.num_footprint_blocks = len(table.ever_cached)
        outcome.scheduler_s = self._engine.scheduler_s
        return outcome

    @property
    def has_work(self) -> bool:
        return bool(self._arrivals or self._waiting or self._running)

    def advance(self) -> None:
        """Run the next step.

        Raises:
            DoesNotFitError: A request does not fit into the pool.
        """
        if not self._waiting and not self._running:
            self._step = max(self._step, self._arrivals.next_step)
        for number in self._arrivals.take(self._step):
            self._arrive(number)
        self._run_step()
        self._step += 1
        self.outcome.num_steps += 1
        if self._engine.table is not None and self.outcome.num_steps % SAMPLE_EVERY_STEPS == 0:
            self._num_samples += 1
            self._cached_blocks.update(self._engine.table.num_cached_by_group())

    def _arrive(self, number: int) -> None:
        self.num_arrived += 1
        traced = self._trace.requests[number]
        self._waiting.append(Job(number, traced, self._layout.hash_block_tokens))
        self.outcome.prompt_tokens += traced.num_prompt_tokens

    def _run_step(self) -> None:
        self._engine.start_step()
        scheduled: dict[Job, int] = {}
        num_preemptions = self.outcome.num_preemptions
        budget = self._schedule_running(scheduled)
        if self.outcome.num_preemptions == num_preemptions:
            self._schedule_waiting(scheduled, budget)
            if not scheduled:
                raise DoesNotFitError
        for job, num_tokens in scheduled.items():
            self._advance(job, num_tokens)

    def _schedule_running(self, scheduled: dict[Job, int]) -> int:
        """Distribute tokens to running requests. Returns the number of tokens that are left."""
        budget = self._layout.max_num_batched_tokens
        index = 0
        while index < len(self._running) and budget > 0:
            job = self._running[index]
            num_tokens = self._next_tokens(job, budget)
            if num_tokens:
                if not self._extend(job, num_tokens):
                    break
                self._take(scheduled, job, num_tokens)
                budget -= num_tokens
            index += 1
        return budget

    def _next_tokens(self, job: Job, budget: int) -> int:
        request = job.request
        if job.is_decoding:
            num_tokens = min(BURST_TOKENS, job.num_missing_outputs, budget)
            job.sample(num_tokens)
            return num_tokens
        missing = request.num_tokens - request.num_computed_tokens
        return self._engine.chunk(request, min(budget, missing))

    def _extend(self, job: Job, num_tokens: int) -> bool:
        """Allocate blocks, and preempt the requests that began to run last if there are too few.

        Returns:
            False if ``job`` itself was preempted.

        Raises:
            DoesNotFitError: The job was the only running request.
        """
        while not self._engine.extend(job.request, num_tokens):
            victim = self._running.pop()
            self._preempt(victim)
            if victim is job:
                if not self._running:
                    raise DoesNotFitError
                return False
        return True

    def _schedule_waiting(self, scheduled: dict[Job, int], budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < MAX_RUNNING:
            job = self._waiting[0]
            num_tokens = self._admit(job, budget)
            if num_tokens == 0:
                break
            self._waiting.popleft()
            self._running.append(job)
            self._take(scheduled, job, num_tokens)
            budget -= num_tokens

    def _admit(self, job: Job, budget: int) -> int:
        """Look a request up, and allocate its first chunk. Returns its tokens; 0 without room."""
        request = job.request
        blocks, hit_tokens = self._engine.look_up(request)
        num_tokens = min(budget, request.num_tokens - hit_tokens)
        num_tokens = self._engine.chunk(request, num_tokens, hit_tokens)
        if num_tokens == 0:
            return 0
        # The losses are computed before the allocation, which caches the tokens of this step.
        is_first = not request.num_preemptions
        table = self._engine.table
        losses = (
            self._losses(job, hit_tokens, table) if is_first and table is not None else Losses()
        )
        if not self._engine.admit(request, num_tokens, hit_tokens, blocks):
            return 0
        outcome = self.outcome
        if not is_first:
            outcome.readmission_tokens += request.num_tokens
            outcome.readmission_hit_tokens += hit_tokens
        else:
            outcome.hit_tokens += hit_tokens
            outcome.zero_hit_requests += hit_tokens == 0
            outcome.losses.add(losses)
        request.status = RequestStatus.RUNNING
        request.num_computed_tokens = hit_tokens
        return num_tokens

    def _losses(self, job: Job, hit_tokens: int, table: RecordingTable) -> Losses:
        layout = self._layout
        prompt = job.traced.prompt
        ideal_tokens = min(self._prefixes.longest(prompt), len(prompt) - 1)
        cached_once = CachedOnce(
            layout.needs,
            layout.hash_block_tokens,
            job.request.block_hashes,
            table.ever_cached,
        )
        return split_losses(hit_tokens, ideal_tokens, layout.hit_unit_tokens, cached_once)

    def _take(self, scheduled: dict[Job, int], job: Job, num_tokens: int) -> None:
        """Note the tokens of a request in this step. Its blocks are in the cache already."""
        scheduled[job] = num_tokens
        start = job.request.num_computed_tokens
        self._prefixes.extend(job.traced.answered, start, start + num_tokens)

    def _advance(self, job: Job, num_tokens: int) -> None:
        """Advance a request after the model has run: sample tokens, or finish the request."""
        request = job.request
        start = request.num_computed_tokens
        request.num_computed_tokens = start + num_tokens
        prompt_tokens = min(start + num_tokens, request.num_prompt_tokens) - start
        self.outcome.computed_tokens += max(0, prompt_tokens)
        if request.num_computed_tokens == request.num_tokens and job.num_missing_outputs:
            job.sample(1)
        if job.is_decoding and not job.num_missing_outputs:
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self._running.remove(job)
        job.request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._engine.free(job.request)
        self._arrivals.note_end(job.number, self._step)

    def _preempt(self, job: Job) -> None:
        self._engine.free(job.request)
        job.request.status = RequestStatus.PREEMPTED
        job.request.num_computed_tokens = 0
        job.request.num_preemptions += 1
        self._waiting.appendleft(job)
        self.outcome.num_preemptions += 1
