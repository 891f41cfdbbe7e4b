# SPDX-License-Identifier: Apache-2.0
"""What serving a trace came to, and the table of it. Imports nothing of vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from vllm_ascend_kvext.store.worth import EvictionRule

TARGET_SHARE = 0.25
"""Of host memory: there, `TARGET_RATIO` is to be reached."""

TARGET_RATIO = 1.5
"""By how much fewer tokens are to be computed with holes than with LRU, up to the first gap."""

_GIB = 1 << 30


class Variant(enum.Enum):
    """What serves."""

    ALONE = "device"
    """The device pool, without a host tier."""

    LRU = "lru"
    """What other host tiers do: all is stored, what was used least recently gives way (of one
    request, the end first), and what is behind a missing chunk is computed."""

    PREFIX = "prefix"
    """Our choice of what is stored and gives way; read up to the first missing chunk."""

    HOLES = "holes"
    """The same choices; missing chunks are computed."""

    REUSE = "reuse"
    """Holes, and what saves least gives way first."""

    @property
    def fills_holes(self) -> bool:
        return self in (Variant.HOLES, Variant.REUSE)

    @property
    def eviction(self) -> EvictionRule:
        return EvictionRule.REUSE if self is Variant.REUSE else EvictionRule.LATEST_USE


@dataclass(slots=True)
class Result:
    """One variant.

    Attributes:
        computed_tokens: Of prompts; again after preemptions.
        computed_pairs: The same, each token with all before it: what attention costs.
        hole_tokens: Those of ``computed_tokens`` that lay in holes.
        held_bytes: Of the tier, at the end.
        stored_bytes: Of all stores.
        refusals: Stores that were not made, by reason.
        num_preemptions: Of running requests.
        num_leaks: Blocks and pins that were held at the end; 0 if all is well.
        scheduler_s: CPU time.
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
        layout: Its name.
        trace: Its name.
        scale: Factor on the trace's size.
        share: Host memory, of what an endless tier holds.
        num_blocks: Of the pool.
        host_bytes: Of host memory.
        num_requests: Of the trace.
        prompt_tokens: Of all requests.
        endless: With an endless tier.
        results: By variant.
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
    def worse(self) -> tuple[Variant, ...]:
        """Variants with holes that compute more tokens than the one without."""
        limit_tokens = self.results[Variant.PREFIX].computed_tokens
        return tuple(
            variant
            for variant, result in self.results.items()
            if variant.fills_holes and result.computed_tokens > limit_tokens
        )

    def to_json(self) -> dict[str, Any]:
        results = {variant.value: asdict(result) for variant, result in self.results.items()}
        return asdict(self) | {"results": results}


HEAD = (
    f"{'layout':8} {'trace':10} {'host':>5} | {'endless':>8} {'device':>8} {'lru':>8} "
    f"{'prefix':>8} {'holes':>8} {'reuse':>8} {'ratio':>6} | {'lru':>7} {'prefix':>7} {'holes':>7} "
    f"{'reuse':>7} {'ratio':>6} | {'lru':>7} {'prefix':>7} {'holes':>7} {'reuse':>7}\n"
    f"{'':25} | {'thousands of prompt tokens that are computed':59} | "
    f"{'the same in token pairs, 10^9':38} | {'GiB stored':31}"
)


def line(row: Row) -> str:
    """One row of the table. A ratio is that of lru and reuse: above 1, reuse is better."""
    assert row.endless is not None
    tiers = [row.results[variant] for variant in Variant if variant is not Variant.ALONE]
    tokens = [row.endless, *(row.results[variant] for variant in Variant)]
    lru, reuse = row.results[Variant.LRU], row.results[Variant.REUSE]
    return (
        f"{row.layout:8} {row.trace:10} {row.share:5.0%} | "
        + " ".join(f"{result.computed_tokens / 1e3:8,.0f}" for result in tokens)
        + f" {lru.computed_tokens / reuse.computed_tokens:6.2f} | "
        + " ".join(f"{result.computed_pairs / 1e9:7.1f}" for result in tiers)
        + f" {lru.computed_pairs / reuse.computed_pairs:6.2f} | "
        + " ".join(f"{result.stored_bytes / _GIB:7.1f}" for result in tiers)
    )


def sums(rows: Iterable[Row]) -> Iterator[Row]:
    """By layout and share, all traces together."""
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
    """Which targets are met, and which are not."""
    for variant in (Variant.HOLES, Variant.REUSE):
        worse = [row for row in rows if variant in row.worse]
        named = ", ".join(f"{row.trace} at {row.share:.0%}" for row in worse) or "none"
        counts = f"{len(worse)} of {len(rows)} rows"
        yield f"{variant.value}: more tokens than prefix in {counts}: {named}"
    for total in sums(rows):
        if total.share == TARGET_SHARE:
            tokens = {variant: each.computed_tokens for variant, each in total.results.items()}
            ratio = tokens[Variant.LRU] / tokens[Variant.REUSE]
            word = "met" if ratio >= TARGET_RATIO else "missed"
            yield (
                f"{total.layout}: {ratio:.2f} times fewer tokens than lru at {total.share:.0%}; "
                f"the target of {TARGET_RATIO:g} is {word}; than prefix, "
                f"{tokens[Variant.PREFIX] / tokens[Variant.REUSE]:.2f} times"
            )
    leaks = sum(row.num_leaks for row in rows)
    yield f"blocks and pins held at the end: {leaks}"
