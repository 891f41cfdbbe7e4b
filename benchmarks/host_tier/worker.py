# SPDX-License-Identifier: Apache-2.0
"""A worker without pages: it plans every transfer, moves nothing, and is done at once.

A plan that lacks rows is an error: a load would leave garbage where the request goes on.
"""

from __future__ import annotations

from vllm.v1.outputs import KVConnectorOutput

from vllm_ascend_kvext.connector.kvext_connector import KvextMetadata, KvextWorkerMetadata
from vllm_ascend_kvext.connector.messages import JobResults, LoadJob, StoreJob, Traffic
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.layout.planner import TransferPlanner


class IncompleteTransferError(Exception):
    """A transfer that the scheduler side planned has not all of its rows."""


class PlanningWorker:
    """The worker side, as far as the scheduler side can tell.

    Args:
        layout: Of its pages.

    Attributes:
        traffic: Transfers so far.
    """

    def __init__(self, layout: KVLayout) -> None:
        self._planner = TransferPlanner(layout)
        self.traffic = {"store": Traffic(), "load": Traffic()}

    def run_step(self, metadata: KvextMetadata) -> KVConnectorOutput:
        """Do what a step says."""
        jobs = metadata.jobs
        results = JobResults(has_forward=jobs.has_forward)
        for store in (*jobs.stores_before, *jobs.stores):
            self._store(store)
            results.stores_ended[store.number] = 1
        for load in jobs.loads:
            self._load(load)
        return KVConnectorOutput(
            finished_recving={load.request_id for load in jobs.loads} or None,
            kv_connector_worker_meta=KvextWorkerMetadata(results) if results else None,
        )

    def _store(self, job: StoreJob) -> None:
        plan = self._planner.plan_store(job.chunks, job.block_ids)
        if any(plan.missing):
            raise IncompleteTransferError(f"{job}: missing {plan.missing}")
        self.traffic["store"].add(Traffic(plan.host_bytes, 0.0, 1))

    def _load(self, job: LoadJob) -> None:
        plan = self._planner.plan_load(job.stored, job.tokens, job.block_ids)
        if plan.missing:
            raise IncompleteTransferError(f"{job}: missing {plan.missing}")
        self.traffic["load"].transfers += 1
