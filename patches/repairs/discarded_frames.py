# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: a reset drops the frames in flight, and no later frames.

A *frame* is the tokens that one step returns for one request. A reset of the prefix cache can
preempt running requests. Upstream then drops one frame per placeholder in flight. But a frame with
drafts has several placeholders, so upstream also drops frames of steps after the reset. It also
subtracts the rejected tokens of a stale frame from the tokens that the request has computed since.

With this repair, a reset notes for each step which of its requests are stale. Their frames are
emptied before upstream sees them.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch
from vllm_ascend_kvext.upstream_state import SchedulerState

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.outputs import ModelRunnerOutput


class StepsInFlight:
    """The steps of one scheduler whose outputs have not arrived yet, the oldest first."""

    def __init__(self) -> None:
        # The steps. Each has the requests of the step that a reset has preempted since.
        self._steps: deque[tuple[SchedulerOutput, set[str]]] = deque()

        self._prompt_logprobs: dict[str, Any] = {}
        """Prompt log-probabilities that were not sent before their request was preempted. Workers
        compute them only once."""

    def plan(self, output: SchedulerOutput) -> None:
        self._steps.append((output, set()))

    def note_reset(self, request_ids: set[str]) -> None:
        """Mark all frames in flight of these requests as stale."""
        for output, stale in self._steps:
            stale |= request_ids & output.num_scheduled_tokens.keys()

    def end(self, planned: SchedulerOutput) -> set[str]:
        """Forget a step, and all earlier steps, which never had an output.

        Returns:
            The requests that are stale in the step.
        """
        for index, (output, stale) in enumerate(self._steps):
            if output is planned:
                for _ in range(index + 1):
                    self._steps.popleft()
                return stale
        return set()

    def drop(self, stale: set[str], output: ModelRunnerOutput) -> None:
        """Remove the tokens of stale requests from an output, and keep their log-probabilities."""
        for request_id in stale:
            index = output.req_id_to_index.get(request_id)
            if index is not None and output.sampled_token_ids:
                output.sampled_token_ids[index] = []
            prompt_logprobs = output.prompt_logprobs_dict.pop(request_id, None)
            if prompt_logprobs is not None:
                self._prompt_logprobs[request_id] = prompt_logprobs

    def hand_over(self, scheduler: Scheduler, output: ModelRunnerOutput) -> None:
        """Send kept prompt log-probabilities with the first tokens of their request."""
        for request_id in list(self._prompt_logprobs):
            index = output.req_id_to_index.get(request_id)
            if request_id not in scheduler.requests:
                del self._prompt_logprobs[request_id]
            elif index is not None and output.sampled_token_ids[index]:
                held = self._prompt_logprobs.pop(request_id)
                if output.prompt_logprobs_dict.get(request_id) is None:
                    output.prompt_logprobs_dict[request_id] = held


def remember_step(
    wrapped: Callable[..., None], scheduler: Scheduler, scheduler_output: SchedulerOutput
) -> None:
    """Remember a step that has just been planned."""
    wrapped(scheduler_output)
    steps = _steps_of(scheduler)
    if steps is not None:
        steps.plan(scheduler_output)


def leave_out_stale_frames(
    wrapped: Callable[..., dict[int, EngineCoreOutputs]],
    scheduler: Scheduler,
    scheduler_output: SchedulerOutput,
    model_runner_output: ModelRunnerOutput,
) -> dict[int, EngineCoreOutputs]:
    """Process an output without its stale frames."""
    steps = _steps_of(scheduler)
    if steps is not None:
        stale = steps.end(scheduler_output)
        if stale:
            steps.drop(stale, model_runner_output)
        steps.hand_over(scheduler, model_runner_output)
    return wrapped(scheduler_output, model_runner_output)


def note_what_is_stale(
    wrapped: Callable[..., bool],
    scheduler: Scheduler,
    reset_running_requests: bool = False,
    reset_connector: bool = False,
) -> bool:
    """Mark the frames in flight of preempted requests as stale, and no later frame."""
    steps = _steps_of(scheduler)
    if steps is None or not reset_running_requests:
        return wrapped(reset_running_requests, reset_connector)
    running = list(scheduler.running)
    try:
        return wrapped(reset_running_requests, reset_connector)
    finally:
        # If upstream raises, it has already preempted these requests.
        steps.note_reset({request.request_id for request in running})
        for request in running:
            request.async_tokens_to_discard = 0


def _steps_of(scheduler: Scheduler) -> StepsInFlight | None:
    state = SchedulerState.of(scheduler)
    if not state.has_looked_at_outputs:
        from vllm.v1.core.sched.scheduler import Scheduler as Upstreams

        processes = inspect.getattr_static(type(scheduler), "update_from_output")
        is_upstreams = processes is inspect.getattr_static(Upstreams, "update_from_output")
        state.steps_in_flight = StepsInFlight() if is_upstreams else None
        state.has_looked_at_outputs = True
    steps: StepsInFlight | None = state.steps_in_flight
    return steps


_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASYNC_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"
_BALANCE = "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler"

_of_reset = partial(
    Patch,
    feature="discarded-frames",
    vllm=BEFORE_0_30,
    why="A reset of the prefix cache under running requests drops one frame per placeholder in "
    "flight, but a frame with drafts has several placeholders. Sampled tokens are lost, and the "
    "request reads KV that other requests have written.",
    retire_when="vLLM >= 0.30, which drops stale outputs whole (pull requests 46066 and 48245)",
)

PATCHES = (
    _of_reset(
        id="KVX-306",
        target=f"{_SCHEDULER}._update_after_schedule",
        wrapper=remember_step,
        relies_on=(f"{_SCHEDULER}.schedule", f"{_ASYNC_SCHEDULER}._update_after_schedule"),
        ascend=(f"{_LIFETIME}:_patched_update_after_schedule", f"{_BALANCE}.schedule"),
    ),
    _of_reset(
        id="KVX-307",
        target=f"{_SCHEDULER}.update_from_output",
        wrapper=leave_out_stale_frames,
        relies_on=(f"{_ASYNC_SCHEDULER}._update_request_with_output",),
        ascend=(f"{_LIFETIME}:_patched_update_from_output",),
    ),
    _of_reset(
        id="KVX-308",
        target=f"{_SCHEDULER}.reset_prefix_cache",
        wrapper=note_what_is_stale,
        relies_on=(f"{_SCHEDULER}._preempt_request",),
        ascend=(f"{_BALANCE}.reset_prefix_cache",),
    ),
)
