# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The Mooncake connectors of vLLM-Ascend, whose engine is the one of `transfer_engine`.

{"kv_connector": "MooncakeConnectorV1", "kv_connector_module_path": MODULE}
"""

from __future__ import annotations

from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_connector import (
    MooncakeConnector as MooncakeConnectorV1,
)
from vllm_ascend.distributed.kv_transfer.kv_p2p.mooncake_hybrid_connector import (
    MooncakeConnector as MooncakeHybridConnector,
)

from support.prefill_decode.transfer_engine import engine_of_process

__all__ = ["MooncakeConnectorV1", "MooncakeHybridConnector"]

engine_of_process()
