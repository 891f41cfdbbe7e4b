# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The KV connector: keeps KV of every cache group in host memory, and brings it back.

vLLM finds the class here by its name (``kv_connector_module_path``). The class is imported only
when it is asked for, because its import needs vLLM.
"""

from __future__ import annotations

from typing import Any

__all__ = ["KvextConnector"]


def __getattr__(name: str) -> Any:
    if name != "KvextConnector":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_ascend_kvext.connector.kvext_connector import KvextConnector

    return KvextConnector
