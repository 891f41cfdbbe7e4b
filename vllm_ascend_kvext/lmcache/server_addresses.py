# SPDX-License-Identifier: Apache-2.0
"""Where LMCache's servers are, read from a connector's options as LMCache reads them.

And whether somebody listens there: LMCache waits for an answer for five minutes.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from vllm_ascend_kvext.lmcache.errors import LMCacheError

CONNECT_LIMIT_S = 5.0

_DEFAULT_HOST = "tcp://localhost"
_DEFAULT_PORT = 5555
_WITH_PORTS = ("tcp", "grpc")
_TRUE = ("1", "true", "yes", "on")


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


def require_listening(urls: Iterable[str]) -> None:
    """Refuse addresses on which nobody accepts connections; those without a port are not tried.

    Raises:
        LMCacheError: At the first of them.
    """
    for url in urls:
        address = host_and_port(url)
        if address is None:
            continue
        try:
            socket.create_connection(address, timeout=CONNECT_LIMIT_S).close()
        except OSError as error:
            raise LMCacheError(
                f"LMCacheMPConnector: expected LMCache's server at {url}, found nobody who accepts "
                f"a connection there ({error}). Start it with `lmcache server --host "
                f"{address[0]} --port {address[1]}`, or set lmcache.mp.host and lmcache.mp.port in "
                "kv_connector_extra_config to where it is"
            ) from error


def host_and_port(url: str) -> tuple[str, int] | None:
    """Of an address that has both, else None."""
    try:
        parts = urlsplit(url)
        if parts.scheme in _WITH_PORTS and parts.hostname and parts.port:
            return parts.hostname, parts.port
    except ValueError:  # LMCache refuses it with a message of its own.
        pass
    return None
