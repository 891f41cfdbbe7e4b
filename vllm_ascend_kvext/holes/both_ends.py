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

from dataclasses import replace
from typing import Protocol

from vllm_ascend_kvext.holes.load_plan import LoadPlan, Span

MIN_GAIN = 0.1
"""Of the time that the load alone takes: estimates are not better than that."""


class Cost(Protocol):
    """Estimates in seconds."""

    def load_s(self, num_bytes: int) -> float: ...

    def compute_s(self, num_tokens: int) -> float | None: ...


def fastest(plan: LoadPlan, cost: Cost) -> LoadPlan | None:
    """The plan, or the one of the same prompt whose beginning is computed, that takes least time.

    It is split where a loaded span begins. Holes behind the split are computed when the load has
    ended. Takes time in proportion to the spans.

    Returns:
        None if computing all of it takes the least time. The plan itself as long as computing was
        not measured.
    """
    if cost.compute_s(1) is None:
        return plan
    num_bytes = sum(entry.num_bytes for entry in plan.tails.values())
    hole_tokens = 0  # behind the split
    split, split_s = plan.boundary_tokens, _compute_s(cost, plan.num_tokens)
    compute_all_s = load_all_s = split_s
    following: Span | None = None
    for span in reversed(plan.spans):
        if span.is_computed:
            hole_tokens += span.num_tokens
        elif span.entry is not None:
            if following is None or following.entry is not span.entry:
                num_bytes += span.entry.num_bytes
            following = span
            compute_s = _compute_s(cost, span.first_tokens - plan.after_tokens)
            load_all_s = max(compute_s, cost.load_s(num_bytes)) + _compute_s(cost, hole_tokens)
            if load_all_s <= split_s:
                split, split_s = span.first_tokens, load_all_s
    # `load_all_s` is that of the first loaded span by now: what lies before it is computed anyway.
    if split_s >= (1 - MIN_GAIN) * min(load_all_s, compute_all_s):
        return plan if load_all_s <= compute_all_s else None
    return _computed_up_to(plan, split)


def _computed_up_to(plan: LoadPlan, tokens: int) -> LoadPlan:
    """The plan that computes what lies before the beginning of a loaded span."""
    if tokens == plan.after_tokens:
        return plan
    behind = (span for span in plan.spans if span.first_tokens >= tokens)
    return replace(
        plan,
        spans=(Span(plan.after_tokens, tokens, is_computed=True), *behind),
        tails={boundary: tails for boundary, tails in plan.tails.items() if boundary > tokens},
    )


def _compute_s(cost: Cost, num_tokens: int) -> float:
    return cost.compute_s(num_tokens) or 0.0
