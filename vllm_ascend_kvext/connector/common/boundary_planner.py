# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The interface through which the scheduler side learns at which boundaries tails are stored.

``retention.offload_boundaries`` implements it. The patch that makes the `SchedulerView` passes the
implementation. The connector does not look into a reason, and only hands it back.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_ascend_kvext.connector.common.scheduler_view import Request
    from vllm_ascend_kvext.layout.model import LayoutGroup
    from vllm_ascend_kvext.retention.reasons import Reason

NEVER = 1 << 60
"""A number of tokens that no request reaches."""


class BoundaryPlanner(Protocol):
    """Plans boundaries, multiples of the layout's unit, and may learn which reasons pay."""

    @property
    def end_of_turn(self) -> Reason:
        """The reason of the boundary at which an answer ends."""

    @property
    def end_of_prompt(self) -> Reason:
        """The reason of the boundary at which the same prompt resumes."""

    @property
    def min_prompt_tokens(self) -> int:
        """The shortest prompt that hits in host memory when it comes again."""

    def plan(self, request: Request, hit_tokens: int, shared_tokens: int) -> dict[int, Reason]:
        """Boundaries past the hit that are known at admission.

        Args:
            shared_tokens: The first tokens of the prompt that another request has computed before.
        """

    def report_hints(self, request: Request) -> None:
        """Log the hints of an admitted request that leave no checkpoint."""

    def crossed(
        self, plan: dict[int, Reason], after_tokens: int, upto_tokens: int
    ) -> list[tuple[int, Reason]]:
        """Boundaries that a step passes, at which tails are to be stored, ascending."""

    def is_unasked(self, reason: Reason) -> bool:
        """Whether no request asked for the boundaries of a reason."""

    def ends_steps(self, reason: Reason) -> bool:
        """Whether prefill steps end at boundaries of a reason, to leave a state."""

    def next_after(self, plan: dict[int, Reason], tokens: int) -> int:
        """The next boundary that `crossed` may name; `NEVER` or more if there is none."""

    def next_stop_after(
        self, plan: dict[int, Reason], tokens: int, may_stop: bool = True, may_try: bool = True
    ) -> int:
        """The next boundary at which a prefill step has to end to leave a state.

        Args:
            may_stop: Whether steps end where no user has set it.
            may_try: Whether steps end at boundaries of which it is not known that they are of use.

        Returns:
            `NEVER` or more if there is none.
        """

    def note_tried(self, reason: Reason) -> None:
        """Count tails of this reason that are to be stored, whether or not there is room."""

    def note_hit(self, reason: Reason) -> None:
        """Count a request that has resumed at a boundary of this reason."""


MakeBoundaryPlanner = Callable[[Sequence["LayoutGroup"], int], BoundaryPlanner]
"""Makes the planner of one engine from the groups of its layout, and the unit in tokens."""
