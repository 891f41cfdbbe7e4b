# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt can be loaded from the host tier if holes between are computed."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from vllm_ascend_kvext.holes.span_plan import Run, plan_spans
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.runs import StoredRun
from vllm_ascend_kvext.store.tier import HostTier


def beyond_holes(tier: HostTier, hit: Hit, num_tokens: int, least_run_tokens: int) -> Hit:
    """A hit that goes on behind what is missing, or the same hit if that is not worth it.

    Where the model has windows or states, a hole is computed from the last boundary at which tails
    are stored: what the device has of them is not looked at.

    Args:
        tier: That was looked up.
        hit: What was found without a gap.
        num_tokens: Of the request; its last token is computed.
        least_run_tokens: A run behind a hole that is shorter is computed.
    """
    geometry = tier.geometry
    after_tokens = hit.after_tokens
    if after_tokens % geometry.unit_tokens or hit.shortfall is None or not geometry.needs_rows:
        return hit
    runs = tier.find_runs(hit.prefix, num_tokens - 1, after_tokens)
    if not runs or runs[-1].end_tokens <= hit.boundary_tokens:
        return hit
    tails: dict[int, Entry] = {}
    if geometry.needs_tails:
        found = tier.find_all_tails(hit.prefix, runs[-1].end_tokens, after_tokens)
        tails = {entry.piece.end_tokens: entry for entry in found}
    starts = sorted(tails) if geometry.needs_tails else None
    plan = plan_spans(
        num_tokens, geometry.unit_tokens, _cached(runs, after_tokens), starts, least_run_tokens
    )
    *holes, end = plan.computed
    if not holes or holes[0].first_tokens < after_tokens:
        return hit
    loaded = [run for run in plan.cached if run.end_tokens > after_tokens]
    rows = _entries(runs, loaded)
    boundary_tokens = end.first_tokens
    return replace(
        hit,
        boundary_tokens=boundary_tokens,
        entries=(*rows, tails[boundary_tokens]) if geometry.needs_tails else rows,
        holes=tuple((hole.first_tokens, hole.end_tokens) for hole in holes),
        hole_tails=tuple(tails.get(hole.first_tokens) for hole in holes),
        gap_tokens=hit.boundary_tokens,
    )


def _cached(runs: Sequence[StoredRun], after_tokens: int) -> list[Run]:
    """What the device has, and what the tier has behind it."""
    cached = [Run(0, after_tokens)] if after_tokens else []
    for run in runs:
        if cached and cached[-1].end_tokens == run.first_tokens:
            cached.append(Run(cached.pop().first_tokens, run.end_tokens))
        else:
            cached.append(Run(run.first_tokens, run.end_tokens))
    return cached


def _entries(runs: Sequence[StoredRun], loaded: Sequence[Run]) -> tuple[Entry, ...]:
    """Those that have rows of what is loaded, each up to where the next one of its run begins.

    What an entry has behind that is of other prompts.
    """
    found = []
    place = 0  # of the first loaded run that ends behind the entry's first row
    for stored in runs:
        for entry, following in itertools.zip_longest(stored.entries, stored.entries[1:]):
            first_tokens = max(entry.piece.first_tokens, stored.first_tokens)
            end_tokens = following.piece.first_tokens if following else stored.end_tokens
            while place < len(loaded) and loaded[place].end_tokens <= first_tokens:
                place += 1
            if place < len(loaded) and loaded[place].first_tokens < end_tokens:
                found.append(entry)
    return tuple(found)
