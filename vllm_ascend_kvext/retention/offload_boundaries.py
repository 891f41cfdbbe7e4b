# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Decides at which boundaries of a request tails are stored in host memory.

The policy is the same as for the local prefix cache (`RetentionPolicy`), but the grid differs. A
hit in host memory is a multiple of the layout's row unit; a local hit is a multiple of every
group's page. The planner counts hits by the reason of a boundary. Reasons that bring few hits
suggest fewer boundaries.

A state exists only where a prefill step has ended. vLLM ends a step with the last whole block of a
prompt, so the state there costs no step. Prompts that part within a block of their ends resume
there. So the rungs of the ladder are whole blocks, and lie before that block: they are fewer than
those at units would be, and no further step is needed to reach the end of a block.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Protocol

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.hints import hinted_boundaries, report_unusable_hints
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.retention.reasons import STEPS_END_AT, Origin, Reason
from vllm_ascend_kvext.upstream_types import Request

_UNASKED = frozenset({Origin.LADDER, Origin.GRID, Origin.CHUNK})
"""The origins of boundaries that no request asked for."""

_END_STEPS = STEPS_END_AT | {Origin.PROMPT, Origin.LADDER}
"""The origins of boundaries at which a prefill step must end to leave a state.

By itself vLLM ends steps at other places: at the end of a prompt's last whole block, even if this
is the end of the prompt, or one block earlier with EAGLE and MTP.
"""

_CHUNK = Reason(Origin.CHUNK)

_LAST_BLOCK = Reason(Origin.CHUNK, 1)
"""The end of the last whole block of a prompt."""

_NEVER = 1 << 60
"""A boundary that no request reaches."""

_TRIALS = 16
"""The number of tails of one reason that are stored before their hits are counted."""

_MIN_HITS_PER_TAIL = 1 / 64
"""A reason pays if its tails bring at least so many hits each."""

_MIN_HITS_PER_STEP = 1 / 16
"""The same limit for a rung of the ladder at which a prefill step must end for a state. Such a step
also costs time."""

_TRY_EVERY = 32
"""One in this many tails is stored although its reason does not pay, to notice when it pays."""


class PagedGroup(Protocol):
    """The attributes of a group that the planner reads; see ``layout.model.LayoutGroup``."""

    @property
    def kind(self) -> GroupKind: ...

    @property
    def tokens_per_page(self) -> int: ...

    @property
    def window_tokens(self) -> int: ...


