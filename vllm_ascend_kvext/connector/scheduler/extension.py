# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The scheduler side's seam: what an extension of the connector may answer, and the defaults.

The connector itself reuses exact prefixes. An extension reuses something else beside them. The
scheduler side asks it at the places below, in this order, for each request::

    lookup_rule ── restart ── plan ── hold ── begin      while the request is admitted
    on_step ── on_output                                 in each step
    on_request_finished                                  when the request has ended

An engine without an extension has the defaults.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from vllm_ascend_kvext.connector.common.messages import LoadJob, StoreJob
from vllm_ascend_kvext.connector.common.scheduler_view import Request
from vllm_ascend_kvext.counted import Report
from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.store.entries import WantedPiece
from vllm_ascend_kvext.store.lookup import Hit


class LookupRule(enum.Enum):
    """What the connector does for a request that is to be admitted."""

    LOOK_UP = enum.auto()
    """The connector loads what is stored of the prompt."""

    COMPUTE = enum.auto()
    """The connector loads nothing."""

    WAIT = enum.auto()
    """The connector is asked again in the next step."""


class StepPlan(NamedTuple):
    """The work that an extension gives to the workers in a step.

    Attributes:
        stores: Stores that begin when the step has computed.
        extras: The message to the worker side of the extension; None if there is none.
    """

    stores: Sequence[StoreJob] = ()
    extras: Any = None


class SchedulerExtension:
    """The scheduler side of an extension, for one engine."""

    @property
    def shares_rows(self) -> bool:
        """Whether workers that share host memory share rows of the extension in it."""
        return False

    def lookup_rule(self, request: Request) -> LookupRule:
        """The rule for a request that is to be admitted. The connector asks in every step."""
        return LookupRule.LOOK_UP

    def pieces_to_get(self, request_id: str) -> Sequence[WantedPiece]:
        """The pieces for a request that host memory lacks, and that a shared tier may have."""
        return ()

    def restart(self, request_id: str) -> None:
        """Forget the plan of a request that is looked up anew, or whose load has failed."""

    def plan(
        self, request: Request, hit: Hit, has_room: Callable[[LoadPlan], bool]
    ) -> LoadPlan | None:
        """The plan of a request behind its exact prefix; None leaves the planning to the connector.

        Args:
            hit: What host memory has of the prompt's own prefix.
            has_room: Whether the device can ever hold what a plan needs.
        """
        return None

    def hold(self, request: Request, plan: LoadPlan) -> bool:
        """Keep on the device what a plan from `plan` needs, until the end of the step.

        Returns:
            False if the device does not have it any more. The request is then looked up again.
        """
        return True

    def begin(self, request: Request, plan: LoadPlan, block_ids: tuple[list[int], ...]) -> LoadJob:
        """The load of a request that has got blocks for a plan from `plan`.

        Args:
            block_ids: The request's blocks by KV cache group, from its first token on.
        """
        raise NotImplementedError

    def is_private(self, request_id: str) -> bool:
        """Whether KV of a request is not stored under the keys of its tokens."""
        return False

    def on_step(
        self, num_scheduled_tokens: Mapping[str, int], preempted_ids: Collection[str]
    ) -> StepPlan:
        """A step has been scheduled. The requests' computed tokens are not advanced yet.

        Args:
            num_scheduled_tokens: The tokens of each request that computes in the step.
            preempted_ids: Requests whose blocks are gone.
        """
        return StepPlan()

    def on_output(self, extras: Any) -> None:
        """Take note of what the worker sides of the extension report of a step, joined.

        Called before the jobs of the same report end.
        """

    def on_request_finished(self, request: Request) -> Mapping[str, int] | None:
        """A request has ended.

        Returns:
            What its response says in ``kv_transfer_params``.
        """
        return None

    def take_report(self) -> Report:
        """What the extension has counted since the last report; see ``counted``."""
        return {}

    def release_pages(self) -> None:
        """Release pages that no transfer reads yet: the prefix cache is going to be reset."""

    def keep_apart(self) -> None:
        """Workers that share host memory keep their rows apart in it from now on.

        Entries become larger. What is stored is being forgotten; see `reset`, which is called, too.
        """

    def reset(self) -> None:
        """Forget what is stored."""
