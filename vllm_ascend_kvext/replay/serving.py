# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Serves requests step by step on an `Engine`, and counts what they hit and compute.

There is no model: the answer of each request is known. A decoding request advances by a burst of
tokens in one step. A burst takes the same blocks as single tokens, in a fraction of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from vllm.v1.request import Request

from vllm_ascend_kvext.replay.engine import Engine

BURST_TOKENS = 16
"""The largest number of tokens by which a decoding request advances in one step."""

MAX_IDLE_STEPS = 1000
"""After this many steps without progress, the pool is too small."""


class DoesNotFitError(Exception):
    """Requests need more blocks than the pool has."""


class ServedRequest(Protocol):
    """A request whose answer is known."""

    @property
    def request(self) -> Request:
        """The request as vLLM's scheduler has it."""

    @property
    def num_prompt_tokens(self) -> int: ...

    def next_outputs(self, limit_tokens: int) -> list[int]:
        """The tokens that are sampled next; none before all known tokens are computed."""

    def shared_tokens(self) -> int:
        """The tokens of the prompt that an endless cache would have."""

    def note_computed(self, start_tokens: int, end_tokens: int) -> None:
        """Note which of its tokens a step computes."""


@dataclass(slots=True)
class Outcome:
    """The result of serving requests.

    Attributes:
        hit_tokens: The tokens of all requests that were hit on the device and in host memory, when
            each request was first computed.
        computed_tokens: The computed tokens of prompts, also in holes. Tokens that are computed
            again after a preemption count again.
        computed_pairs: The pairs of a computed token and a token before it: the cost of attention.
        hole_tokens: The part of ``computed_tokens`` in holes.
        shared_tokens: The tokens of all requests that an endless cache would have hit.
        scheduler_s: The CPU time of the scheduler.
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


@dataclass(slots=True)
class ServedStep:
    """What one step has done.

    Attributes:
        prompt_tokens: The computed tokens of prompts.
        decoded_tokens: The largest number of tokens of one answer that the step computed. A model
            takes as many steps for them.
        begun: Requests that were computed for the first time.
        ended: Requests whose answer is complete.
    """

    prompt_tokens: int = 0
    decoded_tokens: int = 0
    begun: list[str] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)


class Serving:
    """Serves requests on one engine.

    Args:
        shared_unit_tokens: Tokens that an endless cache would hit are counted in multiples of it.
    """

    def __init__(self, engine: Engine, shared_unit_tokens: int) -> None:
        self._engine = engine
        self._unit_tokens = shared_unit_tokens
        self._served: dict[str, ServedRequest] = {}
        self._num_idle_steps = 0
        self.outcome = Outcome()

    @property
    def has_requests(self) -> bool:
        return bool(self._served)

    def add(self, served: ServedRequest) -> None:
        self._served[served.request.request_id] = served
        self.outcome.num_requests += 1
        self.outcome.prompt_tokens += served.num_prompt_tokens
        self._engine.add(served.request)

    def run_step(self, burst_tokens: int = BURST_TOKENS) -> ServedStep:
        """Run one step.

        Raises:
            DoesNotFitError: No request can go on.
        """
        scheduled = self._engine.schedule()
        num_tokens_of = dict(scheduled.num_scheduled_tokens)
        step = ServedStep(-self.outcome.computed_tokens)
        for new in scheduled.scheduled_new_reqs:
            if new.req_id in self._served:
                step.begun.append(new.req_id)
                self._note_hit(self._served[new.req_id], new.num_computed_tokens)
            else:  # The row of a hole is no request, and samples nothing.
                self._note_hole(new.num_computed_tokens, num_tokens_of.pop(new.req_id))
        for request_id, num_tokens in num_tokens_of.items():
            served = self._served[request_id]
            end = served.request.num_computed_tokens
            served.note_computed(end - num_tokens, end)
            decoded_tokens = min(num_tokens, end - served.num_prompt_tokens)
            step.decoded_tokens = max(step.decoded_tokens, decoded_tokens)
            self._note_computed(end - num_tokens, min(end, served.num_prompt_tokens))
        step.prompt_tokens += self.outcome.computed_tokens
        self.outcome.num_preemptions += len(scheduled.preempted_req_ids or ())
        sampled = {
            request_id: self._served[request_id].next_outputs(burst_tokens)
            for request_id in num_tokens_of
        }
        self._engine.finish_step(scheduled, sampled)
        for request_id in sampled:
            if self._served[request_id].request.is_finished():
                del self._served[request_id]
                step.ended.append(request_id)
        self._num_idle_steps = 0 if scheduled.num_scheduled_tokens else self._num_idle_steps + 1
        if self._num_idle_steps > MAX_IDLE_STEPS and self._served:
            raise DoesNotFitError
        self.outcome.num_steps += 1
        self.outcome.scheduler_s = self._engine.scheduler_s
        return step

    def settle(self) -> None:
        """Run steps until the last stores have ended, after all requests have ended."""
        num_steps = self.outcome.num_steps
        scheduler_s = self.outcome.scheduler_s
        while self._engine.has_work:
            self.run_step()
        self.outcome.num_steps = num_steps
        self.outcome.scheduler_s = scheduler_s

    def _note_hit(self, served: ServedRequest, hit_tokens: int) -> None:
        shared_tokens = min(served.shared_tokens(), served.num_prompt_tokens - 1)
        self.outcome.hit_tokens += hit_tokens
        self.outcome.shared_tokens += shared_tokens - shared_tokens % self._unit_tokens

    def _note_hole(self, first_tokens: int, num_tokens: int) -> None:
        """Count computed tokens of a hole, which `_note_hit` has counted as hits."""
        self.outcome.hole_tokens += num_tokens
        self.outcome.hit_tokens -= num_tokens
        self._note_computed(first_tokens, first_tokens + num_tokens)

    def _note_computed(self, first_tokens: int, end_tokens: int) -> None:
        if first_tokens < end_tokens:
            self.outcome.computed_tokens += end_tokens - first_tokens
            self.outcome.computed_pairs += (end_tokens**2 - first_tokens**2) // 2
