# SPDX-License-Identifier: Apache-2.0
"""vLLM's real scheduler on a layout of the benchmark, with or without KvextConnector.

The module knows no trace. The CPU time is the time of the scheduler with its connector, without the
worker's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from retention.layouts import BenchLayout
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions, build_vllm_config
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from host_tier.worker import PlanningWorker
from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.kvext_connector import KvextHandshake
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.layout.model import KVLayout

MAX_RUNNING = 16
MAX_MODEL_TOKENS = 1 << 20


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host tier of an engine.

    Attributes:
        num_bytes: Its size. It is only counted, and not allocated.
        store_policy: See ``StorePolicy``.
        hole_reuse: Whether chunks behind a missing chunk are loaded.
    """

    pages: KVLayout
    num_bytes: int
    store_policy: str
    hole_reuse: bool = False

    @property
    def config(self) -> dict[str, Any]:
        return {
            "host_memory_gib": self.num_bytes / (1 << 30),
            "store_policy": self.store_policy,
            "hole_reuse": self.hole_reuse,
            # Without a clock, the connector cannot compare times.
            "load_if_slower": True,
        }


class Engine:
    """A scheduler, and a stand-in for the connector's worker."""

    def __init__(self, layout: BenchLayout, num_blocks: int, host: HostMemory | None) -> None:
        vllm_config = build_vllm_config(
            _named_like(layout),
            EngineOptions(
                num_blocks=num_blocks,
                max_num_seqs=MAX_RUNNING,
                max_num_batched_tokens=layout.max_num_batched_tokens,
                max_model_len=MAX_MODEL_TOKENS,
                events=False,
                offloading=host.config if host else None,
            ),
        )
        vllm_config.lora_config = None
        _register_specs(vllm_config)
        self.scheduler = Scheduler(
            vllm_config=vllm_config,
            kv_cache_config=layout.to_config(num_blocks),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=layout.scheduler_block_tokens,
            hash_block_size=layout.hash_block_tokens,
        )
        self._worker = PlanningWorker(host.pages) if host else None
        if host is not None:
            worker = WorkerLayout(host.pages, host.num_bytes)
            self.scheduler.connector.set_xfer_handshake_metadata({0: KvextHandshake(worker)})
        self._elapsed_ns = 0

    @property
    def side(self) -> ConnectorScheduler | None:
        """The connector's scheduler side."""
        connector = self.scheduler.connector
        return connector.scheduler_side if connector is not None else None

    @property
    def worker(self) -> PlanningWorker | None:
        return self._worker

    @property
    def scheduler_s(self) -> float:
        """The CPU time in the scheduler."""
        return self._elapsed_ns / 1e9

    @property
    def has_work(self) -> bool:
        """Whether there are requests, or transfers of ended requests."""
        return bool(self.scheduler.has_requests())

    def add(self, request: Request) -> None:
        self._timed(self.scheduler.add_request, request)

    def schedule(self) -> SchedulerOutput:
        return self._timed(self.scheduler.schedule)

    def finish_step(self, scheduled: SchedulerOutput, sampled: dict[str, list[int]]) -> None:
        """Process the output of a step.

        Args:
            scheduled: The plan of the step.
            sampled: The sampled tokens by request, in the order of the schedule. A prompt that is
                not complete has none.
        """
        output = ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={request_id: i for i, request_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
        )
        if self._worker is not None:
            done = self._worker.run_step(scheduled.kv_connector_metadata)
            output = replace(output, kv_connector_output=done)
        self._timed(self.scheduler.update_from_output, scheduled, output)

    def _timed(self, function: Callable[..., Any], *args: object) -> Any:
        started_ns = time.thread_time_ns()
        try:
            return function(*args)
        finally:
            self._elapsed_ns += time.thread_time_ns() - started_ns


def _named_like(layout: BenchLayout) -> Layout:
    """The facts of a layout that the configuration of an engine needs."""
    block_tokens = layout.state_block_tokens or layout.hash_block_tokens
    attention = Attention.MAMBA if layout.state_block_tokens else Attention.FULL
    return Layout(layout.name, (Group(attention, block_tokens),))


def _register_specs(vllm_config: Any) -> None:
    """Register the specs, as vLLM's engine core does."""
    from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs

    register_all_kvcache_specs(vllm_config)
