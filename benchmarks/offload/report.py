# SPDX-License-Identifier: Apache-2.0
"""What is printed: tables of one model, and the targets with what was measured."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from offload.contenders import ALONE, BESIDE_COPIES, OURS
from offload.figures import chosen_steps, counted, median_ratio, percentile, why_not
from offload.models import BenchModel
from offload.workload import OFFLOADED_TOKENS, Direction, Prompt, Step, Visit, VisitKind

LEAST_TIMES_FASTER = 3.0
MOST_P99_RATIO = 1.10
LEAST_STEPS = 50
"""Of fewer steps, the 99th percentile is their largest, which says little."""

_WIDTH = 40


@dataclass(slots=True)
class Measured:
    """Of one model. Rounds of all contenders are the same.

    Attributes:
        model: Of which these are.
        prompts: By contender.
        visits: By contender and kind; those that are what they should be.
        limit_s: By threads: a streaming copy of the KV of the offloaded tokens, in every round.
        notes: What is to be said besides.
    """

    model: BenchModel
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    visits: dict[tuple[str, VisitKind], list[Visit]] = field(default_factory=dict)
    limit_s: dict[int, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def kv_bytes(self) -> int:
        return self.model.kv_bytes(OFFLOADED_TOKENS)


def lines(measured: Measured) -> Iterator[str]:
    """Everything about one model."""
    yield (
        f"\n{measured.model.name}: {measured.kv_bytes / 1e6:.0f} MB if every layer keeps "
        f"{OFFLOADED_TOKENS:,} tokens; GB/s are of these bytes, whatever was moved"
    )
    yield from _prompt_table(measured)
    yield from _decode_table(measured)
    yield from (f"note: {note}" for note in measured.notes)
    yield "Targets"
    yield from (f"  {line}" for line in targets(measured))


def _prompt_table(measured: Measured) -> Iterator[str]:
    columns = ("store s", "GB/s", "load s", "GB/s", "cold s", "warm s", "warm/cold", "prompts")
    yield f"{'median':<{_WIDTH}}" + "".join(f"{text:>10}" for text in columns)
    for threads, seconds in measured.limit_s.items():
        name = f"streaming copy, {threads} thread{'s' * (threads > 1)}"
        speed = _speed(measured, statistics.median(seconds))
        yield f"{name:<{_WIDTH}}{speed}{speed}{'':30}{len(seconds):10}"
    for name, prompts in measured.prompts.items():
        good = counted(prompts)
        if name == ALONE:
            cold_s = statistics.median(prompt.cold_s for prompt in prompts)
            yield f"{name:<{_WIDTH}}{'':40}{cold_s:10.3f}{'':20}{len(prompts):10}"
        elif good:
            warm_s, cold_s = (_all(good, "warm_s"), _all(good, "cold_s"))
            yield (
                f"{name:<{_WIDTH}}"
                + "".join(
                    _speed(measured, statistics.median(_all(good, f"{direction}.seconds")))
                    for direction in ("store", "load")
                )
                + f"{statistics.median(cold_s):10.3f}{statistics.median(warm_s):10.3f}"
                + f"{median_ratio(warm_s, cold_s):10.3f}{len(good):10}"
            )
        else:
            yield f"{name:<{_WIDTH}}  no prompt counts"
        left_out = Counter(map(why_not, prompts)) if name != ALONE else Counter()
        yield from (f"  {count} left out: {why}" for why, count in left_out.items() if why)
        for direction in ("store", "load"):
            yield from _details(good, direction)


def _speed(measured: Measured, seconds: float) -> str:
    return f"{seconds:10.3f}{measured.kv_bytes / seconds / 1e9:10.2f}"


def _details(good: Sequence[Prompt], direction: Direction) -> Iterator[str]:
    if not good:
        return
    seconds = _all(good, f"{direction}.seconds")
    line = f"  {direction}: {min(seconds):.3f} to {max(seconds):.3f} s"
    num_bytes = statistics.median(_all(good, f"{direction}.num_bytes"))
    copy_s = statistics.median(_all(good, f"{direction}.copy_seconds"))
    if num_bytes and copy_s:
        line += (
            f"; {num_bytes / 1e6:.0f} MB moved, {copy_s:.3f} s of it copies, "
            f"{num_bytes / copy_s / 1e9:.2f} GB/s"
        )
    yield line


def _all(prompts: Sequence[Prompt], name: str) -> list[float]:
    return [attrgetter(name)(prompt) for prompt in prompts]


def _decode_table(measured: Measured) -> Iterator[str]:
    columns = ("p50 ms", "p99 ms", "steps")
    yield (
        f"{'decoding, and one long prompt that is':<{_WIDTH}}{'all steps':>30}"
        f"{'decode, a transfer runs':>30}{'decode, none runs':>30}"
    )
    yield f"{'':<{_WIDTH}}" + "".join(f"{text:>10}" for text in columns * 3)
    for (name, kind), visits in sorted(measured.visits.items(), key=lambda item: item[0][1]):
        steps = [chosen_steps(visits, **chosen) for chosen in ({}, _TRANSFERRING, _QUIET)]
        yield f"{f'{kind}: {name}':<{_WIDTH}}" + "".join(map(_percentiles, steps))


_TRANSFERRING = {"has_prefill": False, "has_transfer": True}
_QUIET = {"has_prefill": False, "has_transfer": False}


def _percentiles(steps: Sequence[Step]) -> str:
    if not steps:
        return " " * 30
    seconds = [step.seconds for step in steps]
    middle, high = (percentile(seconds, share) * 1e3 for share in (0.5, 0.99))
    return f"{middle:10.1f}{high:10.1f}{len(seconds):10}"


def targets(measured: Measured) -> Iterator[str]:
    """What the project promises, and what was measured."""
    ours = measured.prompts.get(OURS, [])
    for name, theirs in measured.prompts.items():
        if name in (OURS, ALONE):
            continue
        for direction in ("store", "load"):
            pairs = [
                (getattr(their, direction).seconds, getattr(our, direction).seconds)
                for our, their in zip(ours, theirs, strict=True)
                if why_not(our) is None and why_not(their) is None
            ]
            if pairs:
                ratio = statistics.median(their / our for their, our in pairs)
                yield _verdict(
                    f"{direction}: {ratio:.1f} x the throughput of {name} (at least "
                    f"{LEAST_TIMES_FASTER:.0f} x), median of {len(pairs)} pairs",
                    ratio >= LEAST_TIMES_FASTER,
                )
    for (name, kind), visits in sorted(measured.visits.items()):
        what = {"loaded": "loads", "new": "stores", "local": ""}[kind]
        busy, quiet = chosen_steps(visits, **_TRANSFERRING), chosen_steps(visits, **_QUIET)
        if what and busy and quiet:
            text = f"{len(busy)} decode steps while {what} run, {name}: {_ratios(busy, quiet)}"
            if name == OURS:
                text += f" (p99 at most {MOST_P99_RATIO} x)"
                is_met = _ratio(busy, quiet, 0.99, "seconds") <= MOST_P99_RATIO
                is_enough = len(busy) >= LEAST_STEPS
                text = _verdict(text, is_met) if is_enough else f"{text}: too few to judge"
            yield text
    beside, alone = (
        chosen_steps(measured.visits.get((name, "local"), ()), **_QUIET)
        for name in (BESIDE_COPIES, ALONE)
    )
    if beside and alone:
        yield f"decode steps, {BESIDE_COPIES}: {_ratios(beside, alone)}"


def _ratios(ones: Sequence[Step], others: Sequence[Step]) -> str:
    by_clock, by_cpu = (
        f"p99 {_ratio(ones, others, 0.99, name):.2f} x, p50 {_ratio(ones, others, 0.5, name):.2f} x"
        for name in ("seconds", "cpu_seconds")
    )
    return f"{by_clock} of those beside none, {by_cpu} by CPU time"


def _ratio(ones: Sequence[Step], others: Sequence[Step], share: float, name: str) -> float:
    one, other = (
        percentile([getattr(step, name) for step in steps], share) for steps in (ones, others)
    )
    return one / other


def _verdict(text: str, is_met: bool) -> str:
    return f"{text}: {'met' if is_met else 'NOT MET'}"
