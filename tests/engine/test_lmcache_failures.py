# SPDX-License-Identifier: Apache-2.0
"""What a user sees of an LMCache server that fails, in seconds and words; all tokens are right.

On the real engine with real servers, where LMCache is installed: `make test-lmcache`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from lmcache_runs import HIT_TOKENS, Restarted, Run, connected, needs_lmcache
from offload.server import CHUNK_TOKENS, free_ports
from support.scenarios.answers import LOGPROB_TOLERANCE, Served, logprob_error
from support.scenarios.processes import PLUGIN_OFF

pytestmark = needs_lmcache

HEARTBEAT_S = 1.0
START_LIMIT_S = 120.0
"""For a start that fails, imports and the load of the model included, on a busy machine; LMCache
alone waits for 300 s."""


@pytest.fixture(scope="module")
def expected(run_lmcache: Run) -> Served:
    """Without a connector and without this package: the first prompt of the hybrid model."""
    plan = {"model": "alternating", "prompts": [1]}
    return run_lmcache({"plain": plan}, environ=PLUGIN_OFF)["plain"]


def recomputing(port: int, **options: Any) -> dict[str, Any]:
    engine = connected(port, **{"lmcache.mp.heartbeat_interval": HEARTBEAT_S})
    engine["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    return engine | options


def require_right(found: Served, seeds: Sequence[int], expected: Served) -> None:
    """The engine has answered all prompts as one without a connector."""
    assert "error" not in found.report, found.report["error"]
    assert not found.report["has_requests"]
    references = expected.answers("prompts")
    for seed, answer in zip(seeds, found.answers("prompts"), strict=True):
        reference = references[seed - 1]
        assert answer.reply == reference.reply
        assert logprob_error(answer, reference) < LOGPROB_TOLERANCE


@contextmanager
def silent(answers: dict[int, object]) -> Iterator[int]:
    """The port of a server that answers some requests, by their numbers, and others never."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    port = socket.bind_to_random_port("tcp://127.0.0.1")
    has_ended = threading.Event()

    def answer() -> None:
        while not has_ended.is_set():
            if not socket.poll(100):
                continue
            client, uid, kind, *_ = socket.recv_multipart()
            number = msgspec.msgpack.decode(kind)
            if number in answers:
                values = [msgspec.msgpack.encode(answers[number])] * (answers[number] is not None)
                socket.send_multipart([client, uid, kind, *values])

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield port
    finally:
        has_ended.set()
        thread.join()
        socket.close(linger=0)


def test_failures_at_the_start_are_clear_within_seconds(run_lmcache: Run, tmp_path: Path) -> None:
    """Nobody at the address, a server that cuts blocks, another mode, and other releases."""
    port, closed_port = free_ports(2)
    engine_driven = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
    chunk_size, capabilities, end_of_registration = {21: CHUNK_TOKENS}, {32: []}, {2: None}
    with (
        Restarted(port, tmp_path, "--l1-size-gb", "0.1"),
        silent({21: "OK"}) as renumbered,
        silent(chunk_size) as mute,
        silent(chunk_size | capabilities | end_of_registration) as unreading,
    ):
        engines = {
            "nobody": connected(closed_port),
            "cut blocks": connected(port) | {"block_size": 96},
            "mode": connected(port, **engine_driven),
            "other numbers": connected(renumbered),
            "mute": connected(mute),
            "unreading": connected(unreading),
        }
        found = run_lmcache(
            {name: {"model": "full", "engine": engine} for name, engine in engines.items()}
        )
    other = ("LMCache 0.5.6, the release that is installed here", "the same release of LMCache")
    texts = {
        "nobody": (f"127.0.0.1:{closed_port}", "lmcache server", "lmcache.mp.port"),
        "cut blocks": ("chunks of 256 tokens", "96", "--chunk-size 288"),
        "mode": ("engine_driven", "does not", "--supported-transfer-mode"),
        "other numbers": (f"127.0.0.1:{renumbered}", "chunk size", *other),
        "mute": (f"127.0.0.1:{mute}", "capabilities", *other),
        "unreading": (f"127.0.0.1:{unreading}", "KV caches of this worker", *other),
    }
    for name, parts in texts.items():
        text = found[name].report["error"].splitlines()[-1]
        print(f"{name}: {found[name].report['error_s']:.1f} s, {text}")
        assert "LMCacheError" in text
        for part in parts:
            assert part in text
        assert found[name].report["error_s"] < START_LIMIT_S


