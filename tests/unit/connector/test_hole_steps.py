# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``schedule`` stays replaced until the workers know that the last row of a hole has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from pytest_mock import MockerFixture

from vllm_ascend_kvext.patches.connector import hole_steps
from vllm_ascend_kvext.patches.connector.step_parts import StepParts
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods


class Scheduler:
    """A scheduler that plans steps without requests."""

    max_num_scheduled_tokens = 64
    max_num_running_reqs = 8

    def schedule(self) -> Any:
        return SimpleNamespace(finished_req_ids=set(), total_num_scheduled_tokens=0)


def test_the_end_of_a_row_is_told_although_its_request_is_gone(mocker: MockerFixture) -> None:
    """The hole is removed while the scheduler plans the step that computes its row."""
    mocker.patch.object(hole_steps, "budget_of_holes", return_value=(64, 8, 64))
    mocker.patch.object(hole_steps, "add_rows", side_effect=lambda *_: side.holes.clear())
    row = SimpleNamespace(row_id="row", run=SimpleNamespace(num_tokens=16))
    side = SimpleNamespace(
        holes=["a request"],
        row_ids=set(),
        end_hole_step=lambda: [],
        take_hole_rows=lambda budget, other_ids: [row],
    )
    scheduler = Scheduler()
    scheduler.requests = {}  # type: ignore[attr-defined]
    steps = StepParts(scheduler, InstanceMethods())  # type: ignore[arg-type]
    steps.add(hole_steps.HoleSteps(scheduler, side))  # type: ignore[arg-type]
    steps.put_on()
    told = [scheduler.schedule().finished_req_ids for _ in range(3)]
    assert told == [set(), {"row"}, set()]
    assert "schedule" not in vars(scheduler)
