# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A KV connector that claims to have part of every second prompt. It moves no bytes.

Its scheduler side behaves like that of any connector. ``model_runner`` does the work of its worker
side: it writes the claimed KV where the metadata says.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from .options import ExternalLoad


@dataclass(frozen=True, slots=True)
class Load:
    """External KV of one request: tokens ``[start_tokens, end_tokens)`` go into these blocks."""

    request_id: str
    block_ids: tuple[list[int], ...]
    start_tokens: int
    end_tokens: int
    between_steps: bool


@dataclass
class ScriptedMetadata(KVConnectorMetadata):
    """The work of the worker side in one step."""

    loads: list[Load] = field(default_factory=list)
    sends: list[str] = field(default_factory=list)


class ScriptedConnector(KVConnectorBase_V1, SupportsHMA):
    """The request's number decides. Even ones load. Every third one delays freeing its blocks."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._external_load = ExternalLoad(extra["external_load"])
        self._extends_local_hits = bool(extra["extends_local_hits"])
        self._unit_tokens = int(extra["unit_tokens"])
        self._matched: dict[str, tuple[int, int]] = {}
        self._receiving: set[str] = set()
        self._metadata = ScriptedMetadata()

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if self._external_load is ExternalLoad.NEVER or _number(request) % 2:
            return 0, False
        if num_computed_tokens and not self._extends_local_hits:
            return 0, False
        held_tokens = request.num_prompt_tokens * 3 // 4 // self._unit_tokens * self._unit_tokens
        num_external = min(held_tokens, request.num_tokens - 1) - num_computed_tokens
        if num_external <= 0:
            return 0, False
        self._matched[request.request_id] = (num_computed_tokens, held_tokens)
        return num_external, self._external_load is ExternalLoad.BETWEEN_STEPS

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        matched = self._matched.pop(request.request_id, None)
        if matched is None or num_external_tokens == 0:
            return
        between_steps = self._external_load is ExternalLoad.BETWEEN_STEPS
        if between_steps:
            self._receiving.add(request.request_id)
        self._metadata.loads.append(
            Load(request.request_id, blocks.get_block_ids(), *matched, between_steps)
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._receiving -= connector_output.finished_recving or set()

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        metadata = self._metadata
        self._metadata = ScriptedMetadata()
        return metadata

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        # If an aborted request still receives KV, it is freed after the end of this load.
        receiving = request.request_id in self._receiving
        delay_free = _number(request) % 3 == 0 and not receiving
        if delay_free:
            self._metadata.sends.append(request.request_id)
        return delay_free, None

    def _has_no_worker_side(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("the model runner of the harness plays the worker side")

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _has_no_worker_side


def _number(request: Any) -> int:
    """The number at the end of a request id of ``workload``."""
    return int(request.request_id.rpartition("-")[2])
