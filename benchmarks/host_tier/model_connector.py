# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A KV connector whose host tier is a model (`policies`). Its transfers end between two steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput

from host_tier.policies import Computed, Policy
from vllm_ascend_kvext.replay.engine import PlayedClock


@dataclass
class ModelMetadata(KVConnectorMetadata):
    """The requests whose loads begin in a step."""

    loads: set[str] = field(default_factory=set)


class ModelConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side of a model. `ModelTier` sets ``policy``."""

    policy: Policy
    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._requests: dict[str, Any] = {}
        self._hit_tokens: dict[str, int] = {}
        self._offered_tokens: dict[str, int] = {}
        self._metadata = ModelMetadata()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        found_tokens = self.policy.find(
            _number(request), request.block_hashes, request.num_tokens - 1
        )
        num_external = max(0, found_tokens - num_computed_tokens)
        return num_external, num_external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        self.policy.admit(_number(request))
        if num_external_tokens:
            self._metadata.loads.add(request.request_id)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            end_tokens = request.num_computed_tokens + num_tokens
            # What was hit on the device may have given way in the tier. It is offered again.
            first_tokens = self._offered_tokens.get(request_id, 0)
            hit_tokens = self._hit_tokens.setdefault(request_id, request.num_computed_tokens)
            if end_tokens <= first_tokens:
                continue
            self._offered_tokens[request_id] = end_tokens
            self.policy.store(
                Computed(
                    _number(request),
                    request.block_hashes,
                    first_tokens,
                    end_tokens,
                    request.num_prompt_tokens,
                    hit_tokens,
                )
            )
        metadata = self._metadata
        self._metadata = ModelMetadata()
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        self._requests.pop(request.request_id, None)
        self._hit_tokens.pop(request.request_id, None)
        self._offered_tokens.pop(request.request_id, None)
        return False, None

    def _has_no_worker_side(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("ModelTier plays the worker side")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _has_no_worker_side


@dataclass(frozen=True, slots=True)
class ModelTier:
    """The host tier of an engine with a model's connector."""

    policy: Policy

    @property
    def transfer_config(self) -> KVTransferConfig:
        return KVTransferConfig(
            kv_connector="ModelConnector",
            kv_connector_module_path=__name__,
            kv_load_failure_policy="recompute",
            kv_role="kv_both",
        )

    def start(self, scheduler: Scheduler, clock: PlayedClock) -> ModelTier:
        scheduler.connector.policy = self.policy
        return self

    def run_step(self, metadata: ModelMetadata) -> KVConnectorOutput:
        return KVConnectorOutput(finished_recving=metadata.loads or None)


def _number(request: Any) -> int:
    """The number of the request in its trace, which is the end of its id."""
    return int(request.request_id.rpartition("-")[2])
