# SPDX-License-Identifier: Apache-2.0
"""Questions to LMCache's server before its connector starts, each with a limit of seconds.

A server of LMCache 0.5.6 does not answer a request that it has no handler for
(``lmcache/v1/multiprocess/transport/zmq_impl/mq.py``), and the connector waits ``mq_timeout``,
five minutes unless it is set, to say then that no server is there.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any, Protocol

from vllm_ascend_kvext.lmcache.errors import LMCacheError

ANSWER_LIMIT_S = 10.0
HANDLER_LIMIT_S = 3.0
"""For a request that is answered at once, or by a server without a handler never."""

TRANSFER_MODE_KEY = "lmcache.mp.mp_transfer_mode"
TRANSFER_MODE_VARIABLE = "LMCACHE_MP_TRANSFER_MODE"

_NOBODY = 0
"""An instance id that no worker has: theirs are random."""


class Answer(Protocol):
    def result(self, timeout: float | None = None) -> Any:
        """Raises ``TimeoutError`` when the time is up."""


class Client(Protocol):
    """LMCache's ``RequestClient``, as far as it is used."""

    def get_chunk_size(self) -> Answer: ...

    def get_experimental(self) -> Answer: ...

    def unregister_kv_cache(self, instance_id: int) -> Answer: ...

    def unregister_kv_cache_engine_driven_context(self, instance_id: int) -> Answer: ...


class TransferMode(enum.Enum):
    """Who moves the bytes; the names are LMCache's."""

    LMCACHE_DRIVEN = "lmcache_driven"
    ENGINE_DRIVEN = "engine_driven"


def chunk_tokens(client: Client, url: str) -> int:
    """Tokens of the server's chunks.

    Raises:
        LMCacheError: If what listens there does not answer.
    """
    try:
        return int(client.get_chunk_size().result(timeout=ANSWER_LIMIT_S))
    except TimeoutError as error:
        raise LMCacheError(
            f"LMCacheMPConnector: {url} accepts connections, but does not answer LMCache's request "
            f"for the chunk size within {ANSWER_LIMIT_S:.0f} s. Expected the request port of an "
            "LMCache server of the release that is installed here: check that lmcache.mp.port is "
            "its --port, and not its --http-port, that both sides have the same release, and the "
            "server's log"
        ) from error


def require_capabilities(client: Client, url: str, installed: str) -> tuple[str, ...]:
    """Refuse a server that does not say what it is capable of.

    LMCache's workers ask for it, and wait ``mq_timeout`` for an answer that servers of LMCache
    0.5.3 and 0.5.4 do not give.

    Returns:
        What it is capable of; with LMCache's own names.

    Raises:
        LMCacheError: If there is no answer.
    """
    try:
        return tuple(client.get_experimental().result(timeout=HANDLER_LIMIT_S))
    except TimeoutError as error:
        raise LMCacheError(
            f"LMCacheMPConnector: the server at {url} tells its chunk size, but does not answer "
            f"LMCache's request for its capabilities within {HANDLER_LIMIT_S:.0f} s, as LMCache "
            f"0.5.3 and 0.5.4 do not; here LMCache {installed} is installed. Install the same "
            "release on both sides"
        ) from error


def choose_transfer_mode(client: Client, url: str, wanted: str) -> TransferMode | None:
    """The mode for a worker whose pages LMCache can move either way: on a CPU.

    There LMCache's worker and its server disagree by default: ``engine_driven`` for the worker
    (``lmcache/v1/platform/devices/cpu/__init__.py``), ``lmcache_driven`` for the server
    (``lmcache/v1/multiprocess/config.py``).

    Args:
        client: Of the server.
        url: Of the server, for the message.
        wanted: What the user has set, or ``auto``.

    Returns:
        The mode to set; None where LMCache is to decide, or to refuse what was set.

    Raises:
        LMCacheError: If the server does not serve what the user has set, or nothing.
    """
    modes = {mode.value: mode for mode in TransferMode}
    if wanted in modes:
        if not _serves(client, modes[wanted]):
            (other,) = set(TransferMode) - {modes[wanted]}
            raise LMCacheError(
                f"LMCacheMPConnector: this worker is to use the transfer mode {wanted} "
                f"({TRANSFER_MODE_KEY} or {TRANSFER_MODE_VARIABLE}), but LMCache's server at {url} "
                f"does not serve it. Start the server with --supported-transfer-mode {wanted} or "
                f"auto, or set {TRANSFER_MODE_KEY} to {other.value}"
            )
        return modes[wanted]
    if wanted != "auto":
        return None
    for mode in TransferMode:
        if _serves(client, mode):
            return mode
    raise LMCacheError(
        f"LMCacheMPConnector: LMCache's server at {url} serves neither of the transfer modes "
        f"{', '.join(modes)}. Expected a server of the release that is installed here; start it "
        "with --supported-transfer-mode auto"
    )


def _serves(client: Client, mode: TransferMode) -> bool:
    """Whether the server handles the end of a registration, here of nobody's, in a mode."""
    end_registration: dict[TransferMode, Callable[[int], Answer]] = {
        TransferMode.LMCACHE_DRIVEN: client.unregister_kv_cache,
        TransferMode.ENGINE_DRIVEN: client.unregister_kv_cache_engine_driven_context,
    }
    try:
        end_registration[mode](_NOBODY).result(timeout=HANDLER_LIMIT_S)
    except TimeoutError:
        return False
    return True
