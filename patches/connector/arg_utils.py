# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/engine/arg_utils.py``: a wrong option is refused when the configuration is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs


def check_connector(
    wrapped: Callable[..., VllmConfig], engine_args: EngineArgs, *args: Any, **kwargs: Any
) -> VllmConfig:
    """Check arguments of an engine with KvextConnector, and then the configuration made of them."""
    if engine_args.kv_transfer_config is None:
        return wrapped(*args, **kwargs)
    # Engines without a connector do not need this import.
    from vllm_ascend_kvext.engine_configuration import check_arguments, check_configuration

    check_arguments(engine_args)
    vllm_config = wrapped(*args, **kwargs)
    check_configuration(vllm_config)
    return vllm_config


PATCHES = (
    Patch(
        id="KVX-419",
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        feature="connector",
        wrapper=check_connector,
        when_imported=True,
        why="vLLM makes connectors after it has loaded the weights, in other processes. A wrong "
        "option would show minutes later, below the errors of the processes that wait for them.",
        retire_when="upstream asks connectors to check their options when it makes its "
        "configuration",
    ),
)
