# SPDX-License-Identifier: Apache-2.0
"""Blocks that a stalled server may still read and write stay with their requests.

LMCache 0.5.6 gives up all transfers of a server that does not answer pings (``get_finished`` of
``LMCacheMPWorkerAdapter``). Their blocks go to other requests. A server that was killed does no
harm; one that was stopped, and goes on, carries them out: it writes into the blocks of others, and
stores what others have written as if it were the first request's.

Where the server moves the bytes it runs on the same host. So its port tells the two apart: nobody
accepts connections in place of a process that has ended.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event
from typing import Any

from vllm_ascend_kvext.lmcache.server_addresses import host_and_port

logger = logging.getLogger("vllm.ascend_kvext.lmcache")

PROBE_LIMIT_S = 0.5

_SERVER_MOVES = "LMCacheDrivenTransferContext"


def _set_event() -> Event:
    event = Event()
    event.set()
    return event


def hold_blocks_of_stalled_server(
    connector: Any, url: str, may_be_alive: Callable[[str], bool] | None = None
) -> None:
    """Let a worker wait for transfers of a server that stalls, and give up those of a dead one.

    Args:
        connector: LMCache's. A scheduler's side, and what another LMCache has, is left alone.
        url: Of the worker's server.
        may_be_alive: Whether a server's process may go on; by default its port is tried.
    """
    adapter: Any = getattr(connector, "worker_adapter", None)
    names = ("get_finished", "retrieve_futures", "store_futures", "_health_event", "is_healthy")
    if all(hasattr(adapter, name) for name in names):
        adapter.get_finished = _GetFinished(
            adapter, adapter.get_finished, url, may_be_alive or accepts_connections
        )


def accepts_connections(url: str) -> bool:
    """Whether the process behind a port may be alive; False where the address has no port.

    A process that is stopped accepts connections, until too many wait.
    """
    address = host_and_port(url)
    if address is None:
        return False
    try:
        socket.create_connection(address, timeout=PROBE_LIMIT_S).close()
    except ConnectionRefusedError:
        return False
    except OSError:
        return True
    return True


@dataclass(slots=True)
class _GetFinished:
    """``get_finished`` of a worker's adapter, which takes a stalled server for a slow one."""

    adapter: Any
    get_finished: Callable[[set[str]], Any]
    url: str
    may_be_alive: Callable[[str], bool]
    _always: Event = field(default_factory=_set_event)
    _is_told: bool = False

    def __call__(self, finished_ids: set[str]) -> Any:
        adapter = self.adapter
        if not self._is_stalled():
            self._is_told = False
            return self.get_finished(finished_ids)
        # The heartbeat has the event itself, and goes on with it.
        health = adapter._health_event
        adapter._health_event = self._always
        try:
            return self.get_finished(finished_ids)
        finally:
            adapter._health_event = health

    def _is_stalled(self) -> bool:
        adapter = self.adapter
        num_pending = len(adapter.retrieve_futures) + len(adapter.store_futures)
        if not num_pending or adapter.is_healthy:
            return False
        if type(getattr(adapter, "transfer_ctx", None)).__name__ != _SERVER_MOVES:
            return False
        if not self.may_be_alive(self.url):
            return False
        if not self._is_told:
            logger.warning(
                "LMCache's server at %s does not answer, but is not gone. %d of its transfers are "
                "waited for: it may still read and write their blocks. End its process, or let it "
                "go on.",
                self.url,
                num_pending,
            )
        self._is_told = True
        return True
