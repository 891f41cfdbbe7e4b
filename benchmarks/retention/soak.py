# SPDX-License-Identifier: Apache-2.0
"""Scheduler CPU of adaptive retention over tens of thousands of requests, beside stock vLLM's.

    python benchmarks/retention/soak.py [--quick] [--case NAME] [--requests N]

Every request begins with one of a few shared system prompts and goes on with tokens of its own, so
that one prefix gets thousands of continuations. Both engines serve the same requests on vLLM's real
``KVCacheManager``, in turns of a few hundred, in one process. Printed per case: CPU per request of
both and their ratio, the longest step of both, and hit rates. No model, no hashing of tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.request import Request, RequestStatus  # noqa: E402

from retention.engine import Engine  # noqa: E402
from retention.layouts import BenchLayout, get_layout  # noqa: E402
from retention.variants import Variant, entered  # noqa: E402

TURN_REQUESTS = 250
MOST_RUNNING = 16
BURST_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Case:
    """A load.

    Attributes:
        system_tokens: Length of a shared system prompt.
        tail_tokens: Range of the lengths of what only one request has.
        num_blocks: Size of the pool.
        num_requests: How many are served.
        num_systems: How many system prompts there are.
        new_tokens: Tokens that a request generates.
        repeats: Share of the requests that an earlier request is sent again as.
        layout: A layout's name.
    """

    system_tokens: int
    tail_tokens: tuple[int, int]
    num_blocks: int
    num_requests: int
    num_systems: int = 1
    new_tokens: int = 64
    repeats: float = 0.0
    layout: str = "gemma"


CASES = {
    "long-tails": Case(1500, (1000, 3000), 40_000, 1_000),
    "roomy": Case(2000, (400, 1200), 120_000, 1_500),
    "short-chats": Case(200, (50, 500), 40_000, 3_000, repeats=0.3),
    "siblings": Case(800, (20, 200), 20_000, 30_000, num_systems=3, new_tokens=32, repeats=0.1),
}


@dataclass(slots=True)
class Plan:
    """A request, before either engine gets it."""

    number: int
    num_prompt_tokens: int
    hashes: list[bytes]


@dataclass(slots=True)
class Usage:
    """What one engine took."""

    steps_s: list[float] = field(default_factory=list)
    hit_tokens: int = 0
    prompt_tokens: int = 0


def plans(case: Case, layout: BenchLayout) -> Iterator[Plan]:
    """The requests of a case. Hashes are drawn: what they are of, nobody looks at."""
    rng = random.Random(0)
    block_tokens = layout.hash_block_tokens
    systems = [
        [rng.randbytes(32) for _ in range(case.system_tokens // block_tokens)]
        for _ in range(case.num_systems)
    ]
    recent: list[Plan] = []
    for number in range(case.num_requests):
        if recent and rng.random() < case.repeats:
            earlier = rng.choice(recent)
            yield Plan(number, earlier.num_prompt_tokens, earlier.hashes)
            continue
        length = case.system_tokens + rng.randint(*case.tail_tokens)
        shared = rng.choice(systems)
        num_own = (length + case.new_tokens) // block_tokens - len(shared)
        plan = Plan(number, length, shared + [rng.randbytes(32) for _ in range(num_own)])
        recent = [*recent[-500:], plan]
        yield plan


class Serving:
    """One engine and the requests that it has. Serves like `retention.serving`, but for ever."""

    def __init__(self, case: Case, layout: BenchLayout, variant: Variant) -> None:
        self.variant = variant
        self.usage = Usage()
        self._case, self._layout = case, layout
        with entered(variant):
            self._engine = Engine(layout, case.num_blocks, None)
            self._engine.manager.block_pool.cached_block_hash_to_block._cache = {}
        self._running: list[Request] = []

    def run(self, turn: list[Plan]) -> None:
        """Serve some requests; those that run stay for the next turn."""
        waiting = [self._request(plan) for plan in reversed(turn)]
        with entered(self.variant):
            while waiting:
                self._step(waiting)

    def _request(self, plan: Plan) -> Request:
        block_tokens = self._layout.hash_block_tokens

        def next_hashes(request: Request) -> list[bytes]:
            return plan.hashes[len(request.block_hashes) : request.num_tokens // block_tokens]

        return Request(
            request_id=f"request-{plan.number}",
            prompt_token_ids=[0] * plan.num_prompt_tokens,
            sampling_params=SamplingParams(max_tokens=self._case.new_tokens),
            pooling_params=None,
            block_hasher=next_hashes,
        )

    def _step(self, waiting: list[Request]) -> None:
        engine, layout = self._engine, self._layout
        before_s = engine.scheduler_s
        engine.start_step()
        budget = layout.step_tokens
        scheduled: list[tuple[Request, int]] = []
        for request in list(self._running):
            if request not in self._running:
                continue
            missing = request.num_tokens - request.num_computed_tokens
            num_tokens = engine.chunk(request, min(budget, missing))
            if num_tokens:
                while not engine.extend(request, num_tokens):
                    victim = self._running.pop()
                    engine.free(victim)
                    victim.num_computed_tokens = 0
                    victim.num_preemptions += 1
                    waiting.append(victim)
                    if victim is request:
                        break
                else:
                    scheduled.append((request, num_tokens))
                    budget -= num_tokens
        while waiting and budget > 0 and len(self._running) < MOST_RUNNING:
            request = waiting[-1]
            blocks, hit_tokens = engine.look_up(request)
            num_tokens = engine.chunk(
                request, min(budget, request.num_tokens - hit_tokens), hit_tokens
            )
            is_idle = not self._running
            if not num_tokens or not engine.admit(request, num_tokens, hit_tokens, blocks, is_idle):
                break
            if not request.num_preemptions:
                self.usage.hit_tokens += hit_tokens
                self.usage.prompt_tokens += request.num_prompt_tokens
            request.status = RequestStatus.RUNNING
            request.num_computed_tokens = hit_tokens
            self._running.append(waiting.pop())
            scheduled.append((request, num_tokens))
            budget -= num_tokens
        for request, num_tokens in scheduled:
            if request in self._running:
                self._advance(request, num_tokens)
        self.usage.steps_s.append(engine.scheduler_s - before_s)

    def _advance(self, request: Request, num_tokens: int) -> None:
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens < request.num_tokens:
            return
        missing = self._case.new_tokens - request.num_output_tokens
        if missing:
            request.append_output_token_ids([0] * min(missing, BURST_TOKENS))
            return
        self._running.remove(request)
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        self._engine.free(request)


def run_case(name: str, case: Case) -> str:
    """Serve a case with both engines, in turns; returns a line of text."""
    layout = get_layout(case.layout)
    engines = [Serving(case, layout, Variant.parse(variant)) for variant in ("dense", "adaptive")]
    turn: list[Plan] = []
    for plan in plans(case, layout):
        turn.append(plan)
        if len(turn) == TURN_REQUESTS or plan.number == case.num_requests - 1:
            # Whoever comes first finds colder caches of the processor: take turns at that, too.
            for engine in engines if plan.number // TURN_REQUESTS % 2 else engines[::-1]:
                gc.collect()
                engine.run(turn)
            turn = []
    stock, ours = (engine.usage for engine in engines)
    per_request_ms = [1e3 * sum(usage.steps_s) / case.num_requests for usage in (stock, ours)]
    worst_ms = [1e3 * max(usage.steps_s) for usage in (stock, ours)]
    hit_rates = [usage.hit_tokens / usage.prompt_tokens for usage in (stock, ours)]
    return (
        f"{name:12} {case.num_requests:6} requests  "
        f"CPU per request {per_request_ms[0]:.2f} ms stock, "
        f"{per_request_ms[1]:.2f} adaptive: {per_request_ms[1] / per_request_ms[0]:.2f} x  "
        f"longest step {worst_ms[0]:.1f} ms, {worst_ms[1]:.1f}: {worst_ms[1] / worst_ms[0]:.2f} x  "
        f"hit {100 * hit_rates[0]:.1f} %, {100 * hit_rates[1]:.1f} %"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", action="append", choices=CASES, help="all, if left out")
    parser.add_argument("--quick", action="store_true", help="a tenth of the requests")
    parser.add_argument("--requests", type=int, help="so many, whatever the case says")
    arguments = parser.parse_args()
    gc.disable()
    for name in arguments.case or CASES:
        case = CASES[name]
        num_requests = arguments.requests or case.num_requests // (10 if arguments.quick else 1)
        small = Case(**{**_fields(case), "num_requests": num_requests})
        print(run_case(name, small), flush=True)
    return 0


def _fields(case: Case) -> dict[str, Any]:
    return {name: getattr(case, name) for name in Case.__slots__}


if __name__ == "__main__":
    sys.exit(main())
