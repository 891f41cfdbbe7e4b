# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""LMCacheMPConnector on the real engine with real LMCache servers, where LMCache is installed.

The tests show the faults without this package beside the right results with it. `make test-lmcache`
runs them in an environment that has LMCache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served, errors, logprob_error
from support.scenarios.lmcache import HIT_TOKENS, lmcache_server
from support.scenarios.processes import PLUGIN_OFF, Plan, Reports

pytestmark = pytest.mark.skipif(
    find_spec("lmcache") is None,
    reason="LMCache is not installed here: `make test-lmcache` has an environment with it",
)

LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven", "lmcache.mp.mq_timeout": 30}
"""On a CPU, LMCache's worker and server have different default modes.

A worker waits ``mq_timeout`` seconds for an answer. The default is 300.
"""
HEARTBEAT = {"lmcache.mp.heartbeat_interval": 1.0}
"""The interval of heartbeats in seconds. The connector then notices that its server is gone."""
NO_HYBRID = {"disable_hybrid_kv_cache_manager": True}
WIDE_BLOCKS = {"block_size": 2 * processes.CPU.block_tokens}


def connected(port: int) -> dict[str, Any]:
    """A user's settings: the address of the server, and on a CPU the transfer mode."""
    address = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
    return {
        "kv_transfer_config": {
            "kv_connector": "LMCacheMPConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {**address, **LMCACHE_MODE},
        }
    }


def below_multi_connector(port: int) -> dict[str, Any]:
    multi = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [connected(port)["kv_transfer_config"]]},
    }
    return {"kv_transfer_config": multi}


Run = Callable[..., Reports]
Engines = Mapping[str, tuple[str, Mapping[str, Any]]]
"""Engines by name: the model, and arguments of ``LLM``."""


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
    """The port of a server that runs during the tests of this file."""
    (port,) = lmcache_server.free_ports(1)
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = lmcache_server.LMCacheServer(["--port", str(port), "--l1-size-gb", "1"], log)
    yield port
    server.stop()


def engines_that_differ(port: int) -> Engines:
    """Two engines of each model. One of them stores KV that the other must not read."""
    return {
        "single": ("alternating", connected(port) | NO_HYBRID),
        "hybrid": ("alternating", connected(port)),
        "full": ("full", connected(port)),
        "wide": ("full", connected(port) | WIDE_BLOCKS),
    }


MODELS = {"single": "alternating", "hybrid": "alternating", "full": "full", "wide": "full"}


@pytest.fixture(scope="module")
def plain(run: Run) -> Reports:
    """The answers to prompts 1 to 3 of an engine without a connector, by model."""
    return run({name: (name, {}) for name in ("alternating", "full")}, seeds=(1, 2, 3))


@pytest.fixture(scope="module")
def by_itself(run: Run, port: int) -> Reports:
    """Engines without this package, on the same server as engines with it."""
    return run(engines_that_differ(port), PLUGIN_OFF)


@pytest.fixture(scope="module")
def stored(run: Run, port: int) -> Reports:
    """Engines with this package, in the first process on the server."""
    return run(engines_that_differ(port))


@pytest.fixture(scope="module")
def warm(run: Run, port: int, stored: Reports) -> Reports:
    """The same engines in a second process."""
    return run(engines_that_differ(port))


def require_right(found: Served, seeds: Sequence[int], without: Served) -> None:
    """The engine has answered all prompts as an engine without a connector, and holds nothing."""
    found.check_nothing_is_left()
    references = without.answers("prompts")
    for seed, answer in zip(seeds, found.answers("prompts"), strict=True):
        assert answer.reply == references[seed - 1].reply
        assert logprob_error(answer, references[seed - 1]) < LOGPROB_TOLERANCE


@pytest.mark.parametrize("engine", MODELS)
def test_an_engine_finds_nothing_of_one_that_lays_out_kv_in_another_way(
    stored: Reports, plain: Reports, engine: str
) -> None:
    assert (stored[engine].report["num_groups"] == 1) == (engine != "hybrid")
    assert stored[engine].hit_tokens("prompts") == [0, 0]
    require_right(stored[engine], [1, 2], plain[MODELS[engine]])


@pytest.mark.parametrize("engine", MODELS)
def test_a_fresh_process_hits_what_its_like_has_stored_and_answers_the_same(
    warm: Reports, plain: Reports, engine: str
) -> None:
    assert warm[engine].hit_tokens("prompts") == [HIT_TOKENS, HIT_TOKENS]
    require_right(warm[engine], [1, 2], plain[MODELS[engine]])


@pytest.mark.parametrize(("stores", "reads"), [("single", "hybrid"), ("full", "wide")])
def test_without_the_layout_in_their_names_objects_of_another_layout_are_read(
    by_itself: Reports, plain: Reports, stores: str, reads: str
) -> None:
    """The defect: KV of other groups or block sizes changes log-probabilities by 1."""
    require_right(by_itself[stores], [1, 2], plain[MODELS[stores]])
    assert by_itself[reads].hit_tokens("prompts") == [HIT_TOKENS, HIT_TOKENS]
    references = plain[MODELS[reads]].answers("prompts")[:2]
    assert min(errors(by_itself[reads].answers("prompts"), references)) > 100 * LOGPROB_TOLERANCE


@pytest.mark.usefixtures("stored")
def test_below_multi_connector_it_stores_blocks_under_their_own_tokens(
    plain: Reports, run: Run, port: int
) -> None:
    engine = {"multi": ("alternating", below_multi_connector(port))}
    multi = run(engine, seeds=(1, 3, 3))["multi"]
    assert "##kvext-" in multi.log
    assert multi.report["num_groups"] > 1
    # Another process has stored the first prompt, with the same groups, without MultiConnector.
    assert multi.hit_tokens("prompts") == [HIT_TOKENS, 0, HIT_TOKENS]
    require_right(multi, [1, 3, 3], plain["alternating"])


@pytest.mark.vllm("<0.30")
def test_without_it_blocks_are_stored_under_the_tokens_of_others_below_multi_connector(
    plain: Reports, run: Run, port: int
) -> None:
    """The defect: blocks of the second step are stored under the tokens of the first step.

    vLLM 0.30 has fixed it.
    """
    engine = {"multi": ("alternating", below_multi_connector(port))}
    multi = run(engine, PLUGIN_OFF, seeds=(3, 3))["multi"]
    first, again = multi.answers("prompts")
    reference = plain["alternating"].answers("prompts")[2]
    assert first.hit_tokens == 0 < again.hit_tokens
    assert logprob_error(first, reference) < LOGPROB_TOLERANCE
    assert logprob_error(again, reference) > 100 * LOGPROB_TOLERANCE


def test_a_server_that_dies_during_a_load_costs_no_token(plain: Reports, run: Run) -> None:
    """The stored prompt is sent twice."""
    (port,) = lmcache_server.free_ports(1)
    engine = connected(port)
    engine["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    engine["kv_transfer_config"]["kv_connector_extra_config"] |= HEARTBEAT
    engines = {"": ("alternating", engine)}
    found = run(engines, scenario="killed_in_a_load", own_port=port)[""]
    assert "Retrieved" not in found.report["facts"]["server's log"]
    require_right(found, [1, 1, 1], plain["alternating"])
    assert found.report["num_groups"] > 1
    assert found.hit_tokens("prompts") == [0, 0, 0]
