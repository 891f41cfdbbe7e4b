# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: steps in which holes of waiting requests are computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.hole_rows import (
    add_rows,
    budget_of_holes,
    go_on_behind_holes,
)

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
    from vllm_ascend_kvext.holes.hole_queue import HoleRow


class HoleSteps:
    """The `StepPart` that computes the holes of one scheduler's requests."""

    def __init__(self, scheduler: Scheduler, side: ConnectorScheduler) -> None:
        self._scheduler = scheduler
        self._side = side

    @property
    def has_work(self) -> bool:
        """Whether requests wait for holes, or workers have to be told of the end of rows."""
        return bool(self._side.holes or self._side.row_ids)

    def schedule(
        self, wrapped: Callable[..., SchedulerOutput], *args: Any, **kwargs: Any
    ) -> SchedulerOutput:
        """Schedule a step that also computes holes.

        Upstream's budget is reduced by the tokens and rows of holes, see ``hole_rows``.
        """
        scheduler = self._scheduler
        side = self._side
        for request_id in side.end_hole_step():
            go_on_behind_holes(scheduler, request_id)
        rows: list[HoleRow] = []
        if side.holes:
            rows = side.take_hole_rows(budget_of_holes(scheduler), scheduler.requests)
        ended_row_ids = side.row_ids
        side.row_ids = {row.row_id for row in rows}
        max_tokens = scheduler.max_num_scheduled_tokens
        max_requests = scheduler.max_num_running_reqs
        scheduler.max_num_scheduled_tokens -= sum(row.run.num_tokens for row in rows)
        scheduler.max_num_running_reqs -= len(rows)
        try:
            output = wrapped(*args, **kwargs)
        finally:
            scheduler.max_num_scheduled_tokens = max_tokens
            scheduler.max_num_running_reqs = max_requests
        output.finished_req_ids.update(ended_row_ids)
        defers = getattr(scheduler, "defer_block_free", False)  # Since vLLM 0.30.
        if defers and rows and not output.total_num_scheduled_tokens:
            # Upstream numbers only steps in which it schedules tokens, but counts this output, too.
            scheduler.sched_step_seq += 1
        add_rows(scheduler, output, rows)
        return output
