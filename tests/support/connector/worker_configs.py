# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The parts of vLLM's configuration that a worker of the connector reads."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_ascend_kvext.connector.common.options import ConnectorOptions


class AttentionLayer:
    @staticmethod
    def get_attn_backend() -> Any:
        return SimpleNamespace(get_name=lambda: "SMALL_ATTN")


def parallel_config(**values: int) -> Any:
    sizes = ("tensor", "pipeline", "decode_context", "prefill_context")
    return SimpleNamespace(
        **{"rank": 0, **{f"{size}_parallel_size": 1 for size in sizes}, **values}
    )


def vllm_config(layers: dict[str, AttentionLayer] | None = None, **values: Any) -> Any:
    model = {"model": "some/model", "revision": None, "quantization": None}
    parts = {
        "parallel_config": parallel_config(),
        "model_config": SimpleNamespace(**model, dtype="torch.bfloat16"),
        "cache_config": SimpleNamespace(cache_dtype="auto"),
        "compilation_config": SimpleNamespace(static_forward_context=layers or {}),
        "speculative_config": None,
    }
    return SimpleNamespace(**(parts | values))


def worker_options(host_bytes: int = 8 << 20, **values: Any) -> ConnectorOptions:
    """The options of a connector with one worker and some host memory."""
    return ConnectorOptions(host_memory_gib=host_bytes / (1 << 30), **values)
