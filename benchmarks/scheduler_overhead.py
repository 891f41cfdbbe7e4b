# SPDX-License-Identifier: Apache-2.0
"""What the package costs the scheduler: microseconds per step, side by side in one run.

    python benchmarks/scheduler_overhead.py [--json FILE] [--turns N] [--layout NAME]

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
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import vllm
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.steady_load import Scenario, SteadyLoad
from support.scheduler.worlds import INTERVAL_VARIABLE

from vllm_ascend_kvext.activation import survey
from vllm_ascend_kvext.features import FEATURES, REPAIRS, with_requirements
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import Mode, Settings

UNCONFIGURED_LIMIT = 1.02
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
        features: What is installed, besides what these require.
        interval_tokens: A multiple of every layout's hit unit; None leaves it unset.
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
SCENARIOS = (
    Scenario("decode", 64, (500, 1500), 100_000, 8192, 20),
    Scenario("prefill", 16, (2000, 6000), 16, 2048, 60),
)


Plans = tuple[FeaturePlan, ...]


@contextmanager
def entered(variant: Variant, plans: Plans) -> Iterator[None]:
    """Make this process that of a variant, for a while."""
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
    """All variants under one load.

    Every pass builds its engines anew and in another order: where an engine's objects happen to
    lie in memory is worth a few per cent, and stays with it.
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
                    loads[variant].run(1)  # not timed: warms the caches again
                    elapsed[variant] += loads[variant].run(STEPS_PER_TURN) / 2
        for variant in VARIANTS:
            times[variant].append(elapsed[variant])
    gc.enable()
    for load in loads.values():
        load.close()
    return times


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
    parser.add_argument("--turns", type=int, default=20, help="per variant and pass")
    parser.add_argument("--layout", default="", help="only layouts whose name contains this")
    arguments = parser.parse_args()

    print(f"vLLM {vllm.__version__}, Python {platform.python_version()}")
    activation = survey(Settings(mode=Mode.STRICT))
    plans = activation.plans
    results: list[Result] = []
    for layout in LAYOUTS:
        if arguments.layout not in layout.name:
            continue
        for scenario in SCENARIOS:
            results += measure(layout, scenario, plans, arguments.turns)
            print_results(results[-len(VARIANTS) :])

    unconfigured = statistics.median(r.ratio for r in results if r.variant == UNCONFIGURED.name)
    verdict = "within" if unconfigured <= UNCONFIGURED_LIMIT else "ABOVE"
    print(
        f"\nNothing configured, {len(REPAIRED)} repairs: in the median of all loads "
        f"{unconfigured:.3f} of stock, {verdict} {UNCONFIGURED_LIMIT}."
    )
    if arguments.json:
        report = {
            "vllm": vllm.__version__,
            "python": platform.python_version(),
            "passes": len(VARIANTS),
            "turns": arguments.turns,
            "steps_per_turn": STEPS_PER_TURN,
            "results": [asdict(result) for result in results],
        }
        arguments.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if unconfigured <= UNCONFIGURED_LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
