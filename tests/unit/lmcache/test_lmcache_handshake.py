# SPDX-License-Identifier: Apache-2.0
"""Which servers are asked before LMCache's connector starts, and how one that does not fit is
refused: with what was expected, found, and the remedy."""

from __future__ import annotations

import pickle
import socket
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from support.layout.fakes import FullAttentionSpec, config

from vllm_ascend_kvext.errors import LMCacheError
from vllm_ascend_kvext.lmcache import handshake
from vllm_ascend_kvext.lmcache.handshake import (
    REGISTRATION_LIMIT_S,
    choose_transfer_mode,
    refused_registration,
    require_listening,
    require_same_release,
    require_whole_blocks,
    server_urls,
    starts_its_server,
)
from vllm_ascend_kvext.patches.lmcache import factory

URL = "tcp://host:1"
LMCACHE, ENGINE = "lmcache_driven", "engine_driven"
REQUESTS = {
    LMCACHE: "unregister_kv_cache",
    ENGINE: "unregister_kv_cache_engine_driven_context",
}
GROUPS: Any = config(9, (FullAttentionSpec(block_size=16), "a"))
MODE, TIMEOUT = "lmcache.mp.mp_transfer_mode", "lmcache.mp.mq_timeout"
TWO_SERVERS = {"lmcache.mp.server_urls": "tcp://127.0.0.1:1,tcp://127.0.0.1:2"}


def client_of(*modes: str, **answers: object) -> mock.Mock:
    """LMCache's, of a server that answers some requests, and others never."""
    client = mock.Mock()
    answers |= {REQUESTS[mode]: None for mode in modes}
    for request in {"get_chunk_size", "get_experimental", *REQUESTS.values()}:
        answer = {"return_value": answers.get(request)}
        never = {"side_effect": TimeoutError}
        result = mock.Mock(**(answer if request in answers else never))
        getattr(client, request).return_value.result = result
    return client


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


def test_a_server_that_the_connector_starts_is_told_apart() -> None:
    values = (True, "on", False, "")
    starts = [starts_its_server({"lmcache.mp.autostart": value}) for value in values]
    assert [*starts, starts_its_server({})] == [True, True, False, False, False]


def test_a_port_on_which_nobody_listens_is_refused() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        with pytest.raises(LMCacheError, match=rf"127.0.0.1:{port}.*lmcache server.*--port {port}"):
            require_listening(f"tcp://127.0.0.1:{port}")
        free.listen()
        require_listening(f"tcp://127.0.0.1:{port}")
    for left_to_lmcache in ("ipc:///run/lmcache", "tcp://no-port", "tcp://host:text"):
        require_listening(left_to_lmcache)


@pytest.mark.parametrize(
    ("answers", "missing"),
    [
        ({"get_chunk_size": 256, "get_experimental": []}, None),
        ({}, "chunk size"),
        ({"get_experimental": []}, "chunk size"),
        ({"get_chunk_size": 256}, "cap"),
    ],
)
def test_a_server_that_does_not_answer_both_questions_is_of_another_release(
    answers: dict[str, object], missing: str | None
) -> None:
    client = client_of(**answers)
    if missing is None:
        assert require_same_release(client, URL, "0.5.6") == 256
    else:
        text = rf"LMCache 0\.5\.6.*{URL}.*not tell its {missing}.*same release.*lmcache\.mp\.port"
        with pytest.raises(LMCacheError, match=text):
            require_same_release(client, URL, "0.5.6")
    # Elsewhere the number of the second question is that of a request which does something.
    assert next(name for name, *_ in client.mock_calls) == "get_chunk_size"


def test_a_registration_that_is_not_taken_names_the_servers_and_the_release() -> None:
    text = str(refused_registration([URL, "tcp://b:2"], "0.5.6"))
    for part in (f"{URL} or tcp://b:2", "LMCache 0.5.6", "same release", "lmcache.mp.mq_timeout"):
        assert part in text


@pytest.mark.parametrize(
    ("chunk_tokens", "group_tokens", "possible_tokens"),
    [
        (16384, (512, 16384, 128, 8), None),
        (32768, (512, 16384, 128, 8), None),
        (256, (512, 16384, 128, 8), 16384),
        (16384 + 128, (512, 16384, 128, 8), 32768),
        (256, (0, 16), None),
        (256, (96,), 288),
        (96, (32, 48), None),
        (64, (32, 48), 96),
    ],
)
def test_a_chunk_that_cuts_blocks_is_refused_with_the_next_that_does_not(
    chunk_tokens: int, group_tokens: tuple[int, ...], possible_tokens: int | None
) -> None:
    if possible_tokens is None:
        require_whole_blocks(chunk_tokens, group_tokens, URL)
        return
    text = rf"{URL}.*chunks of {chunk_tokens} tokens.*--chunk-size {possible_tokens}"
    with pytest.raises(LMCacheError, match=text):
        require_whole_blocks(chunk_tokens, group_tokens, URL)


