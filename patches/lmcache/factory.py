# SPDX-License-Identifier: Apache-2.0
"""``vllm/distributed/kv_transfer/kv_connector/factory.py``: what LMCache's connector is given.

It takes the name of its objects, and the tokens of its blocks, from the two configs that vLLM hands
it. Ours are copies that differ in these, made for it alone; LMCache's code stays as it is.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.lmcache.hand_over import (
    limit_farewell,
    require_name,
    with_name_and_options,
)
from vllm_ascend_kvext.lmcache.handshake import (
    TRANSFER_MODE_KEY,
    TRANSFER_MODE_VARIABLE,
    choose_transfer_mode,
    chunk_tokens,
)
from vllm_ascend_kvext.lmcache.object_names import config_fingerprint, object_name
from vllm_ascend_kvext.lmcache.recovery import refuse_other_chunks
from vllm_ascend_kvext.lmcache.server_addresses import (
    require_listening,
    server_urls,
    starts_its_server,
)
from vllm_ascend_kvext.lmcache.token_blocks import (
    counted_in_tokens,
    require_chunks_of_whole_blocks,
    tokens_per_block,
)
from vllm_ascend_kvext.patches.lmcache import kv_cache_interface as spec_kinds
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.settings import Switch, parse_lmcache_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.base import KVConnectorBase
    from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig

NAME = "LMCacheMPConnector"

BUILTIN_VARIABLE = "LMCACHE_USE_UPSTREAM_MP"
"""With which vLLM 0.23.0 keeps its own class."""

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def create_connector(
    wrapped: Callable[..., KVConnectorBase],
    factory: type,
    config: VllmConfig,
    role: KVConnectorRole,
    *args: Any,
    **kwargs: Any,
) -> KVConnectorBase:
    """Create a connector; LMCache's with copies of the configs.

    What follows is ``kv_cache_config``, which vLLM 0.20.2 may leave out.

    Raises:
        LMCacheError: If the server is not there or does not fit, or the installed LMCache names its
            objects in another way.
    """
    transfer_config = config.kv_transfer_config
    given_config: KVCacheConfig | None = args[0] if args else kwargs.get("kv_cache_config")
    if transfer_config is None or given_config is None or not given_config.kv_cache_groups:
        return wrapped(config, role, *args, **kwargs)
    if transfer_config.kv_connector != NAME:
        _warn_of_children(transfer_config, given_config)
        return wrapped(config, role, *args, **kwargs)
    kv_cache_config = counted_in_tokens(given_config)
    name = _object_name(config, kv_cache_config)
    options = dict(transfer_config.kv_connector_extra_config)
    _ask_servers(config, kv_cache_config, options, is_worker=role.name == "WORKER")
    connector = wrapped(with_name_and_options(config, name, options), role, kv_cache_config)
    if name != config.model_config.model:
        require_name(connector, name)
    limit_farewell(connector)
    refuse_other_chunks(connector)
    return connector


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
        "lmcache": compat.installed_version("lmcache", distributions=("lmcache",)),
    }


def _instruction_set(config: VllmConfig) -> str:
    """Kernels on a CPU order a page by it."""
    if config.device_config.device_type != "cpu":
        return ""
    import torch

    return str(torch.backends.cpu.get_cpu_capability())


def _ask_servers(
    config: VllmConfig, kv_cache_config: KVCacheConfig, options: dict[str, Any], *, is_worker: bool
) -> None:
    """Refuse servers that do not fit; choose the transfer mode where none is set."""
    if starts_its_server(options):
        return
    urls = server_urls(options)
    if is_worker and len(urls) > 1:
        return  # It uses that of its own host, and may not reach the others.
    require_listening(urls)
    context_parallel_size = int(getattr(config.parallel_config, "decode_context_parallel_size", 1))
    group_tokens = tokens_per_block(kv_cache_config, context_parallel_size)
    for url in urls:
        with _client(url) as client:
            if client is None:
                return  # Another LMCache; its connector asks in its own way.
            require_chunks_of_whole_blocks(chunk_tokens(client, url), group_tokens, url)
            if is_worker and config.device_config.device_type == "cpu":
                wanted = options.get(TRANSFER_MODE_KEY, os.environ.get(TRANSFER_MODE_VARIABLE))
                mode = choose_transfer_mode(client, url, str(wanted or "auto").strip().lower())
                if mode is not None:
                    options[TRANSFER_MODE_KEY] = mode.value


@contextmanager
def _client(url: str) -> Iterator[Any]:
    """LMCache's client of a server; None where the installed LMCache has no such client."""
    try:
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
    except ImportError:
        yield None
        return
    client = RequestClientFactory.create(url, context=zmq.Context.instance())
    try:
        yield client
    finally:
        client.close()


