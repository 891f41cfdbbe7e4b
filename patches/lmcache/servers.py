# SPDX-License-Identifier: Apache-2.0
"""What LMCache's servers are asked before its connector starts, with LMCache's client."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.lmcache.handshake import (
    TRANSFER_MODE_KEY,
    TRANSFER_MODE_VARIABLE,
    choose_transfer_mode,
    chunk_tokens,
    require_capabilities,
)
from vllm_ascend_kvext.lmcache.protocol import (
    ZmqExchange,
    require_current_protocol,
    require_no_retired_request,
)
from vllm_ascend_kvext.lmcache.server_addresses import (
    require_listening,
    server_urls,
    starts_its_server,
)
from vllm_ascend_kvext.lmcache.token_blocks import (
    require_chunks_of_whole_blocks,
    tokens_per_block,
)
from vllm_ascend_kvext.patches.lmcache import known_release

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_ZMQ = "tcp://"
_RETIRED_REQUEST = "query_prefetch_lookup_hits"
"""The client of LMCache 0.5.5 has it, and that of 0.5.6 has not."""


def ask_servers(
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
            installed = str(known_release.version())
            capabilities = require_capabilities(client, url, installed)
            if url.startswith(_ZMQ) and not hasattr(client, _RETIRED_REQUEST):
                with closing(ZmqExchange(url)) as exchange:
                    require_no_retired_request(exchange, capabilities, url, installed)
            require_chunks_of_whole_blocks(chunk_tokens(client, url), group_tokens, url)
            if is_worker and config.device_config.device_type == "cpu":
                wanted = options.get(TRANSFER_MODE_KEY, os.environ.get(TRANSFER_MODE_VARIABLE))
                mode = choose_transfer_mode(client, url, str(wanted or "auto").strip().lower())
                if mode is not None:
                    options[TRANSFER_MODE_KEY] = mode.value


@contextmanager
def _client(url: str) -> Iterator[Any]:
    """LMCache's client of a server; None where the installed LMCache has no such client.

    Raises:
        LMCacheError: If the server speaks another protocol.
    """
    try:
        import zmq
        from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
    except ImportError:
        yield None
        return
    if url.startswith(_ZMQ):
        with closing(ZmqExchange(url)) as exchange:
            require_current_protocol(exchange, url, str(known_release.version()))
    client = RequestClientFactory.create(url, context=zmq.Context.instance())
    try:
        yield client
    finally:
        client.close()
