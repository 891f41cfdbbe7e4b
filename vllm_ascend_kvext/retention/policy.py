# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which boundaries are worth keeping.

The policy knows lengths, and no blocks. `HitGeometry` turns a boundary into blocks.
`CheckpointRetention` caches these blocks. If blocks run short, the compiled `RetainedCache` decides
which blocks give way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.reasons import Origin, Reason

if TYPE_CHECKING:
    from vllm_ascend_kvext._native import Geometry

GRID_SHARE = 4
"""The tails of the automatic grid take one block per this many blocks of full attention."""

Plan = Mapping[int, Reason]
"""The boundaries, in tokens, whose tails are to outlive the request."""


@dataclass(frozen=True, slots=True)
class RetentionPolicy:
    """The meaning of `VLLM_PREFIX_CACHE_RETENTION_INTERVAL` and `VLLM_ASCEND_KVEXT_RETENTION`.

    Attributes:
        interval_tokens: Every multiple of this number is kept. It is a multiple of
            ``geometry.unit_tokens``; 0 if no interval is set.
        is_adaptive: Whether boundaries are also kept for what requests ask for.
        ladder_budget: The number of blocks that the rungs of a prompt may take, per full-attention
            block of the prompt.
        rung_tokens: Rungs are multiples of this number, and it is the distance of the nearest. 0 is
            the unit.
        grid_tokens: The distance of checkpoints that no request asked for; 0 if there are none.
        tables: ``geometry`` and the grid as the compiled module knows them.
    """

    geometry: HitGeometry
    interval_tokens: int
    is_adaptive: bool = False
    ladder_budget: float = 4.0
    rung_tokens: int = 0
    grid_tokens: int = field(init=False)
    tables: Geometry = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "grid_tokens", self._choose_grid_tokens())
        object.__setattr__(self, "tables", native().Geometry(self._describe()))

    def replay_boundary_tokens(self, num_prompt_tokens: int) -> int:
        """Where a request with the same prompt hits. The prompt's last token is always computed."""
        return self.geometry.reachable_tokens(num_prompt_tokens - 1)

    def rungs(self, num_prompt_tokens: int, hit_tokens: int) -> list[tuple[int, int]]:
        """Boundaries of a prompt that no request asked for: see `ladder_boundaries`."""
        geometry = self.geometry
        prompt_blocks = geometry.num_blocks_per_unit * num_prompt_tokens / geometry.unit_tokens
        rung_tokens = self.rung_tokens or geometry.unit_tokens
        top_tokens = self.replay_boundary_tokens(num_prompt_tokens) // rung_tokens * rung_tokens
        budget_blocks = self.ladder_budget * prompt_blocks
        return list(ladder_boundaries(geometry, top_tokens, hit_tokens, budget_blocks, rung_tokens))

    def plan(
        self,
        num_prompt_tokens: int,
        hit_tokens: int = 0,
        demand: Plan | None = None,
        is_worth_trying: Callable[[Reason], bool] = lambda reason: True,
    ) -> dict[int, Reason]:
        """The boundaries of a request that are known when it is admitted.

        Args:
            demand: Boundaries that this or other requests have asked for. If a boundary is also
                planned for another reason, the reason in ``demand`` counts.
            is_worth_trying: Whether a boundary that no request asked for may turn out useful.
        """
        plan = {self.replay_boundary_tokens(num_prompt_tokens): Reason(Origin.PROMPT)}
        if self.is_adaptive:
            for rung, tokens in self.rungs(num_prompt_tokens, hit_tokens):
                reason = Reason(Origin.LADDER, rung)
                if is_worth_trying(reason):
                    plan[tokens] = reason
        plan.update(demand or {})
        return plan

    def lasting_boundaries(
        self, plan: Plan, after_tokens: int, upto_tokens: int
    ) -> list[tuple[int, Reason]]:
        """Boundaries in ``(after_tokens, upto_tokens]`` whose tails outlive the request, sorted.

        The compiled module finds them, as for the local prefix cache.
        """
        planned = [(tokens, reason.origin, reason.step) for tokens, reason in sorted(plan.items())]
        lasting = self.tables.lasting_boundaries(planned, after_tokens, upto_tokens)
        return [(tokens, Reason(Origin(origin), step)) for tokens, origin, step in lasting]

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
            return 0  # A state exists only where a prefill step happens to end.
        grid_units = GRID_SHARE * tail_blocks / full_blocks
        return geometry.unit_tokens << max(0, math.ceil(math.log2(grid_units)))

    def _describe(self) -> dict[str, Any]:
        """The tables, for ``csrc/retention/geometry.h``; lengths are in tokens.

        From ``steady_tokens`` on, everything repeats with a period of one unit. The tables end
        there. ``hit_by_step[n]`` is the longest hit of a lookup that may look at ``n`` steps.
        ``opening_by_unit[n]`` is the smallest number of tokens with which a lookup reaches ``n``
        units. A group has two tables by unit: the first block and the end block that a hit reads
        (``tails``), and the tokens up to which it must be cached (``full_tokens``).
        """
        geometry = self.geometry
        num_steps = (geometry.steady_tokens + geometry.lag_tokens) // geometry.step_tokens + 1
        boundaries = range(0, geometry.steady_tokens + 1, geometry.unit_tokens)
        tails = [geometry.tails(tokens) for tokens in boundaries]
        full_tokens = [geometry.full_tokens(tokens) for tokens in boundaries]
        return {
            "unit_tokens": geometry.unit_tokens,
            "step_tokens": geometry.step_tokens,
            "steady_tokens": geometry.steady_tokens,
            "lag_tokens": geometry.lag_tokens,
            "grid_tokens": self.grid_tokens,
            "is_grid_wanted": bool(self.interval_tokens),
            "has_states": geometry.has_states,
            "use_eagle": geometry.use_eagle,
            "hit_by_step": [
                geometry.reachable_tokens(step * geometry.step_tokens) for step in range(num_steps)
            ],
            "opening_by_unit": [geometry.opens_at_tokens(tokens) for tokens in boundaries],
            "groups": [
                {
                    "is_state": group.is_state,
                    "window_tokens": group.window_tokens,
                    "tails": [(blocks[index].start, blocks[index].stop) for blocks in tails],
                    "full_tokens": [ends[index] for ends in full_tokens],
                }
                for index, group in enumerate(geometry.groups)
            ],
        }


