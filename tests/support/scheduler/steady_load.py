# SPDX-License-Identifier: Apache-2.0
"""A load that keeps a scheduler in a steady state, and what a step of it costs.

Knows nothing of patches: whoever measures decides what is in the process at which time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from vllm.v1.outputs import ModelRunnerOutput

from .engine import SchedulerEngine
from .layouts import Layout
from .options import EngineOptions
from .workload import RequestPlan


@dataclass(frozen=True, slots=True)
class Scenario:
    """A load that stays the same for as long as it is measured.

    Attributes:
        name: As printed.
        num_running: Requests in the batch, always.
        prompt_tokens: Range of prompt lengths; half of a prompt is shared with others.
        new_tokens: Generated tokens per request.
        batched_tokens: Token budget of a step.
        warm_up_steps: Steps until the load is what it will stay.
    """

    name: str
    num_running: int
    prompt_tokens: tuple[int, int]
    new_tokens: int
    batched_tokens: int
    warm_up_steps: int


class SteadyLoad:
    """One engine under a scenario's load, whose requests are the same for every engine."""

    def __init__(self, layout: Layout, scenario: Scenario, num_steps: int) -> None:
        self._scenario = scenario
        self._plans = _endless_plans(scenario)
        longest = scenario.prompt_tokens[1] + min(scenario.new_tokens, num_steps + 100)
        options = EngineOptions(
            num_blocks=1
            + scenario.num_running
            * sum(longest // group.block_tokens + 2 for group in layout.groups),
            max_num_seqs=scenario.num_running,
            max_num_batched_tokens=scenario.batched_tokens,
            max_model_len=131_072,
            events=False,
        )
        self._engine = SchedulerEngine(layout, options)
        self._scheduler = self._engine.scheduler

    def run(self, num_steps: int) -> float:
        """Microseconds of CPU time per step."""
        elapsed_ns = 0
        for _ in range(num_steps):
            self._refill()
            start_ns = time.thread_time_ns()
            scheduler_output = self._scheduler.schedule()
            elapsed_ns += time.thread_time_ns() - start_ns
            model_output = self._execute(scheduler_output)
            start_ns = time.thread_time_ns()
            self._scheduler.update_from_output(scheduler_output, model_output)
            elapsed_ns += time.thread_time_ns() - start_ns
        return elapsed_ns / num_steps / 1000

    def close(self) -> None:
        self._engine.shutdown()

    def _refill(self) -> None:
        while len(self._scheduler.requests) < self._scenario.num_running + 2:
            self._scheduler.add_request(self._engine.make_request(next(self._plans)))

    def _execute(self, scheduler_output: Any) -> ModelRunnerOutput:
        request_ids = list(scheduler_output.num_scheduled_tokens)
        requests = self._scheduler.requests
        return ModelRunnerOutput(
            req_ids=request_ids,
            req_id_to_index={request_id: i for i, request_id in enumerate(request_ids)},
            sampled_token_ids=[[] if requests[id].is_prefill_chunk else [1] for id in request_ids],
        )


def _endless_plans(scenario: Scenario) -> Iterator[RequestPlan]:
    rng = random.Random(0)
    shared = [[rng.randrange(1000) for _ in range(scenario.prompt_tokens[1])] for _ in range(8)]
    for number in itertools.count():
        num_tokens = rng.randrange(*scenario.prompt_tokens)
        prompt = rng.choice(shared)[: num_tokens // 2]
        prompt = prompt + [rng.randrange(1000) for _ in range(num_tokens - len(prompt))]
        yield RequestPlan(
            request_id=f"request-{number}",
            arrival_step=0,
            prompt=tuple(prompt),
            max_tokens=scenario.new_tokens,
        )
