# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A clock of a simulated engine that counts steps, for the scheduler side and for transfers."""

from __future__ import annotations

from functools import partial
from typing import Any

from support.connector.simulated_engine import SimulatedEngine
from vllm_ascend_kvext.connector.worker.job_runner import Moved

STEP_S = 0.02


class StepClock:
    """Lets each step of an engine take `STEP_S` seconds, and each transfer whole steps.

    So the measured speeds do not depend on the machine. A transfer that is released in the step in
    which it begins takes a thousandth of a step.
    """

    def __init__(self, engine: SimulatedEngine) -> None:
        self.num_steps = 0
        engine.clock = self.now_s
        engine.runner.execute = partial(self._execute, engine.runner.execute)  # type: ignore[method-assign]
        for worker in engine.workers:
            runner: Any = worker.side._runner
            runner.run = partial(self._run, runner.run)

    def now_s(self) -> float:
        return self.num_steps * STEP_S

    def _execute(self, execute: Any, scheduled: Any) -> Any:
        output = execute(scheduled)
        self.num_steps += 1
        return output

    def _run(self, run: Any, job: Any, recorded: Any) -> Moved:
        begun_s = self.now_s()
        moved: Moved = run(job, recorded)
        return moved._replace(seconds=max(STEP_S / 1000, self.now_s() - begun_s))