def test_a_server_that_dies_during_a_load_costs_time_and_no_token(
    expected: Served, run_lmcache: Run, tmp_path: Path
) -> None:
    """Of a hybrid model; it is stored, loaded, and asked for once more."""
    (port,) = free_ports(1)
    with Restarted(port, tmp_path, "--l1-size-gb", "0.1") as server:
        plan = {
            "model": "alternating",
            "engine": recomputing(port),
            "prompts": [1, 2.0, 1, 1],
            "kills": server.process_id,
        }
        found = run_lmcache({"hybrid": plan})["hybrid"]
        assert "Retrieved" not in server.read_log()
    require_right(found, [1, 1, 1], expected)
    assert found.report["num_groups"] > 1
    assert found.hit_tokens("prompts") == [0, 0, 0]
    first_s, second_s, third_s = found.report["seconds"]
    print(f"seconds: {first_s:.1f} stored, {second_s:.1f} killed in the load, {third_s:.1f} after")
    assert second_s < 2 * HEARTBEAT_S + 10
    assert third_s < 10


def test_a_server_that_is_back_is_used_again_if_it_has_the_same_chunks(
    expected: Served, run_lmcache: Run, tmp_path: Path
) -> None:
    """Killed and started again: as it was, with other chunks, and as it was; the engine goes on."""
    (port,) = free_ports(1)
    with Restarted(port, tmp_path, "--l1-size-gb", "0.1") as server:

        def end() -> None:
            server.kill()
            time.sleep(3 * HEARTBEAT_S)  # Both sides have seen that it is gone.

        def start_again(chunk_tokens: int) -> None:
            end()
            server.start(chunk_tokens)
            if chunk_tokens == CHUNK_TOKENS:
                server.wait_for("Registered KV cache")
            time.sleep(3 * HEARTBEAT_S)  # The scheduler's side has its own heartbeats.

        actions: dict[str, Callable[[], None]] = {
            "gone": end,
            "back": lambda: start_again(CHUNK_TOKENS),
            "other": lambda: start_again(2 * CHUNK_TOKENS),
            "same": lambda: start_again(CHUNK_TOKENS),
        }
        prompts = [1, 2.0, 1, "gone", 1, "back", 1, 2.0, 1, "other", 1, 1, "same", 1, 2.0, 1]
        plan = {"model": "alternating", "engine": recomputing(port), "prompts": prompts}
        found = run_lmcache({"hybrid": plan}, actions=actions)["hybrid"]
    seeds = [prompt for prompt in prompts if isinstance(prompt, int)]
    require_right(found, seeds, expected)
    print("hits:", found.hit_tokens("prompts"))
    print("seconds:", *(f"{seconds:.1f}" for seconds in found.report["seconds"]))
    for line in found.log.splitlines():
        if "healthy" in line or "is back with" in line:
            print(line)
    stored_and_hit = (0, HIT_TOKENS)
    gone, other = (0,), (0, 0)
    assert found.hit_tokens("prompts") == [
        *stored_and_hit,
        *gone,
        *stored_and_hit,
        *other,
        *stored_and_hit,
    ]
    refusal = "is back with chunks of 512 tokens, and this engine started with 256"
    assert found.log.count(refusal) == 2  # Once of each side.
    assert max(found.report["seconds"]) < 10
