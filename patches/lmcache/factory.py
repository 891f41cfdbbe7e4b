# SPDX-License-Identifier: Apache-2.0
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: what LMCache's connector is given.

It takes the name of its objects, and the tokens of its blocks, from the two configs that vLLM hands
it. Ours are copies that differ in these, made for it alone; LMCache's code stays as it is. vLLM
gets a class whose objects are made in this way, so that it does not matter who makes them: the
factory, or `MultiConnector`.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.lmcache.first_blocks import complete_first_blocks
from vllm_ascend_kvext.lmcache.hand_over import (
    limit_farewell,
    require_name,
    with_name_and_options,
)
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name
from vllm_ascend_kvext.lmcache.recovery import refuse_other_chunks
from vllm_ascend_kvext.lmcache.stored_tokens import watch_stores
from vllm_ascend_kvext.lmcache.token_blocks import (
    counted_in_tokens,
    has_states,
)
from vllm_ascend_kvext.patches.lmcache import known_release
from vllm_ascend_kvext.patches.lmcache.servers import ask_servers
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.settings import Switch, parse_lmcache_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "LMCacheMPConnector"

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def get_connector_class(
    wrapped: Callable[..., Any], factory: type, *args: Any, **kwargs: Any
) -> Any:
    """The class of a connector; of LMCache's, one that gets copies of the configs.

    Also of those below `MultiConnector`, which asks for classes alone.
    """
    connector_class = wrapped(*args, **kwargs)
    if connector_class.__name__ != NAME or issubclass(connector_class, Prepared):
        return connector_class
    return _prepared_class(connector_class)


class Prepared:
    """Marks a class whose objects are made of copies of the configs."""


@functools.cache
def _prepared_class(connector_class: Any) -> Any:
    """One for each class: vLLM compares them."""

    class PreparedConnector(connector_class, Prepared):  # type: ignore[misc]
        def __init__(
            self,
            vllm_config: VllmConfig,
            role: KVConnectorRole,
            kv_cache_config: KVCacheConfig,
        ) -> None:
            construct(self, super().__init__, vllm_config, role, kv_cache_config)

        @classmethod
        def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Any:
            from vllm_ascend_kvext.patches.lmcache.metrics import LMCacheStats

            return LMCacheStats(data)

        @classmethod
        def build_prom_metrics(cls, *arguments: Any) -> Any:
            from vllm_ascend_kvext.patches.lmcache.metrics import LMCachePromMetrics

            return LMCachePromMetrics(super().build_prom_metrics(*arguments), *arguments)

    # Reports of several connectors are told apart by the names of their classes.
    PreparedConnector.__name__ = PreparedConnector.__qualname__ = NAME
    return PreparedConnector


def construct(
    connector: Any,
    initialize: Callable[..., None],
    config: VllmConfig,
    role: KVConnectorRole,
    given_config: KVCacheConfig,
) -> None:
    """Make LMCache's connector of copies of the configs, and look after it.

    Args:
        connector: Not yet initialized.
        initialize: LMCache's.
        config: Of the engine; for a connector below another, with that one's options.
        role: The side.
        given_config: Its groups count rows where vLLM-Ascend compresses.

    Raises:
        LMCacheError: If the server is not there or does not fit, or the installed LMCache names its
            objects in another way.
    """
    transfer_config = config.kv_transfer_config
    if transfer_config is None or not given_config.kv_cache_groups:
        initialize(config, role, given_config)
        return
    kv_cache_config = counted_in_tokens(given_config)
    name = _object_name(config, kv_cache_config)
    options = dict(transfer_config.kv_connector_extra_config)
    is_worker = role.name == "WORKER"
    ask_servers(config, kv_cache_config, options, is_worker=is_worker)
    initialize(with_name_and_options(config, name, options), role, kv_cache_config)
    if name != config.model_config.model:
        require_name(connector, name)
    _look_after(connector, kv_cache_config, is_worker=is_worker)


def _look_after(connector: Any, kv_cache_config: KVCacheConfig, *, is_worker: bool) -> None:
    """What is changed in LMCache's objects, where LMCache's code is that which was read."""
    if not known_release.is_as_read():
        return
    # Imports vLLM, which this module is imported before.
    from vllm_ascend_kvext.patches.lmcache.metrics import ask_for_reports, report_stores

    limit_farewell(connector)
    refuse_other_chunks(connector)
    if is_worker:
        ask_for_reports(connector)
        return
    complete_first_blocks(connector)
    report_stores(connector, watch_stores(connector, can_look_up=not has_states(kv_cache_config)))


def _object_name(config: VllmConfig, kv_cache_config: KVCacheConfig) -> str:
    """With the layout for several groups, or where the user wants it."""
    model_name = config.model_config.model
    keys = parse_lmcache_keys(os.environ)
    has_layout = (
        len(kv_cache_config.kv_cache_groups) > 1 if keys is Switch.AUTO else keys is Switch.ON
    )
    if not has_layout:
        return model_name
    name = object_name(
        model_name,
        config_fingerprint(
            config,
            kv_cache_config,
            versions=_versions(),
            instruction_set=_instruction_set(config),
            environ=os.environ,
        ),
    )
    logger.info("LMCache's objects of this engine lie under %s.", name)
    return name


def _versions() -> dict[str, str | None]:
    """Of all that lays out pages and objects."""
    upstream = compat.detect(os.environ)
    return {
        compat.VLLM: upstream.vllm,
        compat.VLLM_ASCEND: upstream.vllm_ascend,
        compat.LMCACHE: known_release.version(),
    }


def _instruction_set(config: VllmConfig) -> str:
    """Kernels on a CPU order a page by it."""
    if config.device_config.device_type != "cpu":
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

_WHY = (
    "LMCache keys objects by the model's name, and engines with other KV cache groups read each "
    "other's; it takes the rows of vLLM-Ascend's compressed blocks for tokens; a server that is "
    "absent or set up otherwise is noticed after five minutes; and stores that find no room are "
    "reported as done."
)
_RETIRE_WHEN = (
    "LMCache's keys have the layout, its connector asks its server what it serves, and its stores "
    "say what was kept"
)
_RELIES_ON = (
    # Both sides get a config, and the scheduler's has the first spec of a bundle.
    "vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config",
    "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
    # Makes an object of the class that it asks for. `MultiConnector` does the same; it is not read
    # here, because its module imports prometheus_client before vLLM has set that up.
    f"{_FACTORY}.create_connector",
)

PATCHES = (
    Patch(
        id="KVX-501",
        target=f"{_FACTORY}.get_connector_class",
        kind=Kind.WRAP,
        feature="lmcache",
        vllm=("==0.23.0.*",),
        wrapper=get_connector_class,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
        relies_on=_RELIES_ON,
        lmcache=known_release.RELIED_ON,
    ),
    Patch(
        id="KVX-504",
        target=f"{_FACTORY}.get_connector_class_by_name",
        kind=Kind.WRAP,
        feature="lmcache",
        vllm=("==0.23.0.*",),
        wrapper=get_connector_class,
        why="MultiConnector rebuilds the statistics of connectors below it by their names.",
        retire_when="KVX-501 is retired",
    ),
)
