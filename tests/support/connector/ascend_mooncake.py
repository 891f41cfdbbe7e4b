# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The Mooncake connectors of vLLM-Ascend without Mooncake's engine, which would send KV.

    {"kv_connector": "MooncakeConnectorV1", "kv_connector_module_path": MODULE}

They are the real connectors: they exchange addresses, listen, and answer the scheduler. Mooncake's
engine is replaced, because it registers memory with a network that the emulated NPU does not have.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_connector import (
    MooncakeConnector as MooncakeConnectorV1,
)
from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_hybrid_connector import (
    MooncakeConnector as MooncakeHybridConnector,
)
from vllm_ascend.distributed.kv_transfer.utils.mooncake_transfer_engine import global_te

__all__ = ["MooncakeConnectorV1", "MooncakeHybridConnector"]

RPC_PORT = 4242


class NoNetwork:
    """The calls that the connectors make to Mooncake's engine before they send. Others raise."""

    def get_rpc_port(self) -> int:
        return RPC_PORT

    def register_memory(self, address: int, num_bytes: int) -> int:
        return 0


engine: Any = NoNetwork()
global_te.transfer_engine = engine
