# SPDX-License-Identifier: Apache-2.0
"""Servers are found where LMCache finds them, and missed at once where nobody listens."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.server_addresses import (
    require_listening,
    server_urls,
    starts_its_server,
)


@pytest.mark.parametrize(
    ("options", "urls"),
    [
        ({}, ["tcp://localhost:5555"]),
        ({"lmcache.mp.host": "tcp://h", "lmcache.mp.port": 6}, ["tcp://h:6"]),
        ({"lmcache.mp.host": "h", "lmcache.mp.port": "6"}, ["tcp://h:6"]),
        ({"lmcache.mp.server_urls": "a:1, tcp://b:2,"}, ["tcp://a:1", "tcp://b:2"]),
        ({"lmcache.mp.server_urls": ["grpc://a:1"], "lmcache.mp.port": 6}, ["grpc://a:1"]),
    ],
)
def test_addresses_are_read_as_lmcache_reads_them(options: dict[str, Any], urls: list[str]) -> None:
    assert list(server_urls(options)) == urls


@pytest.mark.parametrize(
    ("value", "starts"), [(True, True), ("on", True), (False, False), ("", False)]
)
def test_a_server_that_the_connector_starts_is_not_looked_for(value: object, starts: bool) -> None:
    assert starts_its_server({"lmcache.mp.autostart": value}) is starts
    assert not starts_its_server({})


def test_a_port_on_which_nobody_listens_is_named_with_the_remedy() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LMCacheError, match=rf"127.0.0.1:{port}.*lmcache server.*--port {port}"):
            require_listening([f"tcp://127.0.0.1:{port}"])
        free.listen()
        require_listening([f"tcp://127.0.0.1:{port}"])


@pytest.mark.parametrize("url", ["ipc:///run/lmcache", "tcp://no-port", "tcp://host:text"])
def test_addresses_without_a_port_are_left_to_lmcache(url: str) -> None:
    require_listening([url])
