# SPDX-License-Identifier: Apache-2.0
"""Plain arithmetic on measured times, and which measurements count."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

from offload.workload import OFFLOADED_TOKENS, Prompt, Step, Visit, VisitKind


def union_s(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds that at least one of the intervals covers."""
    total_s = 0.0
    covered_until = -math.inf
    for start, end in sorted(intervals):
        start = max(start, covered_until)
        if end > start:
            total_s += end - start
            covered_until = end
    return total_s


def overlaps(intervals: Iterable[tuple[float, float]], start: float, end: float) -> bool:
    """Whether some of the intervals has a part in common with this one."""
    return any(first < end and start < last for first, last in intervals)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed.

    Raises:
        ValueError: There is none, or the share is not above 0 and at most 1.
    """
    if not values or not 0 < share <= 1:
        raise ValueError(f"percentile {share} of {len(values)} values")
    return sorted(values)[math.ceil(share * len(values)) - 1]


def why_not(prompt: Prompt) -> str | None:
    """Why a prompt does not count; None if it does.

    What was not stored would be the fastest store, and what was not loaded the fastest load.
    """
    if prompt.cold_hit_tokens:
        return f"the cold request hit {prompt.cold_hit_tokens} tokens"
    if prompt.warm_hit_tokens != OFFLOADED_TOKENS:
        return f"the warm request hit {prompt.warm_hit_tokens} tokens, not {OFFLOADED_TOKENS}"
    for name, moved in (("store", prompt.store), ("load", prompt.load)):
        if moved.failed:
            return f"{moved.failed} of {moved.transfers} {name}s failed"
        if not moved.transfers:
            return f"no {name} was seen"
        if moved.num_tokens not in (0, OFFLOADED_TOKENS):
            return f"the {name} was of {moved.num_tokens} tokens, not {OFFLOADED_TOKENS}"
    return None


def kind_of(visit: Visit) -> VisitKind | None:
    """Where the visitor's prompt was; None if it was in parts here and there."""
    if visit.hit_tokens == OFFLOADED_TOKENS:
        return "loaded" if visit.loads else "local"
    return None if visit.hit_tokens or visit.loads else "new"


def chosen_steps(
    visits: Iterable[Visit], has_prefill: bool | None = None, has_transfer: bool | None = None
) -> list[Step]:
    """Steps of these visits; None leaves open which."""
    return [
        step
        for visit in visits
        for step in visit.steps
        if has_prefill in (None, step.has_prefill) and has_transfer in (None, step.has_transfer)
    ]


def median_ratio(ones: Sequence[float], others: Sequence[float]) -> float:
    """The median over the rounds of (one / other), both of the same round.

    Raises:
        ValueError: The rounds are none, or not the same.
    """
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def counted(prompts: Iterable[Prompt]) -> list[Prompt]:
    """Those that count."""
    return [prompt for prompt in prompts if why_not(prompt) is None]
