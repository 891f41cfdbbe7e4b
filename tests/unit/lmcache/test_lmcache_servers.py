# SPDX-License-Identifier: Apache-2.0
"""Which servers are asked for what a release has retired, before LMCache's connector starts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.layout.fakes import FullAttentionSpec, config

from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.patches.lmcache import servers

GROUPS: Any = config(9, (FullAttentionSpec(block_size=16), "a"))


@dataclass
class Answer:
    value: object

    def result(self, timeout: float | None = None) -> object:
        return self.value


class Client:
    """That of LMCache 0.5.6, with a server that does not stream KV events."""

    def get_experimental(self) -> Answer:
        return Answer([])

    def get_chunk_size(self) -> Answer:
        return Answer(256)


class OldClient(Client):
    """That of LMCache 0.5.5: such a server is of its own release."""

    def query_prefetch_lookup_hits(self, request_id: str) -> Answer:
        return Answer(0)


class Exchange:
    """With a server that answers the retired request, and the ping."""

    def __init__(self, url: str) -> None:
        self._answers: list[tuple[int, object]] = []
        self.is_closed = False
        opened.append(self)

    def ask(self, number: int, *arguments: object) -> None:
        self._answers.append((number, 0))

    def answer(self, limit_s: float) -> tuple[int, object] | None:
        return self._answers.pop(0)

    def close(self) -> None:
        self.is_closed = True


opened: list[Exchange] = []


@dataclass
class Config:
    """Of an engine, as far as it is read."""

    parallel_config: object = field(default_factory=object)


def ask(client: Client, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    @contextmanager
    def connected(url: str) -> Iterator[Client]:
        yield client

    opened.clear()
    monkeypatch.setattr(servers, "_client", connected)
    monkeypatch.setattr(servers, "ZmqExchange", Exchange)
    monkeypatch.setattr(servers, "require_listening", lambda urls: None)
    options = {"lmcache.mp.host": f"{scheme}://host", "lmcache.mp.port": 1}
    engine: Any = Config()
    servers.ask_servers(engine, GROUPS, options, is_worker=False)


def test_a_server_that_answers_what_is_retired_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LMCacheError, match=r"tcp://host:1 is LMCache 0\.5\.5"):
        ask(Client(), "tcp", monkeypatch)
    assert [exchange.is_closed for exchange in opened] == [True]


@pytest.mark.parametrize(("client", "scheme"), [(OldClient(), "tcp"), (Client(), "grpc")])
def test_a_server_of_the_same_release_or_another_transport_is_not_asked(
    client: Client, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(client, scheme, monkeypatch)
    assert not opened