@pytest.mark.parametrize(
    ("wanted", "served", "chosen"),
    [
        ("auto", [LMCACHE], LMCACHE),
        ("auto", [ENGINE], ENGINE),
        ("auto", [LMCACHE, ENGINE], LMCACHE),
        (ENGINE, [LMCACHE, ENGINE], ENGINE),
        (LMCACHE, [LMCACHE], LMCACHE),
        ("typo", [], None),
        *(("auto", [], LMCacheError), (LMCACHE, [ENGINE], LMCacheError)),
        (ENGINE, [LMCACHE], LMCacheError),
    ],
)
def test_the_mode_is_the_one_that_is_set_or_one_that_is_served(
    wanted: str, served: list[str], chosen: Any
) -> None:
    client = client_of(*served)
    if chosen is not LMCacheError:
        assert choose_transfer_mode(client, URL, wanted) == chosen
        return
    text = rf"{URL} to serve.*{wanted}.*--supported-transfer-mode auto.*lmcache_driven"
    with pytest.raises(LMCacheError, match=text):
        choose_transfer_mode(client, URL, wanted)


def test_an_error_crosses_processes() -> None:
    error = LMCacheError("one", "two", "Take one")
    assert str(error) == "LMCacheMPConnector: expected one, found two. Take one."
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> mock.Mock:
    """LMCache's, of a server that answers everything; the blocks stand for 16 tokens."""
    client = client_of(LMCACHE, ENGINE, get_chunk_size=256, get_experimental=[])
    modules = {
        "zmq": {},
        "lmcache.integration.vllm.lmcache_mp_connector": {
            "get_group_tokens_per_block": lambda config, groups: [16]
        },
        "lmcache.v1.multiprocess.transport.factory": {
            "RequestClientFactory": mock.Mock(create=mock.Mock(return_value=client))
        },
    }
    for name, attributes in modules.items():
        monkeypatch.setitem(sys.modules, name, mock.Mock(**attributes))
    monkeypatch.setattr(handshake, "require_listening", lambda url: None)
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)
    return client


def ask(options: dict[str, Any], *, is_worker: bool, device_type: str = "cpu") -> dict[str, Any]:
    """The options afterwards."""
    engine: Any = SimpleNamespace(device_config=SimpleNamespace(device_type=device_type))
    options = dict(options)
    factory.ask_servers(engine, GROUPS, options, is_worker=is_worker)
    return options


@pytest.mark.usefixtures("client")
@pytest.mark.parametrize(
    ("options", "is_worker", "device_type", "added"),
    [
        ({}, False, "cpu", {}),
        ({}, True, "npu", {TIMEOUT: REGISTRATION_LIMIT_S}),
        ({}, True, "cpu", {TIMEOUT: REGISTRATION_LIMIT_S, MODE: LMCACHE}),
        ({TIMEOUT: 7, MODE: " Engine_Driven"}, True, "cpu", {MODE: ENGINE}),
        (TWO_SERVERS, True, "cpu", {TIMEOUT: REGISTRATION_LIMIT_S}),
        ({"lmcache.mp.autostart": True}, True, "cpu", {}),
    ],
)
def test_what_the_user_has_left_open_is_set(
    options: dict[str, Any],
    is_worker: bool,
    device_type: str,
    added: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert ask(options, is_worker=is_worker, device_type=device_type) == options | added
    if added.get(MODE) == LMCACHE:
        monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", ENGINE)
        assert ask(options, is_worker=True)[MODE] == ENGINE


def test_all_servers_are_asked_and_all_clients_closed(client: mock.Mock) -> None:
    ask(TWO_SERVERS, is_worker=False)
    assert client.close.call_count == 2
    client.get_chunk_size().result.return_value = 250
    with pytest.raises(LMCacheError, match=r"127\.0\.0\.1:1.*--chunk-size 256"):
        ask(TWO_SERVERS, is_worker=False)
    assert client.close.call_count == 3


def test_a_server_that_is_not_there_is_refused_whatever_lmcache_is_installed() -> None:
    with pytest.raises(LMCacheError, match=r"127\.0\.0\.1:1"):
        ask(TWO_SERVERS, is_worker=False)
    assert MODE not in ask(TWO_SERVERS, is_worker=True)
