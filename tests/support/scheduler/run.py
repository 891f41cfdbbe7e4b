# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs a workload to its end. Returns the transcript and every request's output."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .engine import SchedulerEngine
from .model_runner import ReadCheck
from .transcript import Step, Transcript
from .workload import Workload

MAX_STEPS = 3000

Check = Callable[[SchedulerEngine, Step], None]
"""Looks at the engine after every step. Raises ``AssertionError`` if something is wrong.

If a check has an attribute ``counts``, these counts are added to the counts of the run.
"""


@dataclass(slots=True)
class Run:
    """The result of a workload.

    ``finish_reasons`` has no aborted requests. The engine has been shut down.
    """

    transcript: Transcript
    outputs: dict[str, list[int]]
    finish_reasons: dict[str, str]
    engine: SchedulerEngine

    def wrong_outputs(self, workload: Workload) -> dict[str, list[int]]:
        """Outputs that differ from the model's. Aborted requests may have only its beginning."""
        aborted = {abort.request_id for abort in workload.aborts} - self.finish_reasons.keys()
        wrong = {}
        for plan in workload.requests:
            output = self.outputs[plan.request_id]
            expected = plan.expected_output()
            if output != (expected[: len(output)] if plan.request_id in aborted else expected):
                wrong[plan.request_id] = output
        return wrong


def run(
    workload: Workload, checks: Sequence[Check] = (), read_check: ReadCheck = ReadCheck.NONE
) -> Run:
    """Drive a new engine through a workload.

    Raises:
        RuntimeError: If the workload does not end.
    """
    engine = SchedulerEngine(workload.layout, workload.options, read_check)
    result = Run(Transcript(), {plan.request_id: [] for plan in workload.requests}, {}, engine)
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
    for check in checks:
        counts.update(getattr(check, "counts", {}))
    engine.shutdown()
    return result


def failure_of(
    workload: Workload,
    checks: Sequence[Check] = (),
    read_check: ReadCheck = ReadCheck.ALL,
    counts: Counter[str] | None = None,
) -> str:
    """Run a workload. Return the first error of a check, or wrong outputs, or "".

    The counts of the run are added to ``counts``.
    """
    try:
        result = run(workload, checks, read_check)
        assert not result.wrong_outputs(workload), "wrong outputs"
    except (AssertionError, RuntimeError) as error:
        return f"{workload.name}, {workload.options}: {error!r}"
    if counts is not None:
        counts.update(result.transcript.counts)
    return ""


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
