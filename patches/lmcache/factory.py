# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: the configs of LMCache's connector.

LMCache's connector takes the name of its objects, and the tokens of its blocks, from the two
configs that vLLM hands it. This patch gives the connector copies of the configs with another name
and other tokens. vLLM gets a class whose constructor passes such copies. Both the factory and
`MultiConnector` use this class.
"""

from __future__ import annotations

import copy
import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.lmcache.first_blocks import tell_first_blocks
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name
from vllm_ascend_kvext.lmcache.token_blocks import counted_in_tokens
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "LMCacheMPConnector"
LMCACHE_RELEASE = "0.5.6"
"""The release whose connector was read. A connector of another release may ignore the copies."""

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def get_connector_class(
    wrapped: Callable[..., Any], factory: type, *args: Any, **kwargs: Any
) -> Any:
    """The class of a connector. For LMCache's connector, the result of `_prepared_class`."""
    connector_class = wrapped(*args, **kwargs)
    if connector_class.__name__ != NAME or hasattr(connector_class, "_kvext_is_prepared"):
        return connector_class
    return _prepared_class(connector_class)


@functools.cache  # vLLM compares classes, so there is one class per class of LMCache.
def _prepared_class(connector_class: Any) -> Any:
    """A subclass that hands copies of the configs to LMCache's class."""

    class PreparedConnector(connector_class):  # type: ignore[misc]
        _kvext_is_prepared = True

        def __init__(
            self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
        ) -> None:
            """Raises `LMCacheError` if LMCache is not of the release that was read."""
            version = compat.installed_version("lmcache", distributions=(compat.LMCACHE,))
            require_release(version)
            kv_cache_config = counted_in_tokens(kv_cache_config)
            name = _object_name(vllm_config, kv_cache_config, version)
            own_config = copy.copy(vllm_config)
            own_config.model_config = copy.copy(vllm_config.model_config)
            own_config.model_config.model = name
            super().__init__(own_config, role, kv_cache_config)
            adapter = self.worker_adapter if role.name == "WORKER" else self.scheduler_adapter
            require_name(adapter.model_name, name)

        def build_connector_meta(self, scheduler_output: Any) -> Any:
            tell_first_blocks(self.request_trackers, scheduler_output)
            return super().build_connector_meta(scheduler_output)

    # `MultiConnector` tells the reports of several connectors apart by the names of their classes.
    PreparedConnector.__name__ = PreparedConnector.__qualname__ = NAME
    return PreparedConnector


def require_release(version: str | None) -> None:
    """Raise `LMCacheError` for a release of LMCache whose connector was not read."""
    if version is None or not compat.version_in(version, f"=={LMCACHE_RELEASE}"):
        raise LMCacheError(f"LMCache {LMCACHE_RELEASE}", f"LMCache {version}", _REMEDY)


def require_name(found: str, name: str) -> None:
    """Raise `LMCacheError` if LMCache does not name its objects as it was told."""
    # With decode context parallelism, LMCache adds something to the name.
    if not found.startswith(name):
        raise LMCacheError(f"LMCache to name its objects {name!r}", repr(found), _REMEDY)


_REMEDY = (
    f"Install lmcache=={LMCACHE_RELEASE} for the engine and the server. With another LMCache, set "
    "VLLM_ASCEND_KVEXT_DISABLE=lmcache: engines that lay out KV in another way then read wrong KV "
    "from one server, and LMCache stores wrong blocks below MultiConnector"
)


def _object_name(config: VllmConfig, kv_cache_config: KVCacheConfig, version: str | None) -> str:
    """The model's name, with the layout of the engine's KV."""
    upstream = compat.detect(os.environ)
    instruction_set = ""
    if config.device_config.device_type == "cpu":
        import torch

        instruction_set = str(torch.backends.cpu.get_cpu_capability())
    fingerprint = config_fingerprint(
        config,
        kv_cache_config,
        versions={
            compat.VLLM: upstream.vllm,
            compat.VLLM_ASCEND: upstream.vllm_ascend,
            compat.LMCACHE: version,
        },
        instruction_set=instruction_set,
        environ=os.environ,
    )
    name = object_name(config.model_config.model, fingerprint)
    logger.info("LMCache's objects of this engine lie under %s.", name)
    return name


_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

PATCHES = (
    Patch(
        id="KVX-501",
        target=f"{_FACTORY}.get_connector_class",
        feature="lmcache",
        wrapper=get_connector_class,
        why="LMCache keys objects by the model's name, so engines with different KV cache groups "
        "read each other's objects. It takes the rows of vLLM-Ascend's compressed blocks for "
        "tokens. And below vLLM 0.23's MultiConnector, it stores blocks under wrong tokens.",
        retire_when="LMCache's keys have the layout, and vLLM 0.23 is not supported any more",
        relies_on=(
            # Both sides get a config. The scheduler's config has only the first spec of a bundle.
            "vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config",
            "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
            # This function asks for a class, and makes an object of it. `MultiConnector` does the
            # same. `MultiConnector` is not named here, because its module imports prometheus_client
            # before vLLM has set up prometheus_client.
            f"{_FACTORY}.create_connector",
        ),
    ),
)
