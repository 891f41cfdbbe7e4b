# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The results of serving a trace, and their table. The module imports nothing of vLLM."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field

from common.report import Table

CEILING_UNIT_TOKENS = 128
"""The hit unit of the endless cache with which hit rates are compared."""

MAX_POINTS_BELOW = 5.0
"""The largest allowed loss of the host tier against that cache, in percentage points."""

_MIB = 1 << 20


class Variant(enum.Enum):
    """The variants: a retention policy on the device, with or without a host tier."""

    DENSE = "dense"
    ADAPTIVE = "adaptive"
    DENSE_HOST = "dense+host"
    ADAPTIVE_HOST = "adaptive+host"

    @property
    def policy(self) -> str | None:
        return "adaptive" if self.value.startswith("adaptive") else None

    @property
    def has_host(self) -> bool:
        return self.value.endswith("+host")


@dataclass(slots=True)
class HostUse:
    """The use of the host tier.

    Attributes:
        computed_tokens: The number of different tokens of the trace, in prompts and answers.
        num_leaks: The number of blocks and pins that were held at the end. It must be 0.
    """

    row_bytes: int
    tail_bytes: int
    num_tails: int
    bytes_held: int
    computed_tokens: int
    shortfalls: dict[str, int]
    refusals: dict[str, int]
    num_leaks: int

    def mib_per_1024_tokens(self, num_bytes: int) -> float:
        return num_bytes / _MIB / (self.computed_tokens / 1024)


@dataclass(slots=True)
class Result:
    """One variant.

    Attributes:
        hit_rate: The share of all prompt tokens that were hit.
        ceiling: The hit rate in an endless cache.
        host: The use of the host tier; None without one.
    """

    hit_rate: float
    ceiling: float
    scheduler_ms_per_request: float
    num_preemptions: int
    host: HostUse | None


@dataclass(slots=True)
class Row:
    """All variants of one trace on one layout.

    Attributes:
        pool: The size of the pool, as a share of the dense footprint.
        results: The results by variant. Some are missing if the trace fits into no pool.
    """

    layout: str
    trace: str
    scale: float
    num_requests: int
    pool: float = 0.0
    num_blocks: int = 0
    results: dict[Variant, Result] = field(default_factory=dict)

    @property
    def is_complete(self) -> bool:
        return len(self.results) == len(Variant)

    @property
    def ceiling(self) -> float:
        """The highest ceiling of all variants. It depends a little on the order of requests."""
        return max(result.ceiling for result in self.results.values())

    @property
    def points_below(self) -> float:
        """The points by which the better variant with a host tier misses the ceiling."""
        rates = [result.hit_rate for variant, result in self.results.items() if variant.has_host]
        return 100 * (self.ceiling - max(rates))

    @property
    def is_good(self) -> bool:
        """Whether the row is within the limit, and nothing is held at the end."""
        hosts = [result.host for result in self.results.values() if result.host is not None]
        return (
            self.is_complete
            and self.points_below <= MAX_POINTS_BELOW
            and not any(host.num_leaks for host in hosts)
        )


TABLE = Table(
    "layout:<15",
    "trace:<7",
    "pool:>5",
    "blocks:>7",
    "dense:>6",
    "adapt.:>6",
    "d+host:>6",
    "a+host:>6",
    "ceil.:>6",
    "below:>6",
    "rows:>6",
    "tails:>6",
    "MiB/tail:>8",
    "CPU ms per request:>23",
)


def line(row: Row) -> str:
    """One row: hit rates in percent, MiB of host memory per 1,024 tokens, CPU by variant."""
    cells = [row.layout, row.trace, f"{row.pool:.0%}", f"{row.num_blocks:,}"]
    if not row.is_complete:
        return TABLE.line(*cells, *[None] * 9, "does not fit")
    cells += [f"{100 * row.results[variant].hit_rate:.1f}" for variant in Variant]
    cells += [f"{100 * row.ceiling:.1f}", f"{row.points_below:.1f}"]
    host = row.results[Variant.ADAPTIVE_HOST].host
    assert host is not None
    cells += [f"{host.mib_per_1024_tokens(n):.2f}" for n in (host.row_bytes, host.tail_bytes)]
    cells.append(f"{host.tail_bytes / _MIB / max(1, host.num_tails):.2f}")
    times = (f"{row.results[each].scheduler_ms_per_request:5.2f}" for each in Variant)
    return TABLE.line(*cells, "/".join(times))


def why_not(row: Row) -> Iterable[str]:
    """One line per variant with a host tier: the missed tokens, and why."""
    for variant, result in row.results.items():
        host = result.host
        if host is None:
            continue
        leaks = f"  LEAKS {host.num_leaks}" if host.num_leaks else ""
        yield (
            f"    {variant.value:14} why not: {_counts(host.shortfalls)}; "
            f"not stored: {_counts(host.refusals)}; preempted {result.num_preemptions}{leaks}"
        )


def _counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "-"


def summary(rows: Iterable[Row]) -> str:
    """The number of rows within the limit."""
    every = list(rows)
    good = sum(row.is_good for row in every)
    return f"{good} of {len(every)} rows within {MAX_POINTS_BELOW:g} points of the ceiling"
