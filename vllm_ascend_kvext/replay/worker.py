# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A worker without pages, which plans every transfer, moves nothing, and is done at once.

A plan that lacks rows is an error, because a load would leave undefined rows that the request
reads.
"""

from __future__ import annotations

from typing import cast

from vllm.v1.outputs import KVConnectorOutput

from vllm_ascend_kvext.connector.common.messages import (
    Direction,
    StoreJob,
    Traffic,
    WorkerOutput,
)
from vllm_ascend_kvext.connector.kvext_connector import KvextMetadata, KvextWorkerMetadata
from vllm_ascend_kvext.connector.worker.job_runner import Job, plan_job
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.replay.counted_tier import CountedTier
from vllm_ascend_kvext.shared_tier.messages import SharedJobs


class IncompleteTransferError(Exception):
    """A transfer of the scheduler side lacks some of its rows."""


class PlanningWorker:
    """A stand-in for the worker side. The scheduler side does not notice the difference.

    Args:
        layout: The pages of the worker.
        plans: Whether transfers are planned. Otherwise, their rows are not checked, and a trace
            takes half of the time.
        shared: The shared tier of the engine; None if there is none.
    """

    def __init__(
        self, layout: KVLayout, plans: bool = True, shared: CountedTier | None = None
    ) -> None:
        self._planner = TransferPlanner(layout) if plans else None
        self._shared = shared
        self.traffic = {"store": Traffic(), "load": Traffic()}

    def run_step(self, metadata: KvextMetadata) -> KVConnectorOutput:
        """Carry out the jobs of a step."""
        jobs = metadata.jobs
        results = WorkerOutput(has_forward=jobs.has_forward)
        for store in (*jobs.stores_before, *jobs.stores):
            # The scheduler side plans by the measured speed of stores.
            results.traffic["store"].add(self._carry_out(store))
            results.jobs_ended[store.number] = 1
        for load in jobs.loads:
            self._carry_out(load)
        if self._shared is not None and jobs.secondary is not None:
            self._shared.run_jobs(cast("SharedJobs", jobs.secondary), results)
        return KVConnectorOutput(
            finished_recving={load.request_id for load in jobs.loads} or None,
            kv_connector_worker_meta=KvextWorkerMetadata(results) if results else None,
        )

    def _carry_out(self, job: Job) -> Traffic:
        """Plan a job. Returns what it moves, in no time."""
        if self._planner is None:
            return Traffic(1, 0.0, 1)
        plans, missing = plan_job(self._planner, job)
        if missing:
            raise IncompleteTransferError(f"{job}: missing {missing}")
        direction: Direction = "store" if isinstance(job, StoreJob) else "load"
        host_bytes = max(plan.host_bytes for plan in plans) if direction == "store" else 0
        moved = Traffic(host_bytes, 0.0, 1)
        self.traffic[direction].add(moved)
        return moved
