# SPDX-License-Identifier: Apache-2.0
"""A server that is back is asked for its chunks, on both sides, before it is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest

from vllm_ascend_kvext.lmcache.recovery import (
    refuse_other_chunks_of_scheduler,
    refuse_other_chunks_of_worker,
)

CHUNK_TOKENS = 256


def recovery_of_worker(client: mock.Mock) -> tuple[Callable[[], bool], mock.Mock]:
    register_again = mock.Mock(return_value=True)
    adapter = mock.Mock(
        req_client=client,
        lmcache_tokens_per_chunk=CHUNK_TOKENS,
        _reregister_kv_caches_callback=register_again,
    )
    refuse_other_chunks_of_worker(adapter)
    return adapter._reregister_kv_caches_callback, register_again


def recovery_of_scheduler(client: mock.Mock) -> tuple[Callable[[], bool], mock.Mock]:
    heartbeat = mock.Mock()
    adapter: Any = mock.Mock(
        req_clients={"tcp://host:1": client},
        lmcache_tokens_per_chunk=CHUNK_TOKENS,
        _heartbeats=None,
    )

    def start_once() -> None:
        adapter._heartbeats = {"tcp://host:1": heartbeat}

    adapter._ensure_heartbeat_started = start_once
    refuse_other_chunks_of_scheduler(adapter)
    for _ in range(2):
        adapter._ensure_heartbeat_started()
        heartbeat.register_recover_callback.assert_called_once()
    (recover,) = heartbeat.register_recover_callback.call_args.args
    return recover, mock.Mock()


@pytest.mark.parametrize("side", [recovery_of_worker, recovery_of_scheduler])
def test_a_server_with_other_chunks_is_left_out_until_they_are_the_same(
    side: Callable[[mock.Mock], tuple[Callable[[], bool], mock.Mock]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = mock.Mock()
    answer = client.get_chunk_size().result
    recover, register_again = side(client)
    answer.return_value = 512
    with caplog.at_level(logging.ERROR):
        assert [recover(), recover()] == [False] * 2
        answer.side_effect = TimeoutError
        assert not recover()
    register_again.assert_not_called()
    (message,) = caplog.messages
    for text in ("512", "--chunk-size 256"):
        assert text in message
    answer.side_effect, answer.return_value = None, CHUNK_TOKENS
    assert recover()
    assert register_again.call_count == (side is recovery_of_worker)
