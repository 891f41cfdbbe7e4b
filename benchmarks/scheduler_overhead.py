# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Measures what the package costs the scheduler: microseconds per step, in one run.

    python benchmarks/scheduler_overhead.py [--quick] [--turns N] [--layout NAME] [--out FOLDER]

vLLM's real scheduler runs the same requests once per variant, without a model. The variants take
turns every few steps, and the patches are installed and taken back at every turn. So other work of
the machine affects all of them. The benchmark measures the thread's CPU time in ``schedule()`` and
``update_from_output()``. A ratio is the median over the turns of (variant / stock). Each pair has
the same steps of the same requests.

The benchmark uses only public methods of the scheduler, which ``tests/support`` builds.
"""

from __future__ import annotations

import gc
import itertools
import os
import platform
import random
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import vllm
from common.report import Table, parser, verdict, write
from common.turns import whose_methods_stay
from retention.layouts import DSV4, FULL_16, GEMMA
from support.scheduler.block_manager import INTERVAL_VARIABLE
from support.scheduler.engine import SchedulerEngine
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan
from vllm.v1.outputs import ModelRunnerOutput

from vllm_ascend_kvext.activation import survey
from vllm_ascend_kvext.features import FEATURES, REPAIRS, with_requirements
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import Mode, Settings

UNCONFIGURED_LIMIT = 1.02
STEPS_PER_TURN = 6

ONE_WINDOW = Layout("one-window", (FULL_16, Group(Attention.WINDOW, 16, 1024)))
LAYOUTS = {layout.name: layout for layout in (ONE_WINDOW, GEMMA, DSV4)}


@dataclass(frozen=True, slots=True)
class Variant:
    """The features of the package that are installed in the process.

    Attributes:
        features: The installed features, without those that they require.
        interval_tokens: The retention interval, a multiple of every layout's hit unit; None leaves
            it unset.
    """

    name: str
    features: frozenset[str] = frozenset()
    interval_tokens: int | None = None


REPAIRED = frozenset(repair.name for repair in REPAIRS)
RETAINING = with_requirements({"retention", *REPAIRED}, FEATURES)
STOCK = Variant("stock")
UNCONFIGURED = Variant("nothing configured: the repairs", REPAIRED)
VARIANTS = (
    STOCK,
    UNCONFIGURED,
    Variant("the same, retention's patches, no interval", RETAINING),
    Variant("active: interval 0", RETAINING, 0),
    Variant("active: interval 2048", RETAINING, 2048),
)


class Scenario(NamedTuple):
    """A load that stays the same during the measurement.

    Attributes:
        num_running: The number of requests in every batch.
        prompt_tokens: The range of prompt lengths. Half of a prompt is shared with others.
        new_tokens: The generated tokens per request.
        batched_tokens: The token budget of a step.
        warm_up_steps: The steps until the load does not change any more.
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


class SteadyLoad:
    """One engine under a scenario's load, whose requests are the same for every engine."""

    def __init__(self, layout: Layout, scenario: Scenario, num_steps: int) -> None:
        self._num_requests = scenario.num_running + 2
        self._plans = endless_plans(scenario)
        longest = scenario.prompt_tokens[1] + min(scenario.new_tokens, num_steps + 100)
        blocks_per_request = sum(longest // group.block_tokens + 2 for group in layout.groups)
        options = EngineOptions(
            num_blocks=1 + scenario.num_running * blocks_per_request,
            max_num_seqs=scenario.num_running,
            max_num_batched_tokens=scenario.batched_tokens,
            max_model_len=131_072,
            events=False,
        )
        self._engine = SchedulerEngine(layout, options)
        self.close = self._engine.shutdown

    def run(self, num_steps: int) -> float:
        """Microseconds of CPU time per step."""
        scheduler = self._engine.scheduler
        elapsed_ns = 0
        for _ in range(num_steps):
            while len(scheduler.requests) < self._num_requests:
                scheduler.add_request(self._engine.make_request(next(self._plans)))
            start_ns = time.thread_time_ns()
            scheduled = scheduler.schedule()
            elapsed_ns += time.thread_time_ns() - start_ns
            output = output_of(scheduled.num_scheduled_tokens, scheduler.requests)
            start_ns = time.thread_time_ns()
            scheduler.update_from_output(scheduled, output)
            elapsed_ns += time.thread_time_ns() - start_ns
        return elapsed_ns / num_steps / 1000


def output_of(request_ids: Iterable[str], requests: dict[str, Any]) -> ModelRunnerOutput:
    """One token for each request whose prompt is computed."""
    ids = list(request_ids)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={request_id: i for i, request_id in enumerate(ids)},
        sampled_token_ids=[[] if requests[id].is_prefill_chunk else [1] for id in ids],
    )