class OffloadBoundaries:
    """Plans boundaries, multiples of the layout's unit, and learns which reasons pay.

    Args:
        groups: The groups of the layout.
        unit_tokens: Hits in host memory are multiples of this number.
        interval_tokens: ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; 0 if unset.
    """

    end_of_turn = Reason(Origin.LATEST)
    """The reason of the boundary at which an answer ends."""

    end_of_prompt = Reason(Origin.PROMPT)
    """The reason of the boundary at which the same prompt resumes."""

    def __init__(
        self, groups: Sequence[PagedGroup], unit_tokens: int, interval_tokens: int = 0
    ) -> None:
        geometry = HitGeometry(_geometries(groups, unit_tokens), unit_tokens)
        # The interval is rounded up to the coarser grid of host memory.
        interval_tokens = -(-interval_tokens // unit_tokens) * unit_tokens
        states = (group for group in groups if group.kind is GroupKind.STATE)
        page_tokens = math.lcm(unit_tokens, *(group.tokens_per_page for group in states))
        self._page_tokens = page_tokens
        self._policy = RetentionPolicy(
            geometry, interval_tokens, is_adaptive=True, rung_tokens=page_tokens
        )
        self._tried: dict[Reason, int] = {}
        self._hits: dict[Reason, int] = {}

    @property
    def min_prompt_tokens(self) -> int:
        """The shortest prompt that can hit in host memory when it is sent again."""
        return self._policy.geometry.min_prompt_tokens

    def plan(self, request: Request, hit_tokens: int, shared_tokens: int) -> dict[int, Reason]:
        """The boundaries behind the hit that are known when a request is admitted.

        Args:
            request: The request.
            hit_tokens: The tokens of its hit.
            shared_tokens: The first tokens of the prompt that an earlier request has computed.
        """
        geometry = self._policy.geometry
        demand = {}
        # The last token of a prompt is always computed, so no request resumes behind it.
        shared_tokens = min(shared_tokens, request.num_prompt_tokens - 1)
        junction_tokens = geometry.reachable_tokens(shared_tokens)
        if junction_tokens > hit_tokens:
            demand[junction_tokens] = Reason(Origin.JUNCTION)
        for tokens in hinted_boundaries(request, geometry):
            demand[tokens] = Reason(Origin.HINT)
        is_trial = zlib.crc32(request.request_id.encode()) % _TRY_EVERY == 0

        def is_worth_trying(reason: Reason) -> bool:
            return not geometry.has_states or is_trial or self._pays(reason, _MIN_HITS_PER_STEP)

        plan = self._policy.plan(request.num_prompt_tokens, hit_tokens, demand, is_worth_trying)
        return {tokens: reason for tokens, reason in plan.items() if tokens > hit_tokens}

    def report_hints(self, request: Request) -> None:
        """Log the hints of an admitted request that leave no checkpoint."""
        report_unusable_hints(request, self._policy.geometry)

    def crossed(
        self, plan: dict[int, Reason], after_tokens: int, upto_tokens: int
    ) -> list[tuple[int, Reason]]:
        """The boundaries of a step at which tails are to be stored, ascending."""
        boundaries = self._policy.lasting_boundaries(plan, after_tokens, upto_tokens)
        geometry = self._policy.geometry
        if (
            geometry.has_states
            and upto_tokens < max(plan, default=0)
            and upto_tokens not in dict(boundaries)
            and geometry.is_boundary(upto_tokens)
        ):
            # A step of the prompt leaves a state where it ends.
            last_tokens = max(plan) - max(plan) % self._page_tokens
            reason = _LAST_BLOCK if upto_tokens == last_tokens else _CHUNK
            boundaries.append((upto_tokens, reason))
        return [
            (tokens, reason)
            for tokens, reason in boundaries
            if not self._is_passed(reason, tokens, upto_tokens) and self._is_worth_storing(reason)
        ]

    def is_unasked(self, reason: Reason) -> bool:
        """Whether no request asked for the boundaries of a reason."""
        return reason.origin in _UNASKED

    def ends_steps(self, reason: Reason) -> bool:
        """Whether prefill steps end at boundaries of a reason, to leave a state."""
        return reason.origin in _END_STEPS or (
            reason.origin is Origin.GRID and bool(self._policy.interval_tokens)
        )

    def next_after(self, plan: dict[int, Reason], tokens: int) -> int:
        """The next boundary that `crossed` may name; a very large number if there is none."""
        following = min((each for each in plan if each > tokens), default=_NEVER)
        return min(following, _next_multiple(self._policy.grid_tokens, tokens))

    def next_stop_after(
        self, plan: dict[int, Reason], tokens: int, may_stop: bool = True, may_try: bool = True
    ) -> int:
        """The next boundary at which a prefill step must end to leave a state. A very large
        number if there is none.

        Args:
            may_stop: Whether steps end at other boundaries than multiples of the interval.
            may_try: Whether steps end at rungs of which it is not known that requests resume there.
        """
        following = _NEVER
        if may_stop:
            asked = (
                each
                for each, reason in plan.items()
                if each > tokens
                and reason.origin in _END_STEPS
                and (may_try or not self._is_trial(reason))
            )
            following = min(asked, default=_NEVER)
        return min(following, _next_multiple(self._policy.interval_tokens, tokens))

    def note_tried(self, reason: Reason) -> None:
        """Count tails of this reason that are to be stored, whether or not there is room."""
        self._tried[reason] = self._tried.get(reason, 0) + 1

    def note_hit(self, reason: Reason) -> None:
        """Count a request that has resumed at a boundary of this reason."""
        self._hits[reason] = self._hits.get(reason, 0) + 1

    def _is_worth_storing(self, reason: Reason) -> bool:
        if reason.origin not in _UNASKED or self._pays(reason, _MIN_HITS_PER_TAIL):
            return True
        if reason.origin is Origin.LADDER and self._policy.geometry.has_states:
            return True  # `plan` has decided it already, and a step has ended there.
        tried = self._tried[reason]
        self._tried[reason] = tried + 1
        return tried % _TRY_EVERY == 0

    def _is_passed(self, reason: Reason, tokens: int, upto_tokens: int) -> bool:
        """Whether a step went on behind a rung, so that there is no state."""
        is_rung = reason.origin is Origin.LADDER and self._policy.geometry.has_states
        return is_rung and tokens < upto_tokens

    def _is_trial(self, reason: Reason) -> bool:
        """Whether it is not known that requests resume at boundaries of a reason."""
        if reason.origin is not Origin.LADDER:
            return False
        return self._is_new(reason) or not self._has_paid(reason, _MIN_HITS_PER_STEP)

    def _pays(self, reason: Reason, min_hits_per_tail: float) -> bool:
        """Whether boundaries of a reason have paid, or may, because the reason is new."""
        return self._is_new(reason) or self._has_paid(reason, min_hits_per_tail)

    def _is_new(self, reason: Reason) -> bool:
        """Whether too few tails of a reason were stored to count their hits."""
        return self._tried.get(reason, 0) < _TRIALS

    def _has_paid(self, reason: Reason, min_hits_per_tail: float) -> bool:
        """Whether requests have resumed often enough at boundaries of a reason."""
        return self._hits.get(reason, 0) >= self._tried.get(reason, 0) * min_hits_per_tail


def _next_multiple(distance_tokens: int, after_tokens: int) -> int:
    """The next multiple of a distance; `_NEVER` for a distance of 0."""
    if not distance_tokens:
        return _NEVER
    return (after_tokens // distance_tokens + 1) * distance_tokens


def _geometries(groups: Sequence[PagedGroup], unit_tokens: int) -> tuple[GroupGeometry, ...]:
    # The lookup counts equal groups as one, and has groups of full attention first. A state is as
    # large as all units of its page together, wherever in the page it was stored.
    counts: dict[tuple[GroupKind, int, int], int] = {}
    for group in sorted(groups, key=lambda group: group.kind is not GroupKind.FULL):
        is_window = group.kind is GroupKind.WINDOW
        block_tokens = math.gcd(group.tokens_per_page, unit_tokens)
        key = group.kind, block_tokens, group.window_tokens if is_window else 0
        is_state = group.kind is GroupKind.STATE
        num_units = group.tokens_per_page // block_tokens if is_state else 1
        counts[key] = counts.get(key, 0) + num_units
    return tuple(
        GroupGeometry(kind, block_tokens, window_tokens, num_groups=count)
        for (kind, block_tokens, window_tokens), count in counts.items()
    )
