# SPDX-License-Identifier: Apache-2.0
"""Runs a workload to its end and returns the transcript and every request's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .engine import SchedulerEngine
from .model_runner import ReadCheck
from .transcript import Step, Transcript
from .workload import Workload

MAX_STEPS = 3000

Check = Callable[[SchedulerEngine, Step], None]
"""Looks at the engine after every step and raises ``AssertionError`` if something is wrong."""


@dataclass(slots=True)
class Run:
    """The result of a workload.

    ``finish_reasons`` has no request that was aborted.
    """

    transcript: Transcript
    outputs: dict[str, list[int]]
    finish_reasons: dict[str, str]

    def wrong_outputs(self, workload: Workload) -> dict[str, list[int]]:
        """Outputs that are not what the model generates; of aborted requests, not a start of it."""
        wrong = {}
        for plan in workload.requests:
            output, expected = self.outputs[plan.request_id], plan.expected_output()
            finished = plan.request_id in self.finish_reasons
            if output != (expected if finished else expected[: len(output)]):
                wrong[plan.request_id] = output
        return wrong


def run(
    workload: Workload, checks: Sequence[Check] = (), read_check: ReadCheck = ReadCheck.NONE
) -> Run:
    """Drive a new engine through a workload.

    Raises:
        RuntimeError: If the workload does not come to an end.
    """
    engine = SchedulerEngine(workload.layout, workload.options, read_check)
    result = Run(Transcript(), {plan.request_id: [] for plan in workload.requests}, {})
    counts = result.transcript.counts
    arrivals = sorted(workload.requests, key=lambda plan: plan.arrival_step, reverse=True)
    for step_number in range(MAX_STEPS):
        while arrivals and arrivals[-1].arrival_step <= step_number:
            engine.add_request(arrivals.pop())
        for abort in workload.aborts:
            if abort.step == step_number:
                counts["aborts"] += engine.abort(abort.request_id)
        for reset in workload.resets:
            if reset.step == step_number:
                counts["resets"] += engine.reset_prefix_cache(reset.reset_running_requests)
        if not engine.has_work():
            if not arrivals:
                break
            continue
        step = engine.step()
        result.transcript.steps.append(step)
        for request_id, tokens, finish_reason in step.outputs:
            result.outputs[request_id] += tokens
            if finish_reason != "None":
                result.finish_reasons[request_id] = finish_reason
        for check in checks:
            check(engine, step)
    else:
        raise RuntimeError(
            f"{workload.name}: not finished after {MAX_STEPS} steps; unfinished requests: "
            f"{sorted(engine.scheduler.requests)}"
        )
    _count(result.transcript)
    counts.update(engine.runner.counts)
    engine.shutdown()
    return result


def _count(transcript: Transcript) -> None:
    counts = transcript.counts
    for step in transcript.steps:
        counts["preemptions"] += len(step.preempted)
        for request in step.scheduled:
            counts["scheduled tokens"] += request.num_tokens
            counts["encoder inputs"] += len(request.encoder_inputs)
            if request.is_new_or_resumed:
                counts["hit tokens"] += request.num_computed_tokens
                counts["hits"] += request.num_computed_tokens > 0
        for event in step.events:
            counts[event.partition("(")[0]] += 1
        for _, _, finish_reason in step.outputs:
            counts[f"finished by {finish_reason}"] += finish_reason != "None"
