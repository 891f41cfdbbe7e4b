# SPDX-License-Identifier: Apache-2.0
"""A server that is back is asked for its chunks, on both sides, before it is used."""

from __future__ import annotations

import logging
from unittest import mock

import pytest

from vllm_ascend_kvext.lmcache.recovery import (
    refuse_other_chunks_of_scheduler,
    refuse_other_chunks_of_worker,
)

CHUNK_TOKENS = 256
URL = "tcp://host:1"


@pytest.mark.parametrize("is_worker", [True, False])
def test_a_server_with_other_chunks_is_left_out_until_they_are_the_same(
    is_worker: bool, caplog: pytest.LogCaptureFixture
) -> None:
    client, heartbeat, register_again = mock.Mock(), mock.Mock(), mock.Mock(return_value=True)
    adapter = mock.Mock(
        req_client=client,
        req_clients={URL: client},
        lmcache_tokens_per_chunk=CHUNK_TOKENS,
        _reregister_kv_caches_callback=register_again,
        _heartbeats=None,
    )
    adapter._ensure_heartbeat_started = lambda: setattr(adapter, "_heartbeats", {URL: heartbeat})
    if is_worker:
        refuse_other_chunks_of_worker(adapter)
        recover = adapter._reregister_kv_caches_callback
    else:
        refuse_other_chunks_of_scheduler(adapter)
        for _ in range(2):
            adapter._ensure_heartbeat_started()
            heartbeat.register_recover_callback.assert_called_once()
        (recover,) = heartbeat.register_recover_callback.call_args.args
    answer = client.get_chunk_size().result
    answer.return_value = 512
    with caplog.at_level(logging.ERROR):
        assert [recover(), recover()] == [False] * 2
        answer.side_effect = TimeoutError
        assert not recover()
    register_again.assert_not_called()
    (message,) = caplog.messages
    assert "512" in message and f"--chunk-size {CHUNK_TOKENS}" in message
    answer.side_effect, answer.return_value = None, CHUNK_TOKENS
    assert recover()
    assert register_again.call_count == is_worker
