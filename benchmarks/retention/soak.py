# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures the scheduler CPU of adaptive retention and of stock vLLM over very many requests.

    python benchmarks/retention/soak.py [--quick] [--case NAME] [--requests N]

Every request begins with one of a few shared system prompts, and goes on with its own tokens. So
one prefix gets thousands of continuations. Both engines serve the same tens of thousands of
requests on vLLM's real ``KVCacheManager``, without a model, in one process, and take turns of a few
hundred requests. For each case, the benchmark prints the CPU per request of both and their ratio,
the longest step of both, and the hit rates.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("benchmarks", "tests")]
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from common.report import Table, parser  # noqa: E402

from retention.engine import Engine  # noqa: E402
from retention.layouts import get_layout  # noqa: E402
from retention.serving import Serving  # noqa: E402
from retention.traces import Script, Trace, TracedRequest  # noqa: E402
from retention.variants import Variant, entered  # noqa: E402

LAYOUT = "gemma"
TURN_REQUESTS = 250
NUM_CLIENTS = 32
"""The number of clients. Each asks again after its answer. Half of the clients wait."""

RECENT_REQUESTS = 500
"""A repeated request is one of this many recent requests."""


@dataclass(frozen=True, slots=True)
class Case:
    """A load.

    Attributes:
        system_tokens: The length of a shared system prompt.
        tail_tokens: The range of the lengths of the tokens that only one request has.
        num_blocks: The size of the pool.
        num_requests: The number of served requests.
        num_systems: The number of system prompts.
        new_tokens: The tokens that a request generates.
        repeats: The share of requests that repeat an earlier request.
    """

    system_tokens: int
    tail_tokens: tuple[int, int]
    num_blocks: int
    num_requests: int
    num_systems: int = 1
    new_tokens: int = 64
    repeats: float = 0.0


CASES = {
    "long-tails": Case(1500, (1000, 3000), 40_000, 1_000),
    "roomy": Case(2000, (400, 1200), 120_000, 1_500),
    "short-chats": Case(200, (50, 500), 40_000, 3_000, repeats=0.3),
    "siblings": Case(800, (20, 200), 20_000, 30_000, num_systems=3, new_tokens=32, repeats=0.1),
}


def write_trace(name: str, case: Case) -> Trace:
    script = Script(name, stretch=1.0)
    rng = script.rng
    requests = script.requests
    systems = [script.text(case.system_tokens, case.system_tokens) for _ in range(case.num_systems)]
    for number in range(case.num_requests):
        after = number - NUM_CLIENTS if number >= NUM_CLIENTS else None
        if requests and rng.random() < case.repeats:
            earlier = rng.choice(requests[-RECENT_REQUESTS:])
            requests.append(TracedRequest(earlier.prompt, earlier.answered, 0, after))
        else:
            prompt = script.text(*case.tail_tokens, rng.choice(systems))
            script.ask(prompt, (case.new_tokens, case.new_tokens), 0, after)
    return Trace(name, tuple(requests))


class Measured:
    """One engine, and the times of its steps."""

    def __init__(self, case: Case, trace: Trace, variant: Variant) -> None:
        self._variant = variant
        layout = get_layout(LAYOUT)
        with entered(variant):
            self._engine = Engine(layout, case.num_blocks, records=False)
            self._serving = Serving(layout, self._engine, trace)
        self.steps_s: list[float] = []

    def run(self, num_arrived: int) -> None:
        """Run until a number of requests have arrived, or all are served."""
        with entered(self._variant):
            while self._serving.has_work and self._serving.num_arrived < num_arrived:
                before_s = self._engine.scheduler_s
                self._serving.advance()
                self.steps_s.append(self._engine.scheduler_s - before_s)

    @property
    def hit_rate(self) -> float:
        return self._serving.outcome.hit_rate


TABLE = Table(
    "case:<12",
    "requests:>8",
    "stock ms:>9",
    "adaptive ms:>11",
    "ratio:>6",
    "longest step:>12",
    "adaptive:>9",
    "ratio:>6",
    "hit stock:>10",
    "adaptive:>9",
)


def run_case(name: str, case: Case) -> str:
    """Serve a case with both engines in turns. Returns a line of the table."""
    trace = write_trace(name, case)
    stock, ours = (Measured(case, trace, Variant.parse(each)) for each in ("dense", "adaptive"))
    for turn, num_arrived in enumerate(_turns(case.num_requests)):
        # The first engine of a turn finds colder CPU caches, so the order alternates.
        engines = (stock, ours) if turn % 2 else (ours, stock)
        for engine in engines:
            gc.collect()
            engine.run(num_arrived)
    mean_ms = [1e3 * sum(each.steps_s) / case.num_requests for each in (stock, ours)]
    worst_ms = [1e3 * max(each.steps_s) for each in (stock, ours)]
    cells = [name, case.num_requests]
    for of_stock, of_ours in (mean_ms, worst_ms):
        cells += [f"{of_stock:.2f}", f"{of_ours:.2f}", f"{of_ours / of_stock:.2f}"]
    return TABLE.line(*cells, f"{stock.hit_rate:.1%}", f"{ours.hit_rate:.1%}")


def _turns(num_requests: int) -> Iterator[int]:
    yield from range(TURN_REQUESTS, num_requests, TURN_REQUESTS)
    yield num_requests + 1


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--case", action="append", choices=CASES, help="all, if left out")
    options.add_argument("--requests", type=int, help="so many, whatever the case says")
    arguments = options.parse_args()
    gc.disable()
    print(TABLE.head, flush=True)
    for name in arguments.case or CASES:
        case = CASES[name]
        num_requests = arguments.requests or case.num_requests // (10 if arguments.quick else 1)
        print(run_case(name, replace(case, num_requests=num_requests)), flush=True)


if __name__ == "__main__":
    main()
