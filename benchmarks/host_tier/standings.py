# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The table of host tiers at equal bytes. The module imports nothing of vLLM.

A hit rate is the share of all prompt tokens that were not computed. "Way" is the share of the way
from plain LRU to the tier that knows the future.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from common.report import Table, verdict

OURS = "kvext"
LRU = "lru"
BOUND = "clairvoyant"
PEERS = (LRU, "lmcache", "vllm", "vllm+answers")
COLUMNS = ("device", *PEERS, OURS, BOUND)
MAX_POINTS_BEHIND = 0.5
"""A cell is lost if the best of the others is ahead by more."""

POINTS_AHEAD = 5.0
"""A cell is won if ours is ahead of the best of the others by as much."""

MIN_WAY_POINTS = 1.0
"""Between LRU and the bound there are at least so many points, or there is no way to go."""


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where host tiers are compared.

    Attributes:
        share: The size of host memory, as a share of the footprint.
    """

    layout: str
    workload: str
    share: float


@dataclass(frozen=True, slots=True)
class Standing:
    """The hit rates of one place, in per cent, by contender. There is one per seed.

    Attributes:
        ceiling: The hit rate of an endless cache with blocks of the layout's hash.
        scheduler_s: By contender, the CPU time of the scheduler with its connector, for all seeds.
    """

    place: Place
    ceiling: Sequence[float]
    points: Mapping[str, Sequence[float]]
    scheduler_s: Mapping[str, float] = field(default_factory=dict)

    def mean(self, contender: str) -> float | None:
        points = self.points.get(contender)
        return statistics.fmean(points) if points else None

    @property
    def best_peer(self) -> str | None:
        """The best of the others, by its mean. None if there is none, or nothing of ours."""
        means = {peer: mean for peer in PEERS if (mean := self.mean(peer)) is not None}
        return max(means, key=means.__getitem__) if means and self.points.get(OURS) else None

    @property
    def leads(self) -> list[float]:
        """By seed, the points by which ours is ahead of the best of the others."""
        peer = self.best_peer
        if peer is None:
            return []
        pairs = zip(self.points[OURS], self.points[peer], strict=True)
        return [ours - other for ours, other in pairs]

    @property
    def way(self) -> float | None:
        """The share of the way from LRU to the bound. None if they are too near to each other."""
        ends = [self.mean(name) for name in (LRU, OURS, BOUND)]
        if None in ends or ends[2] - ends[0] < MIN_WAY_POINTS:
            return None
        return (ends[1] - ends[0]) / (ends[2] - ends[0])


def standard_error(values: Sequence[float]) -> float | None:
    """The standard error of the mean; None for one value."""
    if len(values) < 2:
        return None
    return statistics.stdev(values) / len(values) ** 0.5


TABLE = Table(
    "layout:<15",
    "workload:<15",
    "host:>5",
    *(f"{name}:>{max(7, len(name))}" for name in COLUMNS),
    "ceiling:>7",
    "lead:>6",
    "±:>4",
    "way:>5",
)


def line(standing: Standing) -> str:
    """One place: means in per cent, the lead with its standard error, and the way."""
    place = standing.place
    means = [standing.mean(name) for name in COLUMNS]
    leads = standing.leads
    error = standard_error(leads)
    return TABLE.line(
        place.layout,
        place.workload,
        f"{place.share:.0%}",
        *(None if mean is None else f"{mean:.1f}" for mean in means),
        f"{statistics.fmean(standing.ceiling):.1f}",
        f"{statistics.fmean(leads):+.1f}" if leads else None,
        None if error is None else f"{error:.1f}",
        None if standing.way is None else f"{standing.way:.2f}",
    )


def verdicts(standings: Iterable[Standing]) -> Iterator[str]:
    """The lines about targets that are met, and about targets that are not met."""
    compared = [each for each in standings if each.leads]
    lost = [each for each in compared if statistics.fmean(each.leads) < -MAX_POINTS_BEHIND]
    yield verdict(not lost, f"behind by more than {MAX_POINTS_BEHIND} points: {_places(lost)}")
    small = [each for each in compared if each.place.share <= 0.25]
    won = [each for each in small if statistics.fmean(each.leads) >= POINTS_AHEAD]
    yield verdict(
        2 * len(won) >= len(small),
        f"ahead by {POINTS_AHEAD:g} points or more in {len(won)} of {len(small)} cells at 25 % and "
        "less",
    )
    ways = [each.way for each in compared if each.way is not None]
    if ways:
        yield f"way from LRU to the bound: {statistics.fmean(ways):.2f} in the mean of {len(ways)}"
    for other in ("vllm", "device"):
        pairs = [
            (each.scheduler_s[OURS], each.scheduler_s[other])
            for each in compared
            if OURS in each.scheduler_s and other in each.scheduler_s
        ]
        if pairs:
            ours_s, others_s = map(sum, zip(*pairs, strict=True))
            yield (
                f"CPU time of the scheduler: {ours_s / others_s:.2f} times that of {other}, sums "
                f"of {len(pairs)} cells"
            )


def _places(standings: Sequence[Standing]) -> str:
    named = (
        f"{each.place.layout} {each.place.workload} {each.place.share:.0%} "
        f"({statistics.fmean(each.leads):+.1f} to {each.best_peer})"
        for each in standings
    )
    return f"{len(standings)} cells" + "".join(f"; {name}" for name in named)
