# SPDX-License-Identifier: Apache-2.0
"""What LMCache's connector is made of, and what is looked after once it is made."""

from __future__ import annotations

import copy
from typing import Any

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.handshake import ANSWER_LIMIT_S


def with_name_and_options(config: Any, name: str, options: dict[str, Any]) -> Any:
    """A copy of vLLM's config for the connector alone.

    Args:
        config: Of the engine; it stays as it is, and shares with the copy all that does not differ.
        name: Stands for the model's.
        options: ``kv_connector_extra_config`` of the connector.
    """
    new_config = copy.copy(config)
    new_config.model_config = copy.copy(config.model_config)
    new_config.model_config.model = name
    new_config.kv_transfer_config = copy.copy(config.kv_transfer_config)
    new_config.kv_transfer_config.kv_connector_extra_config = options
    return new_config


def require_name(connector: Any, name: str) -> None:
    """Refuse an LMCache that takes the name of its objects from elsewhere.

    Raises:
        LMCacheError: If neither side's adapter has the name.
    """
    adapter = getattr(connector, "scheduler_adapter", None) or getattr(
        connector, "worker_adapter", None
    )
    found = getattr(adapter, "model_name", None)
    # LMCache adds to it, with decode context parallelism.
    if found is None or not str(found).startswith(name):
        raise LMCacheError(
            f"LMCacheMPConnector: expected its objects to be named {name!r}, found {found!r}: the "
            "installed LMCache takes the name from elsewhere, and engines with other KV cache "
            "groups could read each other's objects. Use LMCache 0.5.6, or set "
            "VLLM_ASCEND_KVEXT_LMCACHE_KEYS=0 where no other engine uses the server"
        )


def limit_farewell(connector: Any) -> None:
    """Let a worker not wait five minutes for the farewell of a server that is gone.

    LMCache waits as long as for an answer at the start (``LMCacheMPWorkerAdapter.shutdown``).
    """
    adapter: Any = getattr(connector, "worker_adapter", None)
    if not hasattr(adapter, "_mq_timeout"):
        return
    shut_down = adapter.shutdown

    def shut_down_soon() -> None:
        adapter._mq_timeout = min(adapter._mq_timeout, ANSWER_LIMIT_S)
        shut_down()

    adapter.shutdown = shut_down_soon
