# SPDX-License-Identifier: Apache-2.0
"""The handshake with LMCache's server, before LMCache's connector starts.

A server of LMCache 0.5.6 does not answer a request that it has no handler for
(``lmcache/v1/multiprocess/transport/zmq_impl/mq.py``), and neither does a server of another release
that numbers its requests otherwise. The connector waits ``mq_timeout`` for each answer, five
minutes unless it is set, and says then that no server is there. So each question is put here first,
with a limit of seconds:

    ==============================================  =============================================
    question                                        refuses
    ==============================================  =============================================
    does the address accept a connection            no server
    chunk size and capabilities, LMCache's own      another release, another program
    is the chunk a multiple of all groups' blocks   chunks that cut blocks
    the end of a registration that nobody has made  the wrong transfer mode (on a CPU)
    the registration itself, by a worker            another release that answered all of the above
    ==============================================  =============================================
"""

from __future__ import annotations

import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from vllm_ascend_kvext.errors import LMCacheError

CONNECT_LIMIT_S = 5.0
ANSWER_LIMIT_S = 10.0
HANDLER_LIMIT_S = 3.0
"""For a request that is answered at once, or by a server without a handler never."""

REGISTRATION_LIMIT_S = 30.0
"""For the registration of a worker's pages, and for its end. The server opens each tensor."""

TIMEOUT_KEY = "lmcache.mp.mq_timeout"
TRANSFER_MODE_KEY = "lmcache.mp.mp_transfer_mode"
TRANSFER_MODE_VARIABLE = "LMCACHE_MP_TRANSFER_MODE"

_DEFAULT_HOST = "tcp://localhost"
_DEFAULT_PORT = 5555
_SCHEMES_WITH_PORTS = ("tcp", "grpc")
_TRUE = ("1", "true", "yes", "on")

_ENDS_OF_REGISTRATION = {
    "lmcache_driven": "unregister_kv_cache",
    "engine_driven": "unregister_kv_cache_engine_driven_context",
}
"""By transfer mode (who moves the bytes), what LMCache's client asks when a worker ends."""

_NOBODY = 0
"""An instance id that no worker has: theirs are random."""


def server_urls(options: Mapping[str, Any]) -> tuple[str, ...]:
    """The servers that ``kv_connector_extra_config`` names, each with a scheme."""
    named = options.get("lmcache.mp.server_urls")
    if named:
        texts = named.split(",") if isinstance(named, str) else named
        urls = [text.strip() for text in texts if text.strip()]
    else:
        host = options.get("lmcache.mp.host", _DEFAULT_HOST)
        urls = [f"{host}:{options.get('lmcache.mp.port', _DEFAULT_PORT)}"]
    return tuple(url if "://" in url else f"tcp://{url}" for url in urls)


def starts_its_server(options: Mapping[str, Any]) -> bool:
    """Whether LMCache's connector starts the server, so that none may be there yet."""
    return str(options.get("lmcache.mp.autostart", "")).strip().lower() in _TRUE


