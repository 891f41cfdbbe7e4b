# SPDX-License-Identifier: Apache-2.0
"""What the package costs the scheduler: microseconds per step, side by side in one run.

    python benchmarks/scheduler_overhead.py [--json FILE] [--rounds N] [--layout NAME]

vLLM's real scheduler runs the same requests once per variant, without a model. The variants take
turns every few steps, and the patches are installed and taken back at every turn, so that whatever
the machine does meanwhile hits all of them. Timed is the thread's CPU time in ``schedule()`` and
``update_from_output()``. A ratio is the median over the turns of (variant / stock), each pair being
the same steps of the same requests.

Knows the scheduler from outside only; the harness in ``tests/support`` builds it.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import vllm
from support.engine import SchedulerEngine
from support.layouts import Attention, Group, Layout
from support.options import EngineOptions
from support.workload import RequestPlan
from support.worlds import INTERVAL_VARIABLE
from vllm.v1.outputs import ModelRunnerOutput

from vllm_ascend_kvext import register
from vllm_ascend_kvext.activation import revert_feature, survey
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.settings import Mode, Settings

INERT_LIMIT = 1.02
STEPS_PER_TURN = 6

FULL_16 = Group(Attention.FULL, 16)
WINDOW_16 = Group(Attention.WINDOW, 16, 1024)
LAYOUTS = (
    Layout("1 full + 1 window", (FULL_16, WINDOW_16)),
    Layout("1 full + 5 windows (Gemma 3)", (FULL_16, *[WINDOW_16] * 5)),
    Layout(
        "MLA, windows, states (DeepSeek-V4)",
        (
            Group(Attention.MLA, 256),
            Group(Attention.WINDOW_MLA, 64, 128),
            Group(Attention.WINDOW_MLA, 64, 128),
            Group(Attention.WINDOW_MLA, 4, 8),
            Group(Attention.WINDOW_MLA, 8, 128),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Variant:
    """What of the package is in the process.

    Attributes:
        name: As printed.
        installed: Whether the retention patches are in place.
        interval_units: The interval in units of a hit; None leaves it unset.
    """

    name: str
    installed: bool
    interval_units: int | None = None


STOCK = Variant("stock", False)
REGISTERED = Variant("inert: registered, nothing configured", False)
VARIANTS = (
    STOCK,
    REGISTERED,
    Variant("inert: all patches installed, no interval", True),
    Variant("active: interval 0", True, 0),
    Variant("active: interval of 8 units", True, 8),
)


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


SCENARIOS = (
    Scenario("decode", 64, (500, 1500), 100_000, 8192, 20),
    Scenario("prefill", 16, (2000, 6000), 16, 2048, 60),
)


class Bench:
    """One variant's engine under a scenario's load.

    Args:
        layout: KV cache groups.
        scenario: The load.
    """

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


@contextmanager
def entered(variant: Variant, plan: Any, layout: Layout) -> Iterator[None]:
    """Make this process that of a variant, for a while."""
    os.environ.pop(INTERVAL_VARIABLE, None)
    if variant.interval_units is not None:
        os.environ[INTERVAL_VARIABLE] = str(variant.interval_units * layout.unit_tokens)
    if variant.installed:
        BOOK.apply(plan)
    elif variant is REGISTERED:
        register()
    try:
        yield
    finally:
        if variant.installed:
            revert_feature("retention")
        os.environ.pop(INTERVAL_VARIABLE, None)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table; times in microseconds of CPU per scheduler step."""

    layout: str
    scenario: str
    variant: str
    step_us: float
    ratio: float
    ratio_quartiles: tuple[float, float]


def measure(layout: Layout, scenario: Scenario, plan: Any, num_rounds: int) -> list[Result]:
    """All variants under one load."""
    benches = {}
    for variant in VARIANTS:
        with entered(variant, plan, layout):
            benches[variant] = Bench(layout, scenario, num_rounds * STEPS_PER_TURN)
            benches[variant].run(scenario.warm_up_steps)
    times: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    order = list(VARIANTS)
    rng = random.Random(1)
    gc.collect()
    gc.disable()
    for _ in range(num_rounds):
        rng.shuffle(order)
        for variant in order:
            with entered(variant, plan, layout):
                times[variant].append(benches[variant].run(STEPS_PER_TURN))
    gc.enable()
    for bench in benches.values():
        bench.close()
    results = []
    for variant in VARIANTS:
        pairs = zip(times[variant], times[STOCK], strict=True)
        low, ratio, high = statistics.quantiles((ours / stock for ours, stock in pairs), n=4)
        step_us = statistics.median(times[variant])
        results.append(
            Result(layout.name, scenario.name, variant.name, step_us, ratio, (low, high))
        )
    return results


def print_results(results: list[Result]) -> None:
    first = results[0]
    print(f"\n{first.layout}, {first.scenario}")
    print(f"  {'variant':44}{'µs per step':>12}{'ratio to stock':>16}  quartiles")
    for result in results:
        low, high = result.ratio_quartiles
        print(
            f"  {result.variant:44}{result.step_us:12.1f}{result.ratio:16.3f}  "
            f"{low:.3f} to {high:.3f}",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all results there, too")
    parser.add_argument("--rounds", type=int, default=150, help="turns of each variant")
    parser.add_argument("--layout", default="", help="only layouts whose name contains this")
    arguments = parser.parse_args()

    print(f"vLLM {vllm.__version__}, Python {platform.python_version()}")
    activation = survey(Settings(mode=Mode.STRICT))
    (plan,) = (plan for plan in activation.plans if plan.feature == "retention")
    results: list[Result] = []
    for layout in LAYOUTS:
        if arguments.layout not in layout.name:
            continue
        for scenario in SCENARIOS:
            results += measure(layout, scenario, plan, arguments.rounds)
            print_results(results[-len(VARIANTS) :])

    worst = max(result.ratio for result in results if result.variant == REGISTERED.name)
    verdict = "within" if worst <= INERT_LIMIT else "ABOVE"
    print(f"\nInert (registered): at most {worst:.3f} of stock, {verdict} {INERT_LIMIT}.")
    if arguments.json:
        report = {
            "vllm": vllm.__version__,
            "python": platform.python_version(),
            "rounds": arguments.rounds,
            "steps_per_turn": STEPS_PER_TURN,
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if worst <= INERT_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
