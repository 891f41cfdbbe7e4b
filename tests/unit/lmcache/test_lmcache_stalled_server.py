# SPDX-License-Identifier: Apache-2.0
"""Transfers of a stalled server are waited for, those of a dead one are given up."""

from __future__ import annotations

import logging
import socket
from dataclasses import dataclass, field
from threading import Event
from typing import Any

import pytest

from vllm_ascend_kvext.lmcache.stalled_server import (
    accepts_connections,
    hold_blocks_of_stalled_server,
)

URL = "tcp://127.0.0.1:1"


class LMCacheDrivenTransferContext:
    """The server moves the bytes."""


class EngineDrivenTransferContext:
    """The worker does."""


@dataclass
class Adapter:
    """LMCache's, as far as it decides what becomes of transfers: while unhealthy, all are over."""

    is_server_alive: bool = True
    transfer_ctx: object = field(default_factory=LMCacheDrivenTransferContext)
    retrieve_futures: dict[str, bool] = field(default_factory=dict)
    store_futures: dict[str, bool] = field(default_factory=dict)
    _health_event: Event = field(default_factory=Event)

    @property
    def is_healthy(self) -> bool:
        return self._health_event.is_set()

    def get_finished(self, finished_ids: set[str]) -> set[str]:
        pending = {**self.retrieve_futures, **self.store_futures}
        ended = {name for name, is_done in pending.items() if is_done or not self.is_healthy}
        for name in ended:
            self.retrieve_futures.pop(name, None)
            self.store_futures.pop(name, None)
        return ended


@dataclass
class Connector:
    worker_adapter: Any = None


def guarded(adapter: Adapter) -> Adapter:
    hold_blocks_of_stalled_server(Connector(adapter), URL, lambda url: adapter.is_server_alive)
    return adapter


def test_a_stalled_server_is_waited_for_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    adapter = guarded(Adapter(retrieve_futures={"load": False}, store_futures={"store": False}))
    event = adapter._health_event
    with caplog.at_level(logging.WARNING):
        assert adapter.get_finished(set()) == adapter.get_finished(set()) == set()
    assert adapter._health_event is event
    assert not adapter.is_healthy
    (message,) = caplog.messages
    assert URL in message
    adapter.store_futures["store"] = True
    assert adapter.get_finished(set()) == {"store"}
    event.set()
    adapter.retrieve_futures["load"] = True
    assert adapter.get_finished(set()) == {"load"}


def test_a_server_that_dies_after_it_has_stalled_is_given_up() -> None:
    adapter = guarded(Adapter(retrieve_futures={"load": False}, store_futures={"store": False}))
    assert adapter.get_finished(set()) == set()
    adapter.is_server_alive = False
    assert adapter.get_finished(set()) == {"load", "store"}


def test_what_the_worker_moves_itself_is_given_up() -> None:
    adapter = Adapter(transfer_ctx=EngineDrivenTransferContext(), retrieve_futures={"load": False})
    assert guarded(adapter).get_finished(set()) == {"load"}


def test_the_event_is_put_back_when_lmcache_fails() -> None:
    class Failing(Adapter):
        def get_finished(self, finished_ids: set[str]) -> set[str]:
            raise RuntimeError("injected")

    adapter = guarded(Failing(retrieve_futures={"load": False}))
    event = adapter._health_event
    with pytest.raises(RuntimeError):
        adapter.get_finished(set())
    assert adapter._health_event is event


def test_a_port_tells_whether_a_process_may_be_alive() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        url = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        assert not accepts_connections(url)
        server.listen()  # And accepts nothing itself, like a process that is stopped.
        assert accepts_connections(url)
    assert not accepts_connections(url)
    assert not accepts_connections("ipc:///run/lmcache")


def test_what_is_no_worker_is_left_alone() -> None:
    hold_blocks_of_stalled_server(Connector(), URL)
    hold_blocks_of_stalled_server(Connector(object()), URL)
