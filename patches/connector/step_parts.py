# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: parts around ``schedule``, in steps that need them.

Most engines plan almost all of their steps with vLLM's own function. A scheduler gets another
function when a request begins to wait for something that vLLM does not plan. The scheduler gets
vLLM's own function back after the step in which the last such request goes on::

    a hole is born ──> put_on ──> steps with rows of holes ──> no part has work ──> vLLM's own
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_ascend_kvext.patching.instance_methods import InstanceMethods


class StepPart(Protocol):
    """Something that some steps of a scheduler do besides what vLLM plans."""

    @property
    def has_work(self) -> bool:
        """Whether the next step needs this part."""

    def schedule(
        self, wrapped: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Plan a step; ``wrapped`` plans the rest of it."""


class StepParts:
    """The parts around one scheduler's ``schedule``. They wrap it only while a part has work."""

    def __init__(self, scheduler: Scheduler, methods: InstanceMethods) -> None:
        self._scheduler = scheduler
        self._methods = methods
        self._parts: list[StepPart] = []
        self._take_off: Callable[[], None] | None = None

    def add(self, part: StepPart) -> None:
        """Add a part, which is called within the parts that were added before."""
        self._parts.append(part)

    def put_on(self) -> None:
        """Let the parts plan all steps from the next step on, until no part has work.

        The method may be called while a step is being planned. It does not change this step.
        """
        if self._take_off is None:
            self._take_off = self._methods.replace(self._scheduler, self.schedule)

    def schedule(
        self, wrapped: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Plan a step with all parts. If no part has work then, put vLLM's function back."""
        for part in reversed(self._parts):
            wrapped = partial(part.schedule, wrapped)
        output = wrapped(*args, **kwargs)
        if self._take_off is not None and not any(part.has_work for part in self._parts):
            take_off, self._take_off = self._take_off, None
            take_off()
        return output
