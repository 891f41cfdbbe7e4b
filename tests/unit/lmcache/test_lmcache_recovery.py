# SPDX-License-Identifier: Apache-2.0
"""A server that is back is asked for its chunks, on both sides, before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from vllm_ascend_kvext.lmcache.recovery import refuse_other_chunks

CHUNK_TOKENS = 256


@dataclass
class Server:
    """Its answer; None is none."""

    tokens: int | None = CHUNK_TOKENS

    def get_chunk_size(self) -> Server:
        return self

    def result(self, timeout: float | None = None) -> int:
        if self.tokens is None:
            raise TimeoutError
        return self.tokens


@dataclass
class Heartbeat:
    recovers: Callable[[], bool] = lambda: True

    def register_recover_callback(self, callback: Callable[[], bool]) -> None:
        self.recovers = callback


@dataclass
class WorkerAdapter:
    req_client: Server
    lmcache_tokens_per_chunk: int = CHUNK_TOKENS
    registered: int = 0

    def _reregister_kv_caches_callback(self) -> bool:
        self.registered += 1
        return True


@dataclass
class SchedulerAdapter:
    req_clients: dict[str, Server]
    lmcache_tokens_per_chunk: int = CHUNK_TOKENS
    _heartbeats: dict[str, Heartbeat] | None = None

    def _ensure_heartbeat_started(self) -> None:
        if self._heartbeats is None:
            self._heartbeats = {url: Heartbeat() for url in self.req_clients}


@dataclass
class Connector:
    worker_adapter: Any = None
    scheduler_adapter: Any = None


def recoveries() -> dict[str, tuple[Server, Callable[[], bool], Callable[[], int]]]:
    """By side: its server, what a heartbeat calls when that answers, how often pages registered."""
    worker = WorkerAdapter(Server())
    scheduler = SchedulerAdapter({"tcp://host:1": Server()})
    refuse_other_chunks(Connector(worker_adapter=worker))
    refuse_other_chunks(Connector(scheduler_adapter=scheduler))
    scheduler._ensure_heartbeat_started()
    scheduler._ensure_heartbeat_started()
    assert scheduler._heartbeats is not None
    (heartbeat,) = scheduler._heartbeats.values()
    (server,) = scheduler.req_clients.values()
    return {
        "worker": (
            worker.req_client,
            worker._reregister_kv_caches_callback,
            lambda: worker.registered,
        ),
        "scheduler": (server, heartbeat.recovers, lambda: 0),
    }


@pytest.mark.parametrize("side", ["worker", "scheduler"])
def test_a_server_with_other_chunks_is_left_out_until_they_are_the_same(
    side: str, caplog: pytest.LogCaptureFixture
) -> None:
    server, recover, registered = recoveries()[side]
    server.tokens = 512
    with caplog.at_level(logging.ERROR):
        assert [recover(), recover(), recover()] == [False] * 3
    assert registered() == 0
    (message,) = caplog.messages
    assert "512" in message
    assert "--chunk-size 256" in message
    server.tokens = CHUNK_TOKENS
    assert recover()
    assert registered() == int(side == "worker")


@pytest.mark.parametrize("side", ["worker", "scheduler"])
def test_a_server_that_does_not_answer_is_left_out(side: str) -> None:
    server, recover, registered = recoveries()[side]
    server.tokens = None
    assert not recover()
    assert registered() == 0


def test_what_another_lmcache_lacks_is_left_alone() -> None:
    refuse_other_chunks(Connector())
    refuse_other_chunks(Connector(worker_adapter=object(), scheduler_adapter=object()))
