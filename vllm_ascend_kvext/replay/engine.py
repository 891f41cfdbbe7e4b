# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM's real scheduler without a model, with or without a KV connector.

The module knows no log. The CPU time is the time of the scheduler with its connector, without the
worker's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from vllm.config import KVTransferConfig, VllmConfig
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_ascend_kvext.connector.common.messages import WorkerLayout
from vllm_ascend_kvext.connector.kvext_connector import KvextHandshake
from vllm_ascend_kvext.connector.scheduler.connector_scheduler import ConnectorScheduler
from vllm_ascend_kvext.layout.model import KVLayout
from vllm_ascend_kvext.replay.counted_tier import (
    COUNTED_URL,
    CountedSecondaryTier,
    CountedTier,
)
from vllm_ascend_kvext.replay.worker import PlanningWorker

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ScheduledModel:
    """What a scheduler is made from.

    Attributes:
        kv_cache_config: The groups and the number of blocks.
        scheduler_block_tokens: The argument ``block_size`` of vLLM's scheduler.
        hash_block_tokens: The argument ``hash_block_size``.
    """

    vllm_config: VllmConfig
    kv_cache_config: KVCacheConfig
    scheduler_block_tokens: int
    hash_block_tokens: int


class PlayedClock:
    """A clock that the play sets, so that results do not depend on the machine."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class ConnectorWorker(Protocol):
    """A stand-in for the worker side of a connector, which is done with every transfer at once."""

    def run_step(self, metadata: Any) -> KVConnectorOutput:
        """Carry out the transfers of a step, and say which have ended."""


class HostTier(Protocol):
    """A host tier that an engine can have."""

    @property
    def transfer_config(self) -> KVTransferConfig:
        """The configuration of the tier's connector."""

    def start(self, scheduler: Any, clock: PlayedClock) -> ConnectorWorker:
        """Make the worker side, when the scheduler has made the connector."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host tier of KvextConnector.

    Attributes:
        pages: The pages of one worker.
        num_bytes: The size of the worker's host memory. It is only counted, and not allocated.
        options: Further keys of ``kv_connector_extra_config``.
        shared: A shared tier behind host memory; None if there is none.
        plans: Whether transfers are planned, see `PlanningWorker`.
    """

    pages: KVLayout
    num_bytes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    shared: CountedTier | None = None
    plans: bool = True

    @property
    def transfer_config(self) -> KVTransferConfig:
        config = {
            # The clock does not know how long a transfer takes.
            "load_if_slower": True,
            **self.options,
            "host_memory_gib": self.num_bytes / _GIB,
        }
        if self.shared is not None:
            config["shared_tier"] = COUNTED_URL
        return KVTransferConfig(
            kv_connector="KvextConnector",
            kv_connector_module_path="vllm_ascend_kvext.connector",
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
            kv_connector_extra_config=config,
        )

    def start(self, scheduler: Any, clock: PlayedClock) -> ConnectorWorker:
        connector = scheduler.connector
        connector.clock = clock
        connector.has_tokens = False
        if self.shared is not None:
            connector.secondary = CountedSecondaryTier(None, connector.options, self.shared)
        worker = WorkerLayout(self.pages, self.num_bytes)
        connector.set_xfer_handshake_metadata({0: KvextHandshake(worker)})
        return PlanningWorker(self.pages, self.plans, self.shared)


class Engine:
    """A scheduler, and a stand-in for the connector's worker.

    Attributes:
        clock: The time of the connector. The caller of `schedule` sets it.

    Raises:
        KvextError: The connector cannot work with this model or these options.
    """

    def __init__(self, model: ScheduledModel, host: HostTier | None) -> None:
        vllm_config = copy(model.vllm_config)
        vllm_config.kv_transfer_config = host.transfer_config if host is not None else None
        register_all_kvcache_specs(vllm_config)  # The engine core does so, too.
        self.scheduler = vllm_config.scheduler_config.get_scheduler_cls()(
            vllm_config=vllm_config,
            kv_cache_config=model.kv_cache_config,
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=model.scheduler_block_tokens,
            hash_block_size=model.hash_block_tokens,
        )
        self.clock = PlayedClock()
        self.worker = host.start(self.scheduler, self.clock) if host is not None else None
        self._elapsed_ns = 0

    @property
    def side(self) -> ConnectorScheduler | None:
        """The scheduler side of KvextConnector; None if the engine has another connector."""
        return getattr(self.scheduler.connector, "scheduler_side", None)

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
        if self.worker is not None:
            done = self.worker.run_step(scheduled.kv_connector_metadata)
            output = replace(output, kv_connector_output=done)
        self._timed(self.scheduler.update_from_output, scheduled, output)

    def _timed(self, function: Callable[..., Any], *args: object) -> Any:
        started_ns = time.thread_time_ns()
        try:
            return function(*args)
        finally:
            self._elapsed_ns += time.thread_time_ns() - started_ns
