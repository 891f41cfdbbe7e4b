# SPDX-License-Identifier: Apache-2.0
"""What a user sees of an LMCache server that fails, in seconds and words; all tokens are right.

On the real engine with real servers, where LMCache is installed: `make test-lmcache`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from http_served import serving
from lmcache_runs import HIT_TOKENS, Restarted, Run, connected, needs_lmcache
from lmcache_workload import REPLY_TOKENS, prompt_of
from offload.server import CHUNK_TOKENS, free_ports
from served import LOGPROB_TOLERANCE, PLUGIN_OFF, Served, logprob_error
from support import old_lmcache_server

pytestmark = needs_lmcache

HEARTBEAT_S = 1.0
SIZE_FOR_ONE_PROMPT_GB = "0.0013"
"""The two chunks that it stores take 56 % of it."""

START_LIMIT_S = 120.0
"""For a start that fails, imports and the load of the model included, on a busy machine; LMCache
alone waits for 300 s."""


@pytest.fixture(scope="module")
def expected(run_lmcache: Run) -> Served:
    """Without a connector and without this package: the prompts 1 to 4 of the hybrid model."""
    plan = {"model": "alternating", "prompts": [1, 2, 3, 4]}
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
def old_server(release: str, folder: Path) -> Iterator[int]:
    """The port of a process that speaks as an older release does."""
    (port,) = free_ports(1)
    log = folder / f"{release}.txt"
    script = old_lmcache_server.__file__
    process = subprocess.Popen([sys.executable, script, str(port), release, str(log)])
    try:
        limit_s = time.monotonic() + START_LIMIT_S
        while not log.exists() and time.monotonic() < limit_s:
            time.sleep(0.05)
        yield port
    finally:
        process.kill()
        process.wait()


def test_failures_at_the_start_are_clear_within_seconds(run_lmcache: Run, tmp_path: Path) -> None:
    """Nobody at the address, a server that cuts blocks, another mode, and older releases."""
    port, closed_port = free_ports(2)
    full = {"model": "full"}
    engine_driven = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
    with (
        Restarted(port, tmp_path, "--l1-size-gb", "0.1"),
        old_server("0.4.5", tmp_path) as flat_port,
        old_server("0.5.0", tmp_path) as renumbered_port,
        old_server("0.5.4", tmp_path) as mute_port,
        old_server("0.5.5", tmp_path) as unreading_port,
    ):
        found = run_lmcache(
            {
                "nobody": {**full, "engine": connected(closed_port)},
                "cut blocks": {**full, "engine": connected(port) | {"block_size": 96}},
                "mode": {**full, "engine": connected(port, **engine_driven)},
                "flat, one group": {**full, "engine": connected(flat_port)},
                "flat": {"model": "alternating", "engine": connected(flat_port)},
                "other numbers": {**full, "engine": connected(renumbered_port)},
                "mute": {**full, "engine": connected(mute_port)},
                "unreading": {**full, "engine": connected(unreading_port)},
            }
        )
    old = ("here LMCache 0.5.6 is installed", "nstall the same release on both sides")
    texts = {
        "nobody": (f"127.0.0.1:{closed_port}", "lmcache server", "lmcache.mp.port"),
        "cut blocks": ("chunks of 256 tokens", "96", "--chunk-size 288"),
        "mode": ("engine_driven", "does not serve", "--supported-transfer-mode"),
        "flat, one group": (f"127.0.0.1:{flat_port} is LMCache 0.4.5,", *old),
        "flat": (f"127.0.0.1:{flat_port} is LMCache 0.4.5,", *old),
        "other numbers": (f"127.0.0.1:{renumbered_port} is LMCache 0.5.0 to 0.5.2,", *old),
        "mute": (f"127.0.0.1:{mute_port}", "0.5.3 and 0.5.4", *old),
        "unreading": (f"127.0.0.1:{unreading_port} is LMCache 0.5.5,", *old),
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


def test_stores_that_find_no_room_are_counted_and_logged_once(
    expected: Served, lmcache_models: dict[str, Path], tmp_path: Path
) -> None:
    """Behind `vllm serve`. What one prompt stores fits; that is below the watermark, and nothing
    makes room for more."""
    (port,) = free_ports(1)
    log = tmp_path / "vllm.log"
    arguments = [
        *("--skip-tokenizer-init", "--enforce-eager", "--enable-prompt-tokens-details"),
        *("--dtype", "float32", "--block-size", "16", "--max-model-len", "2048"),
        *("--max-num-batched-tokens", "1024", "--num-gpu-blocks-override", "700"),
        *("--no-disable-hybrid-kv-cache-manager", "--no-enable-prefix-caching"),
        *("--kv-transfer-config", json.dumps(recomputing(port)["kv_transfer_config"])),
    ]
    seeds = [1, 2, 3, 4, 1]
    with (
        Restarted(port, tmp_path, "--l1-size-gb", SIZE_FOR_ONE_PROMPT_GB) as server,
        serving(lmcache_models["alternating"], arguments, {}, log) as client,
    ):
        for label, seed in enumerate(seeds):
            client.ask(str(label), [prompt_of(seed)], REPLY_TOKENS)
            time.sleep(4)  # What is missing is looked up twice, and goes with a later step.
        metrics = client.read_metrics()
        server_log = server.read_log()
    for label, seed in enumerate(seeds):
        (answer,) = client.report().answers(str(label))
        assert answer.reply == expected.answers("prompts")[seed - 1].reply
        assert logprob_error(answer, expected.answers("prompts")[seed - 1]) < LOGPROB_TOLERANCE
    counted = {name: value for name, value in metrics.items() if "stored_tokens_total" in name}
    warnings = [line for line in log.read_text().splitlines() if "has reported" in line]
    print(counted, *warnings, sep="\n")
    assert "Failed to batched allocate" in server_log
    hits = [client.report().hit_tokens(str(label)) for label in range(len(seeds))]
    assert hits == [[0], [0], [0], [0], [HIT_TOKENS]]
    assert counted == {
        "kvext_lmcache_stored_tokens_total.kept": HIT_TOKENS,
        "kvext_lmcache_stored_tokens_total.lost": 3 * HIT_TOKENS,
        "kvext_lmcache_stored_tokens_total.unchecked": 0,
    }
    (warning,) = warnings
    for text in (f"127.0.0.1:{port}", f"{HIT_TOKENS} tokens", "not have 512", "--l1-size-gb"):
        assert text in warning
