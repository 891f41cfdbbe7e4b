# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Bounds the engine's steps that are added because prefill steps end early to leave a state.

A prefill step that ends early leaves its other tokens to a further step of the same request. That
step is shared by all requests that compute in it: with ``n`` requests, the engine makes one
``n``-th of a step more. The answers of the others need these steps anyway.

The engine's steps earn added steps, and so do hits: tokens that were loaded need not be computed.
What is earned and not spent is bounded. So at any time, added steps are at most a share of the
steps before, plus a constant, plus what hits have earned.
"""

from __future__ import annotations

from collections.abc import Mapping

ADDED_PER_STEP = 1 / 20
"""The added steps that each step of the engine earns."""

TOKENS_PER_STEP = 512
"""As many tokens that are hit in host memory earn an added step. It is assumed, and not measured,
that computing them takes about as long as a step with few tokens."""

FIRST_STEPS = 16.0
"""An engine begins with as many added steps. Its first requests would leave nothing otherwise."""

MAX_LEFT_STEPS = 64.0
"""At most as many added steps are left at any time."""

RESERVED_STEPS = 8.0
"""As many of them are for boundaries that requests share or resume at. Trials leave them."""


class StepBudget:
    """How many steps of one engine early ends may add."""

    def __init__(self) -> None:
        self._left_steps = FIRST_STEPS
        self._early: dict[str, int] = {}

    @property
    def may_stop(self) -> bool:
        """Whether a step may end early."""
        return self._left_steps > 0

    @property
    def may_try(self) -> bool:
        """Whether a step may end early where it is not known that requests resume."""
        return self._left_steps > RESERVED_STEPS

    def note_early_end(self, request_id: str, num_tokens: int) -> None:
        """A request is to get ``num_tokens`` in the step that is being planned, and could have had
        more."""
        self._early[request_id] = num_tokens

    def note_hit(self, num_tokens: int) -> None:
        """A request loads tokens."""
        self._earn(num_tokens / TOKENS_PER_STEP)

    def note_step(self, num_scheduled_tokens: Mapping[str, int]) -> float:
        """A step has been planned. Requests that lacked blocks are not part of it.

        Args:
            num_scheduled_tokens: The tokens of the step, by request.

        Returns:
            The steps that its early ends add.
        """
        added_steps = 0.0
        if num_scheduled_tokens:
            num_early = sum(
                num_scheduled_tokens.get(request_id) == num_tokens
                for request_id, num_tokens in self._early.items()
            )
            added_steps = num_early / len(num_scheduled_tokens)
            self._left_steps -= added_steps
            self._earn(ADDED_PER_STEP)
        self._early.clear()
        return added_steps

    def _earn(self, num_steps: float) -> None:
        self._left_steps = min(MAX_LEFT_STEPS, self._left_steps + num_steps)