def require_listening(url: str) -> None:
    """Refuse an address on which nobody accepts connections; one without a port is not tried.

    Raises:
        LMCacheError: If nobody does.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # LMCache refuses it with a message of its own.
        return
    if parts.scheme not in _SCHEMES_WITH_PORTS or not host or not port:
        return
    try:
        socket.create_connection((host, port), timeout=CONNECT_LIMIT_S).close()
    except OSError as error:
        raise LMCacheError(
            f"LMCache's server at {url}",
            f"nobody who accepts a connection there ({error})",
            f"Start it with `lmcache server --host {host} --port {port}`, or set lmcache.mp.host "
            "and lmcache.mp.port in kv_connector_extra_config to where it is",
        ) from error


def require_same_release(client: Any, url: str, installed: str) -> int:
    """Refuse a server that does not answer what LMCache's own connector asks first.

    The chunk size comes first: the number of that question is harmless in every release that was
    read (0.4.5 to 0.5.6), and LMCache's client drops an answer that is no chunk size.

    Args:
        client: LMCache's ``RequestClient``, of the server.
        installed: The release of LMCache in this environment.

    Returns:
        Tokens of the server's chunks.

    Raises:
        LMCacheError: An answer is missing.
    """
    answers = []
    for what, question in (("chunk size", "get_chunk_size"), ("capabilities", "get_experimental")):
        try:
            answers.append(getattr(client, question)().result(timeout=ANSWER_LIMIT_S))
        except TimeoutError as error:
            raise LMCacheError(
                f"a server of LMCache {installed}, the release that is installed here, at {url}",
                f"one that accepts connections and does not tell its {what} within "
                f"{ANSWER_LIMIT_S:.0f} s",
                "Install the same release of LMCache on both sides, check that lmcache.mp.port is "
                "the server's --port and not its --http-port, and see the server's log",
            ) from error
    return int(answers[0])


def require_whole_blocks(chunk_tokens: int, group_tokens: Sequence[int], url: str) -> None:
    """Refuse a chunk size of the server that cuts blocks.

    Args:
        group_tokens: Tokens that a block of each KV cache group stands for; 0 for scratch groups,
            which LMCache skips.

    Raises:
        LMCacheError: If the chunk is not a multiple of every group's tokens.
    """
    unit_tokens = math.lcm(*(tokens for tokens in group_tokens if tokens))
    if chunk_tokens % unit_tokens == 0:
        return
    possible_tokens = -(-chunk_tokens // unit_tokens) * unit_tokens
    raise LMCacheError(
        f"LMCache's server at {url} to have chunks of a multiple of {unit_tokens} tokens, because "
        "blocks of this engine's KV cache groups stand for "
        f"{', '.join(map(str, group_tokens))} tokens",
        f"chunks of {chunk_tokens} tokens",
        f"Start the server with --chunk-size {possible_tokens}, or the engine with a smaller "
        "--block-size",
    )


def choose_transfer_mode(client: Any, url: str, wanted: str) -> str | None:
    """The mode for a worker whose pages LMCache can move either way: on a CPU.

    There LMCache's worker and its server disagree by default: ``engine_driven`` for the worker
    (``lmcache/v1/platform/devices/cpu/__init__.py``), ``lmcache_driven`` for the server
    (``lmcache/v1/multiprocess/config.py``). A server serves a mode if it handles the end of a
    registration in that mode, here of nobody's.

    Args:
        wanted: What the user has set, or ``auto``.

    Returns:
        The mode to set; None where LMCache is to refuse what was set.

    Raises:
        LMCacheError: If the server does not serve what the user has set, or nothing.
    """
    modes = _ENDS_OF_REGISTRATION
    if wanted != "auto" and wanted not in modes:
        return None
    for mode in modes if wanted == "auto" else (wanted,):
        try:
            getattr(client, modes[mode])(_NOBODY).result(timeout=HANDLER_LIMIT_S)
        except TimeoutError:
            continue
        return mode
    raise LMCacheError(
        f"LMCache's server at {url} to serve this worker's transfer mode, {wanted} "
        f"({TRANSFER_MODE_KEY} or {TRANSFER_MODE_VARIABLE})",
        "that it does not",
        "Start the server with --supported-transfer-mode auto, or set both sides to one of "
        f"{', '.join(modes)}",
    )


def refused_registration(urls: Sequence[str], installed: str) -> LMCacheError:
    """The error for pages of a worker that the server has not taken in time."""
    return LMCacheError(
        f"a server of LMCache {installed}, the release that is installed here, at "
        f"{' or '.join(urls)}",
        "one that tells its chunk size and does not take the KV caches of this worker",
        "Install the same release of LMCache on both sides and see the server's log; where the "
        f"server only needs longer, raise {TIMEOUT_KEY}",
    )