def _warn_of_children(transfer_config: Any, kv_cache_config: KVCacheConfig) -> None:
    """A connector below another is not made here."""
    children = (transfer_config.kv_connector_extra_config or {}).get("connectors") or ()
    names = [child.get("kv_connector") for child in children if isinstance(child, dict)]
    if NAME in names and len(kv_cache_config.kv_cache_groups) > 1:
        logger.warning(
            "%s below %s names its objects without the layout of this engine's KV cache groups: "
            "let no engine with other groups use the same LMCache server.",
            NAME,
            transfer_config.kv_connector,
        )


def prefer_lmcaches_class() -> Callable[[], None]:
    """Let the connector's name stand for LMCache's class where vLLM's own cannot work.

    Which one that is, is found out when the connector is used.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1 import kv_cache_interface

    registry = KVConnectorFactory._registry
    load_builtin = registry[NAME]

    def load() -> type[KVConnectorBase]:
        return _lmcaches_class() or load_builtin()

    registry[NAME] = load

    def undo() -> None:
        if registry.get(NAME) is load:
            registry[NAME] = load_builtin
        spec_kinds.remove_names(kv_cache_interface)

    return undo


def _lmcaches_class() -> Any:
    """None where there is none, the user wants vLLM's, or LMCache still serves vLLM's."""
    if os.environ.get(BUILTIN_VARIABLE):
        return None
    try:
        from lmcache.integration.vllm import vllm_multi_process_adapter
    except ImportError:
        return None
    adapter = vllm_multi_process_adapter.LMCacheMPSchedulerAdapter
    if "server_url" in inspect.signature(adapter).parameters:
        return None
    from vllm.v1 import kv_cache_interface

    spec_kinds.add_missing_names(kv_cache_interface)
    from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

    logger.info("LMCacheMPConnector is that of the installed LMCache.")
    return LMCacheMPConnector


_FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory"

PATCHES = (
    Patch(
        id="KVX-501",
        target=f"{_FACTORY}.create_connector",
        kind=Kind.WRAP,
        feature="lmcache",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=create_connector,
        why="LMCache keys objects by the model's name, and engines with other KV cache groups read "
        "each other's; it takes the rows of vLLM-Ascend's compressed blocks for tokens; and a "
        "server that is absent or set up otherwise is noticed after five minutes.",
        retire_when="LMCache's keys have the layout, and its connector asks its server what it "
        "serves",
        relies_on=(
            # Both sides get a config, and the scheduler's has the first spec of a bundle.
            "vllm.v1.core.kv_cache_utils:generate_scheduler_kv_cache_config",
            "vllm.distributed.kv_transfer.kv_transfer_state:ensure_kv_transfer_initialized",
        ),
    ),
    Patch(
        id="KVX-502",
        target=f"{_FACTORY}.register_connector",
        kind=Kind.HOOK,
        feature="lmcache",
        vllm=("==0.20.2.*",),
        install=prefer_lmcaches_class,
        why="vLLM 0.20.2's own LMCacheMPConnector has one group only, and calls LMCache in a way "
        "that 0.5.6 has given up; and LMCache's class needs two names that came later.",
        retire_when="vLLM 0.20.2 is not supported any more: 0.23.0 does the same itself",
        relies_on=(
            f"{_FACTORY}._get_connector_class_with_compat",
            f"{_FACTORY}.get_connector_class_by_name",
        ),
    ),
)
