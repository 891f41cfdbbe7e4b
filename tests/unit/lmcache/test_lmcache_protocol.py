# SPDX-License-Identifier: Apache-2.0
"""Which protocol a server speaks is found out by its answers, from real processes over sockets."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support import old_lmcache_server
from support.old_lmcache_server import CHUNK_TOKENS, RELEASES

from vllm_ascend_kvext.lmcache import protocol
from vllm_ascend_kvext.lmcache.errors import LMCacheError
from vllm_ascend_kvext.lmcache.protocol import (
    ZmqExchange,
    require_current_protocol,
    require_no_retired_request,
)

INSTALLED = "0.5.6"
OLD = {"0.4.5": "0.4.5", "0.4.6": "0.4.6", "0.4.7": "0.4.7", "0.5.0": "0.5.0 to 0.5.2"}
HARMLESS = {"noop", "ping", "get_chunk_size", "query_prefetch_lookup_hits"}
LIMIT_S = 10.0


@dataclass
class Peer:
    url: str
    log: Path

    def answered(self) -> set[str]:
        lines = self.log.read_text().splitlines()
        return {line.split()[0] for line in lines if line.endswith(" answered")} - {
            line.split()[0] for line in lines if line.endswith("not answered")
        }


@contextmanager
def peer(release: str, folder: Path) -> Iterator[Peer]:
    """A server of a release, as a process."""
    pytest.importorskip("zmq")
    pytest.importorskip("msgspec")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = folder / "requests.txt"
    script = Path(old_lmcache_server.__file__)
    process = subprocess.Popen([sys.executable, script, str(port), release, str(log)])
    try:
        limit_s = time.monotonic() + LIMIT_S
        while not log.exists() and time.monotonic() < limit_s:
            time.sleep(0.01)
        yield Peer(f"tcp://127.0.0.1:{port}", log)
    finally:
        process.kill()
        process.wait()


def ask(url: str, installed: str = INSTALLED) -> None:
    exchange = ZmqExchange(url)
    try:
        require_current_protocol(exchange, url, installed)
    finally:
        exchange.close()


def ask_for_the_retired_request(url: str, capabilities: list[str]) -> None:
    exchange = ZmqExchange(url)
    try:
        require_no_retired_request(exchange, capabilities, url, INSTALLED)
    finally:
        exchange.close()


@pytest.mark.parametrize("release", ["0.5.4", "0.5.5", "0.5.6"])
def test_a_server_of_the_same_numbering_is_asked_once(release: str, tmp_path: Path) -> None:
    with peer(release, tmp_path) as server:
        ask(server.url)
        assert server.log.read_text() == "get_chunk_size answered\n"


@pytest.mark.parametrize(("release", "named"), OLD.items())
def test_an_older_server_is_named_and_refused_within_seconds(
    release: str, named: str, tmp_path: Path
) -> None:
    with peer(release, tmp_path) as server:
        began_s = time.monotonic()
        with pytest.raises(LMCacheError) as error:
            ask(server.url)
        assert time.monotonic() - began_s < protocol.OLD_RELEASE_AFTER_S + 1
        assert server.answered() <= HARMLESS
    for text in (server.url, f"is LMCache {named},", f"here LMCache {INSTALLED}", "same release"):
        assert text in str(error.value)


def test_what_does_not_answer_is_refused_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "OLD_RELEASE_AFTER_S", 0.1)
    monkeypatch.setattr(protocol, "ANSWER_LIMIT_S", 0.3)
    text = r"does not answer.*0\.5\.6.*lmcache\.mp\.port"
    with peer("silent", tmp_path) as server, pytest.raises(LMCacheError, match=text):
        ask(server.url)


@pytest.mark.parametrize("release", RELEASES)
def test_what_is_asked_changes_nothing_in_any_release(release: str) -> None:
    """Numbers are those of other requests elsewhere: of `clear`, which takes no arguments, too."""
    pytest.importorskip("msgspec")
    for number in (protocol._GET_CHUNK_SIZE, *protocol._OF_OLD_RELEASES):
        name, is_answered, _ = old_lmcache_server.answer(release, number, [])
        assert not is_answered or name in HARMLESS


def capabilities_of(release: str) -> list[str]:
    _, _, value = old_lmcache_server.answer(release, 32, [])
    assert isinstance(value, list)
    return value


def test_a_server_that_answers_a_retired_request_is_named_and_refused(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    with peer("0.5.5", tmp_path) as server:
        began_s = time.monotonic()
        with pytest.raises(LMCacheError) as error:
            ask_for_the_retired_request(server.url, capabilities_of("0.5.5"))
        assert time.monotonic() - began_s < protocol.RETIRED_AFTER_PING_S
        assert server.log.read_text().startswith("query_prefetch_lookup_hits answered\n")
    for text in (server.url, "is LMCache 0.5.5,", f"here LMCache {INSTALLED}", "same release"):
        assert text in str(error.value)


def test_a_server_with_what_is_new_is_asked_for_nothing(tmp_path: Path) -> None:
    pytest.importorskip("msgspec")
    with peer("0.5.6", tmp_path) as server:
        ask_for_the_retired_request(server.url, capabilities_of("0.5.6"))
        ask(server.url)
        assert server.log.read_text() == "get_chunk_size answered\n"


def test_a_server_without_what_is_new_may_have_retired_the_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache 0.5.6 with `--kv-event-log-size 0`: no answer but that to a ping."""
    pytest.importorskip("msgspec")
    monkeypatch.setattr(protocol, "RETIRED_AFTER_PING_S", 0.1)
    release = "0.5.6 without KV events"
    with peer(release, tmp_path) as server:
        began_s = time.monotonic()
        ask_for_the_retired_request(server.url, capabilities_of(release))
        assert time.monotonic() - began_s < protocol.ANSWER_LIMIT_S / 2
        assert server.log.read_text() == "request 11 not answered\nping answered\n"


