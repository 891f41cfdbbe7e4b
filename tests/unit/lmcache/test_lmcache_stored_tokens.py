# SPDX-License-Identifier: Apache-2.0
"""What is looked up, when, and that a lookup leaves no locks behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from vllm_ascend_kvext.lmcache import store_checks, stored_tokens
from vllm_ascend_kvext.lmcache.store_checks import KEPT, LOST, UNCHECKED, StoreChecks, Stored
from vllm_ascend_kvext.lmcache.stored_tokens import find_with, watch_stores

CHUNK_TOKENS = 256


@dataclass
class Answer:
    value: Any
    is_given: bool = True

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        if not self.is_given:
            raise TimeoutError
        return self.value


@dataclass(frozen=True)
class Key:
    token_ids: tuple[int, ...]
    end: int
    request_id: str
    cache_salt: str
    worker_id: int | None = 0

    def no_worker_id_version(self) -> Key:
        return replace(self, worker_id=None)


@dataclass
class Server:
    """It has some chunks of any request, and answers after so many questions."""

    num_chunks: int = 2
    num_waits: int = 0
    answers: bool = True
    asked: list[tuple[Any, ...]] = field(default_factory=list)

    def lookup(self, key: Key, tp_size: int) -> Answer:
        assert key.worker_id is None
        self.asked.append(("lookup", key.request_id, key.end))
        return Answer(None, self.answers)

    def query_prefetch_status(self, request_id: str) -> Answer:
        self.num_waits -= 1
        return Answer(None if self.num_waits >= 0 else self.num_chunks)

    def free_lookup_locks(self, key: Key, tp_size: int) -> Answer:
        self.asked.append(("free", key.request_id, key.end))
        return Answer(None)

    def end_session(self, request_id: str) -> Answer:
        self.asked.append(("end", request_id))
        return Answer(None)


@dataclass
class Adapter:
    """LMCache's, of the scheduler's side."""

    req_clients: dict[str, Server]
    is_healthy: bool = True
    lmcache_tokens_per_chunk: int = CHUNK_TOKENS
    tp_size: int = 1
    is_shut_down: bool = False

    def _create_key(
        self,
        token_ids: list[int],
        start: int,
        end: int,
        request_id: str,
        cache_salt: str = "",
        request_configs: dict[str, Any] | None = None,
    ) -> Key:
        assert start == 0
        return Key(tuple(token_ids), end, request_id, cache_salt)

    def shutdown(self) -> None:
        self.is_shut_down = True


@dataclass
class Tracker:
    request_id: str = "request"
    num_lmcache_hit_tokens: int = 0
    num_stored_tokens: int = 512
    cache_salt: str = "salt"
    request_configs: dict[str, Any] | None = None

    def get_token_ids(self) -> list[int]:
        return list(range(700))


@dataclass
class Request:
    request_id: str = "request"


@dataclass
class Output:
    finished_sending: set[str] | None = None


@dataclass
class Connector:
    """LMCache's, of the scheduler's side."""

    scheduler_adapter: Adapter
    is_storing: bool = True
    lazy_offload: bool = False
    request_trackers: dict[str, Tracker] = field(default_factory=lambda: {"request": Tracker()})
    outputs: list[Output] = field(default_factory=list)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        del self.request_trackers[request.request_id]
        return self.is_storing, None

    def request_finished_all_groups(self, request: Request, block_ids: Any) -> tuple[bool, None]:
        return self.request_finished(request, block_ids[0])

    def update_connector_output(self, output: Output) -> None:
        self.outputs.append(output)


def counted(checks: StoreChecks) -> dict[str, int]:
    """What was counted of one request."""
    limit_s = time.monotonic() + 10
    while not (counts := checks.take_counts()) and time.monotonic() < limit_s:
        time.sleep(0.001)
    return counts


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_checks, "SETTLE_S", 0.0)
    monkeypatch.setattr(store_checks, "CONFIRM_S", 0.0)
    monkeypatch.setattr(stored_tokens, "_POLL_S", 0.0)


def watched(server: Server, **options: Any) -> tuple[Any, StoreChecks]:
    connector: Any = Connector(Adapter({"tcp://host:1": server}), **options)
    checks = watch_stores(connector, can_look_up=True)
    assert checks is not None
    return connector, checks


@pytest.mark.parametrize(
    "finish",
    [
        lambda connector: connector.request_finished(Request(), [1]),
        lambda connector: connector.request_finished_all_groups(Request(), ([1], [2])),
    ],
)
def test_a_request_is_looked_up_when_its_stores_have_ended(
    finish: Callable[[Any], tuple[bool, None]],
) -> None:
    server = Server(num_chunks=1, num_waits=2)
    connector, checks = watched(server)
    assert finish(connector) == (True, None)
    other = Output({"other"})
    connector.update_connector_output(other)
    connector.update_connector_output(Output())
    assert not server.asked
    connector.update_connector_output(Output({"request"}))
    assert connector.outputs[0] is other
    assert counted(checks) == {KEPT: 256, LOST: 256}
    assert len(server.asked) == 6  # It was asked once more for what is missing.
    (lookup, session, end), free, ended = server.asked[:3]
    assert (lookup, end) == ("lookup", 512)
    assert session != "request"
    assert free == ("free", session, 256)
    assert ended == ("end", session)
    connector.update_connector_output(Output({"request"}))
    assert checks.take_counts() == {}
    checks.stop()


def test_what_a_request_has_hit_is_not_what_it_has_stored() -> None:
    connector, checks = watched(Server(num_chunks=1))
    connector.request_trackers["request"].num_lmcache_hit_tokens = 256
    connector.request_finished(Request(), [1])
    connector.update_connector_output(Output({"request"}))
    assert counted(checks) == {LOST: 256}
    checks.stop()


@pytest.mark.parametrize("reason", ["nothing stored", "not kept", "unknown request"])
def test_nothing_is_asked_of_requests_without_stores(reason: str) -> None:
    server = Server()
    connector, checks = watched(server, is_storing=reason != "not kept")
    if reason == "nothing stored":
        connector.request_trackers["request"].num_stored_tokens = 0
    if reason != "unknown request":
        connector.request_finished(Request(), [1])
    connector.update_connector_output(Output({"request"}))
    assert checks.take_counts() == {}
    assert checks._thread is None
    assert not server.asked


def test_a_server_that_is_not_healthy_is_not_asked() -> None:
    server = Server()
    connector, checks = watched(server)
    connector.scheduler_adapter.is_healthy = False
    connector.request_finished(Request(), [1])
    connector.update_connector_output(Output({"request"}))
    assert checks.take_counts() == {UNCHECKED: 512}
    assert not server.asked


def test_states_are_not_looked_up() -> None:
    connector: Any = Connector(Adapter({"tcp://host:1": Server()}))
    checks = watch_stores(connector, can_look_up=False)
    assert checks is not None
    connector.request_finished(Request(), [1])
    connector.update_connector_output(Output({"request"}))
    assert checks.take_counts() == {UNCHECKED: 512}


def test_of_several_servers_that_counts_which_has_least() -> None:
    servers = {"a": Server(num_chunks=2), "b": Server(num_chunks=1)}
    find = find_with(Adapter(servers))
    assert find(Stored("request", [1] * 512, 0, 512)) == 256


def test_each_question_has_a_session_of_its_own() -> None:
    server = Server()
    find = find_with(Adapter({"a": server}))
    for _ in range(2):
        find(Stored("request", [1] * 512, 0, 512))
    assert len({session for _, session, *_ in server.asked}) == 2


def test_where_nothing_is_found_no_locks_are_released() -> None:
    server = Server(num_chunks=0)
    assert find_with(Adapter({"a": server}))(Stored("request", [1] * 512, 0, 512)) == 0
    assert [what for what, *_ in server.asked] == ["lookup", "end"]


@pytest.mark.parametrize("server", [Server(answers=False), Server(num_waits=10**9)])
def test_a_server_is_waited_for_a_short_time(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored_tokens, "ANSWER_LIMIT_S", 0.05)
    with pytest.raises(TimeoutError):
        find_with(Adapter({"a": server}))(Stored("request", [1] * 512, 0, 512))


def test_the_end_of_the_connector_ends_the_checks() -> None:
    connector, checks = watched(Server())
    connector.scheduler_adapter.shutdown()
    assert connector.scheduler_adapter.is_shut_down
    checks.submit(Stored("request", [1] * 512, 0, 512))
    assert checks.take_counts() == {UNCHECKED: 512}


def test_what_does_not_say_when_stores_end_is_left_alone() -> None:
    assert watch_stores(object(), can_look_up=True) is None
    lazy = Connector(Adapter({}), lazy_offload=True)
    assert watch_stores(lazy, can_look_up=True) is None