def endless_plans(scenario: Scenario) -> Iterator[RequestPlan]:
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


Plans = tuple[FeaturePlan, ...]


@contextmanager
def entered(variant: Variant, plans: Plans) -> Iterator[None]:
    """Install a variant in this process, inside the block."""
    os.environ.pop(INTERVAL_VARIABLE, None)
    if variant.interval_tokens is not None:
        os.environ[INTERVAL_VARIABLE] = str(variant.interval_tokens)
    wanted = [plan for plan in plans if plan.feature in variant.features and plan.fits]
    for plan in wanted:
        BOOK.apply(plan)
    try:
        yield
    finally:
        for plan in reversed(wanted):
            BOOK.revert(plan.feature)
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


def measure(layout: Layout, scenario: Scenario, plans: Plans, num_turns: int) -> list[Result]:
    """Measure all variants under one load.

    Every pass builds new engines in another order. The places of an engine's objects in memory
    change its speed by a few per cent, and do not change during a pass.
    """
    times: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    for first in range(len(VARIANTS)):
        order = [*VARIANTS[first:], *VARIANTS[:first]]
        for variant, elapsed in measure_once(layout, scenario, plans, order, num_turns).items():
            times[variant] += elapsed
    results = []
    for variant in VARIANTS:
        pairs = zip(times[variant], times[STOCK], strict=True)
        low, ratio, high = statistics.quantiles((ours / stock for ours, stock in pairs), n=4)
        step_us = statistics.median(times[variant])
        results.append(
            Result(layout.name, scenario.name, variant.name, step_us, ratio, (low, high))
        )
    return results


def measure_once(
    layout: Layout, scenario: Scenario, plans: Plans, order: list[Variant], num_turns: int
) -> dict[Variant, list[float]]:
    """One pass: per variant and turn, microseconds per step."""
    loads = {}
    for variant in order:
        with entered(variant, plans):
            loads[variant] = SteadyLoad(layout, scenario, 2 * num_turns * (STEPS_PER_TURN + 1))
            loads[variant].run(scenario.warm_up_steps)
    times: dict[Variant, list[float]] = {variant: [] for variant in VARIANTS}
    rng = random.Random(1)
    gc.collect()
    gc.disable()
    for _ in range(num_turns):
        elapsed = dict.fromkeys(VARIANTS, 0.0)
        for _ in range(2):
            for variant in rng.sample(order, k=len(order)):
                with entered(variant, plans):
                    loads[variant].run(1)  # This run warms the caches, and is not timed.
                    elapsed[variant] += loads[variant].run(STEPS_PER_TURN) / 2
        for variant in VARIANTS:
            times[variant].append(elapsed[variant])
    gc.enable()
    for load in loads.values():
        load.close()
    return times


TABLE = Table(
    "layout:<11",
    "scenario:<8",
    "variant:<43",
    "µs per step:>12",
    "ratio to stock:>15",
    "quartiles:>14",
)


def line(result: Result) -> str:
    quartiles = " to ".join(f"{each:.3f}" for each in result.ratio_quartiles)
    times = (f"{result.step_us:.1f}", f"{result.ratio:.3f}", quartiles)
    return TABLE.line(result.layout, result.scenario, result.variant, *times)


def main() -> int:
    options = parser(__doc__, "bench-scheduler-overhead")
    options.add_argument("--turns", type=int, help="per variant and pass")
    options.add_argument("--layout", action="append", choices=LAYOUTS)
    arguments = options.parse_args()
    num_turns = arguments.turns or (4 if arguments.quick else 20)
    lines = [f"vLLM {vllm.__version__}, Python {platform.python_version()}", TABLE.head]
    print(*lines, sep="\n")
    plans = whose_methods_stay(survey(Settings(mode=Mode.STRICT)).plans)
    results: list[Result] = []
    for name in arguments.layout or LAYOUTS:
        for scenario in SCENARIOS:
            found = measure(LAYOUTS[name], scenario, plans, num_turns)
            results += found
            lines += map(line, found)
            print(*map(line, found), sep="\n", flush=True)
    unconfigured = statistics.median(r.ratio for r in results if r.variant == UNCONFIGURED.name)
    is_met = unconfigured <= UNCONFIGURED_LIMIT
    text = f"nothing configured, {len(REPAIRED)} repairs: in the median of all loads "
    lines.append(verdict(is_met, f"{text}{unconfigured:.3f} of stock, limit {UNCONFIGURED_LIMIT}"))
    print(lines[-1])
    write(arguments.out, lines, results)
    return 0 if is_met else 1


if __name__ == "__main__":
    sys.exit(main())