@pytest.mark.parametrize(
    ("release", "number", "form"),
    [
        ("0.4.5", 3, old_lmcache_server.FLAT),
        ("0.4.6", 3, old_lmcache_server.FLAT),
        ("0.4.7", 3, old_lmcache_server.NESTED),
        ("0.5.6", 6, old_lmcache_server.NESTED),
    ],
)
def test_the_peers_take_block_ids_in_the_form_of_their_release(
    release: str, number: int, form: Any
) -> None:
    """So that what is refused would have been misread, or not at all."""
    msgspec = pytest.importorskip("msgspec")
    for blocks, of in (([1, 2], old_lmcache_server.FLAT), ([[1, 2]], old_lmcache_server.NESTED)):
        arguments = [msgspec.msgpack.encode(value) for value in ({}, 1, blocks, b"")]
        _, is_answered, _ = old_lmcache_server.answer(release, number, arguments)
        assert is_answered == (of is form)


@dataclass
class Scripted:
    """Answers that are given in order."""

    answers: list[tuple[int, object] | None]

    def ask(self, number: int, *arguments: object) -> None:
        pass

    def answer(self, limit_s: float) -> tuple[int, object] | None:
        return self.answers.pop(0)


@pytest.mark.parametrize("value", [True, None, "OK", [256]])
def test_an_answer_that_is_no_chunk_size_is_refused(value: object) -> None:
    """A server of another numbering has taken the request for another."""
    with pytest.raises(LMCacheError, match="numbers its requests otherwise"):
        require_current_protocol(Scripted([(21, value)]), "tcp://host:1", INSTALLED)


def test_a_slow_server_may_answer_after_older_ones_were_asked_for() -> None:
    require_current_protocol(Scripted([None, (21, CHUNK_TOKENS)]), "tcp://host:1", INSTALLED)


def test_a_retired_request_may_be_answered_after_the_ping() -> None:
    """The server has several threads for them."""
    with pytest.raises(LMCacheError, match=r"0\.5\.5"):
        require_no_retired_request(Scripted([(22, True), (11, 0)]), [], "tcp://h:1", INSTALLED)


def test_a_server_too_busy_for_a_ping_is_not_refused() -> None:
    require_no_retired_request(Scripted([None]), [], "tcp://h:1", INSTALLED)
