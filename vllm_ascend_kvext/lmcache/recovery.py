# SPDX-License-Identifier: Apache-2.0
"""A server that comes back with other chunks is not used.

LMCache 0.5.6 asks for the chunk size once, when the connector starts. A server that is started
again with another one fails at stores without an answer (``get_hashes`` in
``lmcache/v1/multiprocess/session.py``), and the request's blocks are held for good.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.handshake import Client, chunk_tokens

logger = logging.getLogger("vllm.ascend_kvext.lmcache")


def refuse_other_chunks(connector: Any) -> None:
    """Let a connector go on without a server that has come back with other chunks.

    Both sides of it ping the server; one that answers again is asked for its chunks before it is
    taken for healthy. What is not known of another LMCache is left alone.
    """
    worker = getattr(connector, "worker_adapter", None)
    if hasattr(worker, "_reregister_kv_caches_callback"):
        _guard_worker(worker)
    scheduler = getattr(connector, "scheduler_adapter", None)
    if hasattr(scheduler, "_ensure_heartbeat_started"):
        _guard_scheduler(scheduler)


def _guard_worker(adapter: Any) -> None:
    register_again = adapter._reregister_kv_caches_callback
    has_same = SameChunks(adapter.req_client, "LMCache's server", adapter.lmcache_tokens_per_chunk)

    def register_with_same_chunks() -> bool:
        return has_same() and bool(register_again())

    # The heartbeat takes it from the adapter when it starts.
    adapter._reregister_kv_caches_callback = register_with_same_chunks


def _guard_scheduler(adapter: Any) -> None:
    start_heartbeats = adapter._ensure_heartbeat_started

    def start_guarded() -> None:
        is_first = not adapter._heartbeats
        start_heartbeats()
        if not is_first:
            return
        for url, heartbeat in (adapter._heartbeats or {}).items():
            client = adapter.req_clients[url]
            heartbeat.register_recover_callback(
                SameChunks(client, url, adapter.lmcache_tokens_per_chunk)
            )

    adapter._ensure_heartbeat_started = start_guarded


@dataclass(slots=True)
class SameChunks:
    """Whether a server that is back has the chunks that this engine started with.

    Called with every heartbeat as long as it has not; what is wrong is logged once.

    Attributes:
        client: Of the server.
        url: Of the server, for the log.
        expected_tokens: Per chunk.
    """

    client: Client
    url: str
    expected_tokens: int
    _told: str = ""

    def __call__(self) -> bool:
        try:
            found_tokens = chunk_tokens(self.client, self.url)
        except LMCacheError as error:
            self._tell(str(error))
            return False
        if found_tokens == self.expected_tokens:
            self._told = ""
            return True
        expected_tokens = self.expected_tokens
        self._tell(
            f"LMCacheMPConnector: {self.url} is back with chunks of {found_tokens} tokens, and "
            f"this engine started with {expected_tokens}. It goes on without LMCache, and computes "
            f"what it would load. Start the server with --chunk-size {expected_tokens}, or start "
            "the engine again"
        )
        return False

    def _tell(self, text: str) -> None:
        if text != self._told:
            logger.error("%s", text)
        self._told = text
