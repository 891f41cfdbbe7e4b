# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prints the tables of one model, and the targets with the measured values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from statistics import median

import numpy as np
from common.models import BenchModel
from common.report import Table, median_ratio, verdict

from offload.contenders import ALONE, BESIDE_COPIES, OURS
from offload.workload import (
    OFFLOADED_TOKENS,
    Prompt,
    Step,
    Visit,
    VisitKind,
    decode_steps,
    steps_after_prompts,
)

MIN_TIMES_FASTER = 3.0
MAX_P99_RATIO = 1.10
MIN_STEPS = 50
"""The minimum number of steps for a 99th percentile. With fewer steps, the percentile is just the
largest value."""

STEPS_OF_A_STORE = 2
"""The number of decode steps after a new prompt beside which its store runs."""


@dataclass(slots=True)
class Measured:
    """The measurements of one model. The rounds of all contenders are the same.

    Attributes:
        model: The name of the model.
        kv_bytes: The KV bytes if every layer keeps the offloaded tokens.
        prompts: The prompts by contender.
        visits: The valid visits, by contender and kind.
        limit_s: For each number of threads, the seconds of a streaming copy of ``kv_bytes`` in
            every round.
        notes: Further lines to print.
    """

    model: str
    kv_bytes: int
    prompts: dict[str, list[Prompt]] = field(default_factory=dict)
    visits: dict[str, dict[VisitKind, list[Visit]]] = field(default_factory=dict)
    limit_s: dict[int, list[float]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, model: BenchModel) -> Measured:
        return cls(model.name, model.kv_bytes(OFFLOADED_TOKENS))


def lines(measured: Measured) -> Iterator[str]:
    """All lines about one model."""
    yield (
        f"\n{measured.model}: {measured.kv_bytes / 1e6:.0f} MB if every layer keeps "
        f"{OFFLOADED_TOKENS:,} tokens; GB/s are of these bytes, whatever was moved"
    )
    yield from _prompt_table(measured)
    yield from _decode_table(measured)
    yield from (f"note: {note}" for note in measured.notes)
    yield "Targets"
    yield from targets(measured)


PROMPTS = Table(
    "median:<40",
    "store s:>9",
    "GB/s:>6",
    "load s:>9",
    "GB/s:>6",
    "cold s:>9",
    "warm s:>9",
    "warm/cold:>9",
    "prompts:>7",
)
STEPS = Table(
    "decoding beside a prompt that is:<50",
    "all p50 ms:>11",
    "p99:>7",
    "steps:>6",
    "a transfer runs:>16",
    "p99:>7",
    "steps:>6",
    "none runs:>16",
    "p99:>7",
    "steps:>6",
)


def _prompt_table(measured: Measured) -> Iterator[str]:
    def speed(seconds: Sequence[float]) -> tuple[str, str]:
        return f"{median(seconds):.3f}", f"{measured.kv_bytes / median(seconds) / 1e9:.2f}"

    yield PROMPTS.head
    for threads, seconds in measured.limit_s.items():
        name = f"streaming copy, threads: {threads}"
        yield PROMPTS.line(name, *speed(seconds) * 2, *[None] * 3, len(seconds))
    for name, prompts in measured.prompts.items():
        if name == ALONE:
            cold_s = f"{median(_all(prompts, 'cold_s')):.3f}"
            yield PROMPTS.line(name, *[None] * 4, cold_s, None, None, len(prompts))
            continue
        good = [prompt for prompt in prompts if prompt.why_not is None]
        if good:
            cold_s = _all(good, "cold_s")
            warm_s = _all(good, "warm_s")
            numbers = (median(cold_s), median(warm_s), median_ratio(warm_s, cold_s))
            yield PROMPTS.line(
                name,
                *speed(_all(good, "store.seconds")),
                *speed(_all(good, "load.seconds")),
                *(f"{number:.3f}" for number in numbers),
                len(good),
            )
        left_out = Counter(prompt.why_not for prompt in prompts)
        yield from (f"  {count} left out: {why}" for why, count in left_out.items() if why)
        for direction in ("store", "load") if good else ():
            yield _details(good, direction)


