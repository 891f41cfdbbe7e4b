# SPDX-License-Identifier: Apache-2.0
"""LMCacheMPConnector on the real engine with real LMCache servers, where LMCache is installed.

Of a server that fails, a user sees seconds and words; all tokens are right. `make test-lmcache`
runs this in an environment that has LMCache.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served, logprob_error
from support.scenarios.lmcache import CHUNK_TOKENS, HEARTBEAT_S, HIT_TOKENS, lmcache_server
from support.scenarios.processes import PLUGIN_OFF, Plan, Reports

pytestmark = pytest.mark.skipif(
    find_spec("lmcache") is None,
    reason="LMCache is not installed here: `make test-lmcache` has an environment with it",
)

KEYS_ON = {"VLLM_ASCEND_KVEXT_LMCACHE_KEYS": "1"}
LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
"""Without which the connector does not start on a CPU by itself."""
NO_HYBRID = {"disable_hybrid_kv_cache_manager": True}
START_LIMIT_S = 120.0
"""For a start that fails, imports and the load of the model included, on a busy machine; LMCache
alone waits for 300 s."""


def connected(port: int, **options: Any) -> dict[str, Any]:
    """What a user sets: where the server is."""
    address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return {
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**address, **options},
        }
    }


Run = Callable[..., Reports]
Engines = Mapping[str, tuple[str, Mapping[str, Any]]]
"""By name: model, and arguments of ``LLM``."""


@pytest.fixture(scope="module")
def run(model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Serve engines, one after the other, in one fresh process."""
    common = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}

    def run(
        engines: Engines,
        environ: Mapping[str, str] | None = None,
        scenario: str = "prompts",
        **options: Any,
    ) -> Reports:
        options = {"seeds": (1, 2), **options}
        plans = {
            name: Plan(model_folder(model), [scenario], "lmcache", engine, options)
            for name, (model, engine) in engines.items()
        }
        folder = tmp_path_factory.mktemp("served")
        environ = {**common, **(environ or {})}
        return processes.serve(tmp_path_factory, plans, environ, working_folder=folder)

    return run


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that runs as long as the tests of this file."""
    (port,) = lmcache_server.free_ports(1)
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = lmcache_server.LMCacheServer(["--port", str(port), "--l1-size-gb", "1"], log)
    yield port
    server.stop()


@pytest.fixture(scope="module")
def without(run: Run, port: int) -> Reports:
    """Without this package."""
    by_itself = ("alternating", connected(port, **LMCACHE_MODE))
    plain = {name: (name, {}) for name in ("alternating", "full")}
    return run({"hybrid": by_itself} | plain, PLUGIN_OFF, seeds=(1, 2, 3))


@pytest.fixture(scope="module")
def answered(run: Run, port: int) -> dict[str, Reports]:
    """Two processes, one after the other, on one server.

    Engines that share it are those with and without the hybrid manager, and a model of one group.
    """
    engines = {
        "single": ("alternating", connected(port) | NO_HYBRID),
        "hybrid": ("alternating", connected(port)),
        "full": ("full", connected(port)),
    }
    return {part: run(engines) for part in ("stored", "warm")}


def require_right(found: Served, seeds: Sequence[int], without: Served) -> None:
    """The engine has answered all prompts as one without a connector, and holds nothing."""
    found.check_nothing_is_left()
    references = without.answers("prompts")
    for seed, answer in zip(seeds, found.answers("prompts"), strict=True):
        assert answer.reply == references[seed - 1].reply
        assert logprob_error(answer, references[seed - 1]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize(
    ("engine", "is_single"), [("hybrid", False), ("single", True), ("full", True)]
)
def test_a_fresh_process_hits_what_another_has_stored_and_answers_the_same(
    answered: dict[str, Reports], without: Reports, engine: str, is_single: bool
) -> None:
    """With nothing set but host and port."""
    for part, hit_tokens in (("stored", 0), ("warm", HIT_TOKENS)):
        found = answered[part][engine]
        assert (found.report["num_groups"] == 1) == is_single
        assert found.hit_tokens("prompts") == [hit_tokens, hit_tokens]
        require_right(found, [1, 2], without["full" if engine == "full" else "alternating"])


def test_without_the_layout_in_their_names_objects_of_other_groups_are_hit(
    answered: dict[str, Reports], without: Reports
) -> None:
    """The defect: what an engine without the hybrid manager has stored."""
    assert answered["stored"]["single"].hit_tokens("prompts") == [0, 0]
    assert without["hybrid"].hit_tokens("prompts")[:2] == [HIT_TOKENS, HIT_TOKENS]
    error = without["hybrid"].logprob_error("prompts", without["alternating"])
    assert error > 100 * LOGPROB_TOLERANCE


def test_below_multi_connector_it_is_made_as_by_itself(
    answered: dict[str, Reports], without: Reports, run: Run, port: int
) -> None:
    (closed_port,) = lmcache_server.free_ports(1)

    def below(own_port: int) -> dict[str, Any]:
        child = connected(own_port)["kv_transfer_config"]
        multi = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [child]},
        }
        return {"kv_transfer_config": multi}

    engines = {
        "multi": ("alternating", below(port)),
        "nobody": ("alternating", below(closed_port)),
    }
    found = run(engines, KEYS_ON, seeds=(1, 3, 3))
    multi = found["multi"]
    assert "##kvext-" in multi.log
    assert multi.report["num_groups"] > 1
    # Another process has stored the first, with the same groups and without MultiConnector.
    assert multi.hit_tokens("prompts") == [HIT_TOKENS, 0, HIT_TOKENS]
    require_right(multi, [1, 3, 3], without["alternating"])
    refusal = found.get("nobody").report["error"]
    assert f"expected LMCache's server at tcp://127.0.0.1:{closed_port}" in refusal


# Failures.


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


def test_failures_at_the_start_are_clear_within_seconds(run: Run, port: int) -> None:
    """Nobody at the address, a server that cuts blocks, another mode, and another release."""
    (closed_port,) = lmcache_server.free_ports(1)
    engine_driven = {"lmcache.mp.mp_transfer_mode": "engine_driven"}
    chunk_size, capabilities, end_of_registration = {21: CHUNK_TOKENS}, {32: []}, {2: None}
    with silent(chunk_size | capabilities | end_of_registration) as unreading:
        engines = {
            "nobody": connected(closed_port),
            "cut blocks": connected(port) | {"block_size": 96},
            "mode": connected(port, **engine_driven),
            "unreading": connected(unreading),
        }
        found = run({name: ("full", engine) for name, engine in engines.items()})
    texts = {
        "nobody": (f"127.0.0.1:{closed_port}", "lmcache server", "lmcache.mp.port"),
        "cut blocks": ("chunks of 256 tokens", "96", "--chunk-size 288"),
        "mode": ("engine_driven", "does not", "--supported-transfer-mode"),
        "unreading": (
            *(f"127.0.0.1:{unreading}", "KV caches of this worker"),
            *("LMCache 0.5.6, the release that is installed here", "the same release of LMCache"),
        ),
    }
    for name, parts in texts.items():
        report = found.get(name).report
        text = report["error"].splitlines()[-1]
        print(f"{name}: {report['error_s']:.1f} s, {text}")
        for part in ("LMCacheError", *parts):
            assert part in text
        assert report["error_s"] < START_LIMIT_S


@pytest.fixture
def run_alone(run: Run) -> Callable[[str], Served]:
    """Of a hybrid model that has a server for itself."""

    def run_alone(scenario: str) -> Served:
        (port,) = lmcache_server.free_ports(1)
        engine = connected(port, **{"lmcache.mp.heartbeat_interval": HEARTBEAT_S})
        engine["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
        found = run({"": ("alternating", engine)}, scenario=scenario, own_port=port)[""]
        print("seconds:", *(f"{seconds:.1f}" for seconds in found.report["facts"]["seconds"]))
        return found

    return run_alone


def test_a_server_that_dies_during_a_load_costs_time_and_no_token(
    without: Reports, run_alone: Callable[[str], Served]
) -> None:
    """What was stored is asked for twice."""
    found = run_alone("killed_in_a_load")
    facts = found.report["facts"]
    assert "Retrieved" not in facts["server's log"]
    require_right(found, [1, 1, 1], without["alternating"])
    assert found.report["num_groups"] > 1
    assert found.hit_tokens("prompts") == [0, 0, 0]
    _, second_s, third_s = facts["seconds"]
    assert second_s < 2 * HEARTBEAT_S + 10
    assert third_s < 10


def test_a_server_that_is_back_is_used_again_if_it_has_the_same_chunks(
    without: Reports, run_alone: Callable[[str], Served]
) -> None:
    """Killed and started again: as it was, with other chunks, and as it was; the engine goes on."""
    found = run_alone("restarted")
    stored_and_hit, gone, other = (0, HIT_TOKENS), (0,), (0, 0)
    expected = [*stored_and_hit, *gone, *stored_and_hit, *other, *stored_and_hit]
    assert found.hit_tokens("prompts") == expected
    require_right(found, [1] * len(expected), without["alternating"])
    refusal = "is back with chunks of 512 tokens, and this engine started with 256"
    assert found.log.count(refusal) == 2  # Once of each side.
    assert max(found.report["facts"]["seconds"]) < 10
