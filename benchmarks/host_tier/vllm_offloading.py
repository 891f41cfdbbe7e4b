# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's OffloadingConnector as the host tier of an `Engine`. It exists since vLLM 0.30.

The scheduler side is vLLM's own. The stand-in for the worker moves nothing, and is done at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
from vllm.v1.outputs import KVConnectorOutput

from vllm_ascend_kvext.replay.engine import PlayedClock


@dataclass(frozen=True, slots=True)
class OffloadingMemory:
    """The memory of vLLM's connector.

    Attributes:
        num_bytes: Its size. It is only counted, and not allocated.
        has_answers: Whether answers are stored, too. By default, vLLM stores prompts only.
    """

    num_bytes: int
    has_answers: bool

    @property
    def transfer_config(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="OffloadingConnector",
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            kv_connector_extra_config={
                "cpu_bytes_to_use": self.num_bytes,
                "offload_prompt_only": not self.has_answers,
            },
        )

    def start(self, scheduler: Scheduler, clock: PlayedClock) -> OffloadingMemory:
        return self

    def run_step(self, metadata: OffloadingConnectorMetadata) -> KVConnectorOutput:
        ended = OffloadingWorkerMetadata()
        for job in (*metadata.load_jobs, *metadata.store_jobs):
            ended.mark_completed(job)
        loaded = {job.req_id for job in metadata.load_jobs.values()}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=ended if ended.completed_jobs else None,
        )


@contextmanager
def without_padding() -> Iterator[None]:
    """Let vLLM's memory hold as many blocks as fit, inside the block.

    vLLM gives each block a place of whole pages of 4 KiB. The layouts here are as large as those of
    one worker, whose blocks are larger, so that this would only be noise.
    """
    with mock.patch.object(CPUOffloadingSpec, "BLOCK_SIZE_ALIGNMENT", 1):
        yield