def _details(good: Sequence[Prompt], direction: str) -> str:
    seconds = _all(good, f"{direction}.seconds")
    line = f"  {direction}: {min(seconds):.3f} to {max(seconds):.3f} s"
    num_bytes = median(_all(good, f"{direction}.num_bytes"))
    copy_s = median(_all(good, f"{direction}.copy_seconds"))
    if num_bytes and copy_s:
        line += f"; {num_bytes / 1e6:.0f} MB moved, {copy_s:.3f} s of it copies, "
        line += f"{num_bytes / copy_s / 1e9:.2f} GB/s"
    return line


def _all(prompts: Sequence[Prompt], name: str) -> list[float]:
    return [attrgetter(name)(prompt) for prompt in prompts]


def _decode_table(measured: Measured) -> Iterator[str]:
    yield STEPS.head
    for name, by_kind in measured.visits.items():
        for kind, visits in sorted(by_kind.items()):
            every = [step for visit in visits for step in visit.steps]
            cells = [f"{kind}: {name}"]
            for steps in (every, decode_steps(visits, True), decode_steps(visits, False)):
                ms = [f"{1e3 * percentile(steps, share):.1f}" for share in (50, 99) if steps]
                cells += [*ms, str(len(steps))] if steps else ["", "", ""]
            yield STEPS.line(*cells)


def targets(measured: Measured) -> Iterator[str]:
    """The targets of the project, and the measured values."""
    ours = measured.prompts.get(OURS, [])
    for name, theirs in measured.prompts.items():
        if name in (OURS, ALONE):
            continue
        for direction in ("store", "load"):
            pairs = [
                (getattr(their, direction).seconds, getattr(our, direction).seconds)
                for our, their in zip(ours, theirs, strict=True)
                if our.why_not is None and their.why_not is None
            ]
            if pairs:
                ratio = median_ratio(*zip(*pairs, strict=True))
                yield verdict(
                    ratio >= MIN_TIMES_FASTER,
                    f"{direction}: {ratio:.1f} x the throughput of {name} (at least "
                    f"{MIN_TIMES_FASTER:.0f} x), median of {len(pairs)} pairs",
                )
    for name, by_kind in measured.visits.items():
        for kind, what in (("loaded", "loads"), ("new", "stores")):
            visits = by_kind.get(kind, ())
            busy = decode_steps(visits, True)
            quiet = decode_steps(visits, False)
            if not busy or not quiet:
                continue
            text = f"{len(busy)} decode steps while {what} run, {name}: {_ratios(busy, quiet)}"
            if name == OURS and len(busy) >= MIN_STEPS:
                is_met = _ratio(busy, quiet, 99) <= MAX_P99_RATIO
                yield verdict(is_met, f"{text} (p99 at most {MAX_P99_RATIO} x)")
            else:
                yield text + (": too few to judge" if name == OURS else "")
    beside, alone = (
        decode_steps(measured.visits.get(name, {}).get("local", ()), False)
        for name in (BESIDE_COPIES, ALONE)
    )
    if beside and alone:
        yield f"decode steps, {BESIDE_COPIES}: {_ratios(beside, alone)}"
    # A prompt takes the caches of the CPU from the steps behind it, with and without a store.
    storing, alone = (
        steps_after_prompts(measured.visits.get(name, {}).get("new", ()), STEPS_OF_A_STORE)
        for name in (OURS, ALONE)
    )
    if storing and alone:
        num_busy = sum(step.has_transfer for step in storing)
        yield (
            f"{len(storing)} decode steps right after new prompts, {OURS} ({num_busy} beside "
            f"stores): {_ratios(storing, alone, f'those with {ALONE}')}"
        )


def _ratios(ones: Sequence[Step], others: Sequence[Step], of: str = "those beside none") -> str:
    by_clock, by_cpu = (
        f"p99 {_ratio(ones, others, 99, name):.2f} x, p50 {_ratio(ones, others, 50, name):.2f} x"
        for name in ("seconds", "cpu_seconds")
    )
    return f"{by_clock} of {of}, {by_cpu} by CPU time"


def _ratio(
    ones: Sequence[Step], others: Sequence[Step], share: int, name: str = "seconds"
) -> float:
    return percentile(ones, share, name) / percentile(others, share, name)


def percentile(steps: Sequence[Step], share: int, name: str = "seconds") -> float:
    """The smallest value that at least ``share`` per cent of the steps do not exceed."""
    values = [getattr(step, name) for step in steps]
    return float(np.percentile(values, share, method="inverted_cdf"))
