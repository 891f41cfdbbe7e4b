# SPDX-License-Identifier: Apache-2.0
"""Computes the beginning of a prompt while its end is loaded, where that is faster than either.

A load uses the link to host memory, computing uses the device: both at once take the time of the
slower one. The beginning is what is computed, because it needs nothing that is loaded, and because
attention makes it the cheapest part (S. Jin et al., "Compute Or Load KV Cache? Why Not Both?",
arXiv 2410.03065)::

    tokens     0 ──────────── split ───────────── boundary
    at once    [computed        ][loaded                  ]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Hit

LEAST_GAIN = 0.1
"""Of the time that the load alone takes: estimates are not better than that."""


class Cost(Protocol):
    """Estimates in seconds."""

    def load_s(self, num_bytes: int) -> float: ...

    def compute_s(self, num_tokens: int) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Split:
    """Where a hit is split, and what that takes.

    Attributes:
        tokens: Those before are computed, those behind are loaded; in no hole, but at its end.
        seconds: Until both are done.
    """

    tokens: int
    seconds: float


def best_split(hit: Hit, cost: Cost) -> Split | None:
    """The split at the start of a loaded entry that takes the least time.

    Splitting where the hit begins loads all of it; splitting at its boundary computes all of it.
    Holes behind the split are computed when the load has ended. Takes time in proportion to the
    entries of the hit.

    Returns:
        None as long as computing was not measured.
    """
    if cost.compute_s(1) is None:
        return None
    splits = list(_splits(hit, cost))
    best = min((splits[0], splits[-1]), key=_seconds)
    between = min(splits, key=_seconds)
    return between if between.seconds < (1 - LEAST_GAIN) * best.seconds else best


def _splits(hit: Hit, cost: Cost) -> Iterator[Split]:
    """From loading all to computing all."""
    rows = [entry for entry in hit.entries if entry.piece.kind is Kind.ROWS]
    num_bytes = sum(entry.num_bytes for entry in hit.all_entries)
    hole_number = 0  # of the first that lies behind the split
    later_tokens = hit.hole_tokens
    tokens = hit.after_tokens
    for number in range(len(rows)):
        if number:
            num_bytes -= rows[number - 1].num_bytes
            tokens = max(tokens, rows[number].piece.first_tokens)
        while hole_number < len(hit.holes) and hit.holes[hole_number][0] <= tokens:
            first_tokens, end_tokens = hit.holes[hole_number]
            tokens = max(tokens, end_tokens)
            later_tokens -= end_tokens - first_tokens
            hole_number += 1
        beside_s = max(_compute_s(cost, tokens - hit.after_tokens), cost.load_s(num_bytes))
        yield Split(tokens, beside_s + _compute_s(cost, later_tokens))
    yield Split(hit.boundary_tokens, _compute_s(cost, hit.num_tokens))


def _compute_s(cost: Cost, num_tokens: int) -> float:
    return cost.compute_s(num_tokens) or 0.0


def split_hit(hit: Hit, tokens: int) -> Hit:
    """The same hit, of which what lies before a split is computed.

    What is left out so is worth as much to the tier as what is loaded: where the device is busy,
    the next request loads it.
    """
    behind = [
        (hole, tails)
        for hole, tails in zip(hit.holes, hit.hole_tails, strict=True)
        if hole[1] > tokens
    ]
    loaded = replace(
        hit,
        entries=tuple(
            entry
            for entry in hit.entries
            if entry.piece.kind is not Kind.ROWS or entry.piece.end_tokens > tokens
        ),
        holes=((hit.after_tokens, tokens), *(hole for hole, _ in behind)),
        hole_tails=(None, *(tails for _, tails in behind)),
    )
    kept = set(loaded.all_entries)
    left_out = tuple(entry for entry in hit.prefix_entries if entry not in kept)
    return replace(loaded, left_out=left_out)


def _seconds(split: Split) -> float:
    return split.seconds
