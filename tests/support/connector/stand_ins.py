# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV connectors that move nothing. They are used beside a KvextConnector, or in its place.

{"kv_connector": "NullConnector", "kv_connector_module_path": "support.connector.stand_ins"}
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

MODULE = "support.connector.stand_ins"


class NullConnector(KVConnectorBase_V1, SupportsHMA):
    """A connector that has nothing and stores nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        return False, None

    def _do_nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = _do_nothing


@dataclass
class Address(KVConnectorHandshakeMetadata):
    """The address of a worker, like in the handshake of Mooncake's connector."""

    local_ip: str
    handshake_port: int


class AddressedConnector(NullConnector):
    """A connector whose workers send their addresses, like Mooncake's connector.

    The scheduler side fails unless each of its workers has sent an address.
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._num_workers = vllm_config.parallel_config.world_size
        self._has_addresses = role is KVConnectorRole.WORKER

    def get_handshake_metadata(self) -> Address:
        return Address("127.0.0.1", 5000)

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, Any]) -> None:
        found = [(each.local_ip, each.handshake_port) for each in metadata.values()]
        assert found == [("127.0.0.1", 5000)] * self._num_workers, found
        self._has_addresses = True

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> Any:
        assert self._has_addresses, "the scheduler side has no addresses of workers"
        return super().get_num_new_matched_tokens(request, num_computed_tokens)