def ladder_boundaries(
    geometry: HitGeometry,
    top_tokens: int,
    after_tokens: int,
    budget_blocks: float,
    nearest_tokens: int,
) -> Iterator[tuple[int, int]]:
    """Boundaries at growing distances before the end of a prompt, nearest first.

    A client may edit the last message, strip the reasoning from an answer, or ask another question
    about the same document. Such prompts share all but their end. If the distances double, at most
    as many tokens are lost as the part that differs has.

    Args:
        top_tokens: The replay boundary of the prompt, whose tails are kept anyway.
        after_tokens: The tokens that the request hit. Nothing is computed below.
        budget_blocks: The blocks that the tails of all rungs may take in addition to the tails of
            the top.
        nearest_tokens: The distance of the first rung, a multiple of the unit.

    Yields:
        The rung, counted from 0, and its boundary in tokens.
    """
    above = geometry.tails(top_tokens)
    distance_tokens = nearest_tokens
    rung = 0
    while (boundary := top_tokens - distance_tokens) > after_tokens:
        tails = geometry.tails(boundary)
        budget_blocks -= sum(
            group.num_groups * max(0, min(tail.stop, upper.start) - tail.start)
            for group, tail, upper in zip(geometry.groups, tails, above, strict=True)
        )
        if budget_blocks < 0:
            return
        if geometry.is_boundary(boundary):
            yield rung, boundary
        above = tails
        distance_tokens *= 2
        rung += 1


def check_interval(interval_tokens: int, unit_tokens: int) -> None:
    """Refuse an interval that this model's prefix cache cannot hit at.

    Raises:
        ValueError: If it is negative, or no multiple of ``unit_tokens``.
    """
    if interval_tokens < 0 or interval_tokens % unit_tokens:
        below = max(0, interval_tokens) // unit_tokens * unit_tokens
        raise ValueError(
            f"VLLM_PREFIX_CACHE_RETENTION_INTERVAL='{interval_tokens}' is not a multiple of "
            f"{unit_tokens}. Expected 0 or a multiple of {unit_tokens} tokens, the unit at which "
            f"this model's prefix cache can hit. The nearest valid values are {below} and "
            f"{below + unit_tokens}; unset the variable to cache densely."
        )
