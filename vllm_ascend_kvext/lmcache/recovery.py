# SPDX-License-Identifier: Apache-2.0
"""A server that comes back with other chunks is not used.

LMCache 0.5.6 asks for the chunk size once, when the connector starts. A server that is started
again with another one fails at stores without an answer (``get_hashes`` in
``lmcache/v1/multiprocess/session.py``), and the request's blocks are held for good.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from vllm_ascend_kvext.lmcache.handshake import ANSWER_LIMIT_S

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def refuse_other_chunks_of_worker(adapter: Any) -> None:
    """Let an ``LMCacheMPWorkerAdapter`` register its pages again only with the same chunks.

    Call it before the adapter has pinged the server.
    """
    register_again = adapter._reregister_kv_caches_callback
    has_same = _same_chunks(
        adapter.req_client, "LMCache's server", adapter.lmcache_tokens_per_chunk
    )

    # The heartbeat takes it from the adapter when it starts.
    adapter._reregister_kv_caches_callback = lambda: has_same() and register_again()


def refuse_other_chunks_of_scheduler(adapter: Any) -> None:
    """Let an ``LMCacheMPSchedulerAdapter`` take only servers of the same chunks for healthy again.

    Call it before the adapter has pinged a server.
    """
    start_heartbeats = adapter._ensure_heartbeat_started

    def start_guarded() -> None:
        is_first = adapter._heartbeats is None
        start_heartbeats()
        for url, heartbeat in adapter._heartbeats.items() if is_first else ():
            heartbeat.register_recover_callback(
                _same_chunks(adapter.req_clients[url], url, adapter.lmcache_tokens_per_chunk)
            )

    adapter._ensure_heartbeat_started = start_guarded


def _same_chunks(client: Any, url: str, expected_tokens: int) -> Callable[[], bool]:
    """Whether a server that is back has the chunks that this engine started with.

    Asked with every heartbeat as long as it has not; what is wrong is logged once.
    """
    logged_tokens = expected_tokens

    def has_same() -> bool:
        nonlocal logged_tokens
        try:
            found_tokens = int(client.get_chunk_size().result(timeout=ANSWER_LIMIT_S))
        except TimeoutError:
            return False  # LMCache pings it again.
        if found_tokens not in (expected_tokens, logged_tokens):
            logger.error(
                "LMCacheMPConnector: %s is back with chunks of %d tokens, and this engine started "
                "with %d. It goes on without LMCache, and computes what it would load. Start the "
                "server with --chunk-size %d, or start the engine again",
                url,
                found_tokens,
                expected_tokens,
                expected_tokens,
            )
        logged_tokens = found_tokens
        return found_tokens == expected_tokens

    return has_same
