# SPDX-License-Identifier: Apache-2.0
"""LMCache's servers are asked with its own client and its own reading of the specs."""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.lmcache.handshake import (
    REGISTRATION_LIMIT_S,
    TIMEOUT_KEY,
    TRANSFER_MODE_KEY,
    TRANSFER_MODE_VARIABLE,
    choose_transfer_mode,
    require_listening,
    require_same_release,
    require_whole_blocks,
    server_urls,
    starts_its_server,
)
from vllm_ascend_kvext.patches.lmcache import known_release

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


def ask_servers(
    config: VllmConfig, kv_cache_config: KVCacheConfig, options: dict[str, Any], *, is_worker: bool
) -> None:
    """Refuse servers that do not fit, and set what the user has left open.

    Args:
        kv_cache_config: Its groups count tokens.
        options: ``kv_connector_extra_config`` of the connector. It gets the transfer mode, and how
            long a worker waits when it starts, registers its pages and ends.

    Raises:
        LMCacheError: If a server is not there or does not fit.
    """
    if starts_its_server(options):
        return
    urls = server_urls(options)
    if is_worker:
        options.setdefault(TIMEOUT_KEY, REGISTRATION_LIMIT_S)
        if len(urls) > 1:
            return  # It uses that of its own host, and may not reach the others.
    has_mode = is_worker and config.device_config.device_type == "cpu"
    for url in urls:
        require_listening(url)
        try:
            import zmq
            from lmcache.integration.vllm.lmcache_mp_connector import get_group_tokens_per_block
            from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
        except ImportError:
            return  # Another LMCache; its connector asks in its own way.
        group_tokens = get_group_tokens_per_block(config, kv_cache_config)
        with closing(RequestClientFactory.create(url, context=zmq.Context.instance())) as client:
            chunk_tokens = require_same_release(client, url, str(known_release.version()))
            require_whole_blocks(chunk_tokens, group_tokens, url)
            if not has_mode:
                continue
            wanted = options.get(TRANSFER_MODE_KEY, os.environ.get(TRANSFER_MODE_VARIABLE))
            wanted = str(wanted or "auto").strip().lower()
            if mode := choose_transfer_mode(client, url, wanted):
                options[TRANSFER_MODE_KEY] = mode
