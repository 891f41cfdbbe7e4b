# SPDX-License-Identifier: Apache-2.0
"""How much of a prompt can be loaded from the host tier if holes between are computed.

For models that are all full attention: a hole then needs the rows before it, and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.holes.span_plan import CachedRows, Run, plan_spans
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import Hit
from vllm_ascend_kvext.store.runs import StoredRun
from vllm_ascend_kvext.store.tier import HostTier


def beyond_holes(tier: HostTier, hit: Hit, num_tokens: int, least_run_tokens: int) -> Hit:
    """A hit that goes on behind what is missing, or the same hit if that is not worth it.

    Args:
        tier: That was looked up.
        hit: What was found without a gap.
        num_tokens: Of the request; its last token is computed.
        least_run_tokens: A run behind a hole that is shorter is computed.
    """
    unit_tokens = tier.geometry.unit_tokens
    if hit.after_tokens % unit_tokens or hit.shortfall is None:
        return hit
    runs = tier.find_runs(hit.prefix, num_tokens - 1, hit.after_tokens)
    plan = plan_spans(num_tokens, unit_tokens, [_cached(runs, hit.after_tokens)], least_run_tokens)
    *holes, end = plan.computed
    if not holes:
        return hit
    loaded = [run for run in plan.cached if run.end_tokens > hit.after_tokens]
    return replace(
        hit,
        boundary_tokens=end.first_tokens,
        entries=_entries(runs, loaded),
        holes=tuple((hole.first_tokens, hole.end_tokens) for hole in holes),
    )


def _cached(runs: Sequence[StoredRun], after_tokens: int) -> CachedRows:
    """What the device has, and what the tier has behind it."""
    cached = [Run(0, after_tokens)] if after_tokens else []
    for run in runs:
        if cached and cached[-1].end_tokens == run.first_tokens:
            cached.append(Run(cached.pop().first_tokens, run.end_tokens))
        else:
            cached.append(Run(run.first_tokens, run.end_tokens))
    return CachedRows(GroupKind.FULL, cached)


def _entries(runs: Sequence[StoredRun], loaded: Sequence[Run]) -> tuple[Entry, ...]:
    """Those that have rows of what is loaded."""
    return tuple(
        entry
        for stored in runs
        for entry in stored.entries
        if any(
            entry.piece.first_tokens < run.end_tokens and run.first_tokens < entry.piece.end_tokens
            for run in loaded
        )
    )
