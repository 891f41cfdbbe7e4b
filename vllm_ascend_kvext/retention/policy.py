# SPDX-License-Identifier: Apache-2.0
"""Which boundaries are worth keeping: the one place where all ideas about that meet.

Pure functions of lengths. Knows no blocks: `HitGeometry` turns a boundary into blocks,
`IntervalRetention` and `AdaptiveRetention` cache them. Which give way when blocks run short, the
compiled `RetainedCache` decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.ladder import ladder_boundaries
from vllm_ascend_kvext.retention.reasons import Origin, Reason

GRID_SHARE = 4
"""Blocks of full attention per block that the tails of the automatic grid take."""

Plan = Mapping[int, Reason]
"""Boundaries of one request, in tokens, whose tails are to outlive it."""

_GRID = Reason(Origin.GRID)


def _always(reason: Reason) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """What `VLLM_PREFIX_CACHE_RETENTION_INTERVAL` and `VLLM_ASCEND_KVEXT_RETENTION` mean.

    Attributes:
        geometry: What a lookup can hit.
        interval_tokens: A positive multiple of ``geometry.unit_tokens`` keeps every multiple of
            it; 0 keeps none for that reason.
        is_adaptive: Whether boundaries are also kept for what requests ask for.
        ladder_budget: Blocks that the rungs of a prompt may take, per full-attention block of it.
        grid_tokens: The distance of checkpoints that nobody asked for; 0 if there are none.
    """

    geometry: HitGeometry
    interval_tokens: int
    is_adaptive: bool = False
    ladder_budget: float = 4.0
    grid_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid_tokens", self._choose_grid_tokens())

    def replay_boundary_tokens(self, num_prompt_tokens: int) -> int:
        """Where a request with the same prompt hits: its last token is always computed."""
        return self.geometry.reachable_tokens(num_prompt_tokens - 1)

    def plan(
        self,
        num_prompt_tokens: int,
        hit_tokens: int = 0,
        demand: Plan | None = None,
        is_worth_trying: Callable[[Reason], bool] = _always,
    ) -> dict[int, Reason]:
        """The boundaries of a request that are known when it is admitted.

        Args:
            num_prompt_tokens: Length of its prompt.
            hit_tokens: What it need not compute.
            demand: Boundaries that it, or other requests, have asked for; they go first.
            is_worth_trying: Whether a boundary that nobody asked for may turn out useful.
        """
        replay_tokens = self.replay_boundary_tokens(num_prompt_tokens)
        plan = {replay_tokens: Reason(Origin.PROMPT)}
        if self.is_adaptive:
            unit_tokens = self.geometry.unit_tokens
            prompt_blocks = self.geometry.num_blocks_per_unit * num_prompt_tokens / unit_tokens
            for rung, tokens in ladder_boundaries(
                self.geometry, replay_tokens, hit_tokens, self.ladder_budget * prompt_blocks
            ):
                reason = Reason(Origin.LADDER, rung)
                if is_worth_trying(reason):
                    plan[tokens] = reason
        plan.update(demand or {})
        return plan

    def lasting_boundaries(
        self, plan: Plan, after_tokens: int, upto_tokens: int
    ) -> list[tuple[int, Reason]]:
        """Boundaries in ``(after_tokens, upto_tokens]`` whose tails outlive the request, sorted."""
        boundaries = {
            tokens: reason
            for tokens, reason in plan.items()
            if after_tokens < tokens <= upto_tokens
        }
        if grid_tokens := self.grid_tokens:
            first = (after_tokens // grid_tokens + 1) * grid_tokens
            for tokens in range(first, upto_tokens + 1, grid_tokens):
                if tokens not in boundaries and self.geometry.is_boundary(tokens):
                    boundaries[tokens] = _GRID
        return sorted(boundaries.items())

    def _choose_grid_tokens(self) -> int:
        """The interval, if one is given.

        Without one, adaptive retention takes the shortest power of two of units at which
        tails take at most one block per `GRID_SHARE` blocks of full attention.
        """
        if self.interval_tokens or not self.is_adaptive:
            return self.interval_tokens
        geometry = self.geometry
        full_blocks = geometry.num_blocks_per_unit
        tail_blocks = geometry.num_tail_blocks
        if not full_blocks or not tail_blocks or geometry.has_states:
            return 0  # a state exists only where a prefill step happens to end
        grid_units = GRID_SHARE * tail_blocks / full_blocks
        return geometry.unit_tokens << max(0, math.ceil(math.log2(grid_units)))


def parse_interval(text: str, unit_tokens: int, check_unit: bool = True) -> int:
    """Validate an interval given as text.

    Args:
        text: The value of ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``.
        unit_tokens: The granularity of prefix-cache hits.
        check_unit: Whether a multiple of the unit is required.

    Returns:
        The interval in tokens.

    Raises:
        ValueError: If it is not an integer, is negative, or is not a multiple of the unit.
    """
    try:
        interval_tokens = int(text)
    except ValueError:
        problem, nearby_tokens = "not an integer", _integer_near(text)
    else:
        if interval_tokens >= 0 and not (check_unit and interval_tokens % unit_tokens):
            return interval_tokens
        problem = "negative" if interval_tokens < 0 else f"not a multiple of {unit_tokens}"
        nearby_tokens = max(0, interval_tokens)
    below = nearby_tokens // unit_tokens * unit_tokens
    raise ValueError(
        f"VLLM_PREFIX_CACHE_RETENTION_INTERVAL={text!r} is {problem}. Expected 0 or a multiple of "
        f"{unit_tokens} tokens, the unit at which this model's prefix cache can hit. "
        f"The nearest valid values are {below} and {below + unit_tokens}; "
        "unset the variable to cache densely."
    )


def _integer_near(text: str) -> int:
    """The non-negative integer below a number; 0 where the text is no finite number."""
    try:
        return max(0, math.floor(float(text)))
    except (ValueError, OverflowError):
        return 0
