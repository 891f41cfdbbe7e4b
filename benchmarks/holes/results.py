# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The results of serving a trace, and their table. The module imports nothing of vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

MAX_RATIO = 1.05
"""The largest allowed ratio to the computed tokens of LRU in one row. A policy that learns can be
wrong."""

_GIB = 1 << 30


class Variant(enum.Enum):
    """The variants that serve a trace."""

    ALONE = "device"
    """The device pool, without a host tier."""

    LRU = "lru"
    """A host tier like others: everything is stored, the least recently used entry is evicted (the
    end of a request first), and everything behind a missing chunk is computed."""

    PREFIX = "prefix"
    """Our policies of storing and eviction. A prompt is read up to the first missing chunk."""

    HOLES = "holes"
    """Our policies of storing and eviction. Missing chunks are computed."""


@dataclass(slots=True)
class Result:
    """One variant.

    Attributes:
        computed_tokens: The computed tokens of prompts. Tokens that are computed again after a
            preemption count again.
        computed_pairs: The pairs of a computed token and a token before it: the cost of attention.
        hole_tokens: The part of ``computed_tokens`` in holes.
        num_leaks: The number of blocks and pins that were held at the end. It must be 0.
        scheduler_s: The CPU time of the scheduler.
    """

    computed_tokens: int
    computed_pairs: int
    hole_tokens: int
    held_bytes: int = 0
    stored_bytes: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    num_leaks: int = 0
    scheduler_s: float = 0.0


@dataclass(slots=True)
class Row:
    """All variants of one trace on one layout with one size of host memory.

    Attributes:
        share: The size of host memory, as a share of what an endless tier holds.
        endless: The result with an endless tier.
    """

    layout: str
    trace: str
    scale: float
    share: float
    num_blocks: int
    host_bytes: int
    num_requests: int = 0
    prompt_tokens: int = 0
    endless: Result | None = None
    results: dict[Variant, Result] = field(default_factory=dict)

    @property
    def num_leaks(self) -> int:
        return sum(result.num_leaks for result in self.results.values())

    @property
    def ratio(self) -> float:
        """The tokens computed with holes, divided by the tokens computed with LRU."""
        holes = self.results[Variant.HOLES]
        lru = self.results[Variant.LRU]
        return holes.computed_tokens / lru.computed_tokens

    @property
    def is_worse_with_holes(self) -> bool:
        """Whether more tokens are computed with holes than without."""
        holes = self.results[Variant.HOLES]
        prefix = self.results[Variant.PREFIX]
        return holes.computed_tokens > prefix.computed_tokens


HEAD = (
    f"{'layout':8} {'trace':10} {'host':>5} | {'endless':>8} {'device':>8} {'lru':>8} "
    f"{'prefix':>8} {'holes':>8} {'ratio':>6} | {'lru':>7} {'prefix':>7} {'holes':>7} "
    f"{'ratio':>6} | {'lru':>7} {'prefix':>7} {'holes':>7}\n"
    f"{'':25} | {'thousands of prompt tokens that are computed':51} | "
    f"{'the same in token pairs, 10^9':30} | {'GiB stored':23}"
)


def line(row: Row) -> str:
    """One row of the table. A ratio is holes divided by lru; below 1, holes is better."""
    assert row.endless is not None
    tiers = [row.results[variant] for variant in Variant if variant is not Variant.ALONE]
    tokens = [row.endless, *(row.results[variant] for variant in Variant)]
    lru = row.results[Variant.LRU]
    holes = row.results[Variant.HOLES]
    return (
        f"{row.layout:8} {row.trace:10} {row.share:5.0%} | "
        + " ".join(f"{result.computed_tokens / 1e3:8,.0f}" for result in tokens)
        + f" {holes.computed_tokens / lru.computed_tokens:6.2f} | "
        + " ".join(f"{result.computed_pairs / 1e9:7.1f}" for result in tiers)
        + f" {holes.computed_pairs / lru.computed_pairs:6.2f} | "
        + " ".join(f"{result.stored_bytes / _GIB:7.1f}" for result in tiers)
    )


def sums(rows: Iterable[Row]) -> Iterator[Row]:
    """The sums over all traces, by layout and share."""
    totals: dict[tuple[str, float], Row] = {}
    for row in rows:
        assert row.endless is not None
        total = totals.setdefault(
            (row.layout, row.share), Row(row.layout, "sum", row.scale, row.share, 0, 0)
        )
        total.num_requests += row.num_requests
        total.prompt_tokens += row.prompt_tokens
        total.host_bytes += row.host_bytes
        total.endless = _sum(total.endless, row.endless)
        for variant, result in row.results.items():
            total.results[variant] = _sum(total.results.get(variant), result)
    return iter(totals.values())


def _sum(one: Result | None, other: Result) -> Result:
    if one is None:
        return other
    return Result(
        one.computed_tokens + other.computed_tokens,
        one.computed_pairs + other.computed_pairs,
        one.hole_tokens + other.hole_tokens,
        stored_bytes=one.stored_bytes + other.stored_bytes,
        num_preemptions=one.num_preemptions + other.num_preemptions,
        num_leaks=one.num_leaks + other.num_leaks,
        scheduler_s=one.scheduler_s + other.scheduler_s,
    )


def verdicts(rows: list[Row]) -> Iterator[str]:
    """The lines about targets that are met, and targets that are not met."""
    worse = [row for row in rows if row.is_worse_with_holes]
    named = ", ".join(f"{row.trace} at {row.share:.0%}" for row in worse) or "none"
    yield f"holes: more tokens than prefix in {len(worse)} of {len(rows)} rows: {named}"
    worst = max(rows, key=lambda row: row.ratio)
    word = "met" if worst.ratio <= MAX_RATIO else "missed"
    yield (
        f"holes: at most {worst.ratio:.3f} times the tokens of lru, for {worst.trace} at "
        f"{worst.share:.0%}; the bound of {MAX_RATIO:g} is {word}"
    )
    for total in sums(rows):
        yield f"{total.layout}: {total.ratio:.3f} times the tokens of lru at {total.share:.0%}"
    leaks = sum(row.num_leaks for row in rows)
    yield f"blocks and pins held at the end: {leaks}"
