# SPDX-License-Identifier: Apache-2.0
"""LMCacheMPConnector on the real engine with a real LMCache server, where LMCache is installed.

`make test-lmcache` runs this in an environment that has it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import connector_models
import pytest
import served
import vllm
from lmcache_workload import PROMPT_TOKENS
from served import LOGPROB_TOLERANCE, PLUGIN_OFF, Served, logprob_error

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from offload.server import CHUNK_TOKENS, LMCacheServer, free_ports

pytestmark = pytest.mark.skipif(
    find_spec("lmcache") is None,
    reason="LMCache is not installed here: `make test-lmcache` has an environment with it",
)

HIT_TOKENS = PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_TOKENS
LMCACHE_ENVIRON = {"LMCACHE_TRACK_USAGE": "false", "HF_HUB_OFFLINE": "1"}
KEYS_OFF = {"VLLM_ASCEND_KVEXT_LMCACHE_KEYS": "0"}
WITHOUT = PLUGIN_OFF if vllm.__version__.startswith("0.23.0") else KEYS_OFF
"""What the defect is seen with. On vLLM 0.20.2 the connector does not start without the package."""

LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
"""Without which the connector does not start on a CPU by itself."""

NO_HYBRID = {"disable_hybrid_kv_cache_manager": True}

Plans = Mapping[str, Mapping[str, Any]]
Run = Callable[..., dict[str, Served]]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name in ("alternating", "full"):
        folders[name] = tmp_path_factory.mktemp("model")
        connector_models.WRITERS[name](folders[name])
    return folders


@pytest.fixture(scope="module")
def run(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Serve plans, one engine after the other, in one fresh process."""

    def run(plans: Plans, environ: Mapping[str, str] | None = None) -> dict[str, Served]:
        folder = tmp_path_factory.mktemp("served")
        full = {
            name: {"prompts": [1, 2], "engine": {}, **plan, "model": str(models[plan["model"]])}
            for name, plan in plans.items()
        }
        ended = served.run(
            "lmcache_workload.py",
            [str(folder / "report.json"), json.dumps(full)],
            {**LMCACHE_ENVIRON, **(environ or {})},
            folder=folder,
        )
        if ended.exit_code:
            pytest.fail(f"exit code {ended.exit_code} with {plans}:\n{ended.log[-6000:]}")
        reports = json.loads((folder / "report.json").read_text())
        return {name: Served(report, ended.log) for name, report in reports.items()}

    return run


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that runs as long as the tests of this file."""
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = LMCacheServer(["--port", str(port), "--l1-size-gb", "1"], log)
    yield port
    server.stop()


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


@pytest.fixture(scope="module")
def answered(run: Run, port: int) -> dict[str, Served]:
    """Three processes, each after the one before, on one server.

    Engines that share it are those with and without the hybrid manager, and a model of one group.
    """
    hybrid = {"model": "alternating", "engine": connected(port)}
    single = {"model": "alternating", "engine": connected(port) | NO_HYBRID}
    full = {"model": "full", "engine": connected(port)}
    stored = run({"single": single, "hybrid": hybrid, "full": full})
    warm = run({"hybrid": hybrid, "single": single, "full": full})
    by_itself = {"model": "alternating", "engine": connected(port, **LMCACHE_MODE)}
    plain = {name: {"model": name} for name in ("alternating", "full")}
    without = run({"hybrid": by_itself} | plain, WITHOUT)
    parts = {"stored": stored, "warm": warm, "without": without}
    found = {f"{part}, {name}": each for part, all in parts.items() for name, each in all.items()}
    failed = [
        f"{name}:\n{each.report['error']}" for name, each in found.items() if "error" in each.report
    ]
    assert not failed, "\n".join(failed)
    return found


def error(answered: dict[str, Served], name: str) -> float:
    """Against an engine without a connector."""
    model = "full" if name.endswith("full") else "alternating"
    return answered[name].logprob_error("prompts", answered[f"without, {model}"])


def test_the_models_have_the_groups_that_the_tests_are_about(answered: dict[str, Served]) -> None:
    assert answered["stored, hybrid"].report["num_groups"] > 1
    assert answered["stored, single"].report["num_groups"] == 1
    assert answered["stored, full"].report["num_groups"] == 1


@pytest.mark.parametrize("engine", ["hybrid", "single", "full"])
def test_a_fresh_process_hits_what_another_has_stored_and_answers_the_same(
    answered: dict[str, Served], engine: str
) -> None:
    """With nothing set but host and port."""
    assert answered[f"stored, {engine}"].hit_tokens("prompts") == [0, 0]
    assert answered[f"warm, {engine}"].hit_tokens("prompts") == [HIT_TOKENS, HIT_TOKENS]
    for part in ("stored", "warm"):
        assert error(answered, f"{part}, {engine}") < LOGPROB_TOLERANCE


def test_without_the_layout_in_their_names_objects_of_other_groups_are_hit(
    answered: dict[str, Served],
) -> None:
    """The defect: what an engine without the hybrid manager has stored."""
    assert answered["without, hybrid"].hit_tokens("prompts") == [HIT_TOKENS, HIT_TOKENS]
    assert error(answered, "without, hybrid") > 100 * LOGPROB_TOLERANCE


def test_no_transfer_is_left(answered: dict[str, Served]) -> None:
    assert not any(each.report["has_requests"] for each in answered.values())


def test_only_models_with_several_groups_get_other_names(answered: dict[str, Served]) -> None:
    """What a deployment of one group has stored is found after an upgrade."""
    log = answered["stored, full"].log
    names = {
        line.split("cache_model_name=")[1].split()[0]
        for line in log.splitlines()
        if "cache_model_name=" in line
    }
    assert len(names) == 3
    (hybrid_name,) = (name for name in names if "##" in name)
    assert hybrid_name.partition("##kvext-")[0] in names


def test_failures_at_the_start_are_clear_within_seconds(run: Run, port: int) -> None:
    """Nobody at the address, a server that cuts blocks, and one that serves another mode."""
    (closed_port,) = free_ports(1)
    engine = {"model": "full"}
    found = run(
        {
            "nobody": {**engine, "engine": connected(closed_port)},
            "cut blocks": {**engine, "engine": connected(port) | {"block_size": 96}},
            "mode": {
                **engine,
                "engine": connected(port, **{"lmcache.mp.mp_transfer_mode": "engine_driven"}),
            },
        }
    )
    expected = {
        "nobody": (f"127.0.0.1:{closed_port}", "lmcache server", "lmcache.mp.port"),
        "cut blocks": ("chunks of 256 tokens", "96", "--chunk-size 288"),
        "mode": ("engine_driven", "does not serve", "--supported-transfer-mode"),
    }
    for name, texts in expected.items():
        text = found[name].report["error"].splitlines()[-1]
        assert "LMCacheError" in text
        for part in texts:
            assert part in text


def test_a_server_that_dies_during_a_load_costs_time_and_no_token(
    answered: dict[str, Served], run: Run, tmp_path: Path
) -> None:
    """Of a hybrid model; it is stored, loaded, and asked for once more."""
    (own_port,) = free_ports(1)
    server = LMCacheServer(["--port", str(own_port), "--l1-size-gb", "1"], tmp_path / "server.log")
    engine = connected(own_port, **{"lmcache.mp.heartbeat_interval": 1.0})
    engine["kv_transfer_config"]["kv_load_failure_policy"] = "recompute"
    plan = {
        "model": "alternating",
        "engine": engine,
        "prompts": [1, 1, 1],
        "kills": server.process_id,
    }
    try:
        found = run({"hybrid": plan})["hybrid"]
    finally:
        server.stop()
    assert "error" not in found.report, found.report["error"]
    assert "Retrieved" not in server.read_log()
    assert found.hit_tokens("prompts") == [0, 0, 0]
    (expected, _) = answered["without, alternating"].answers("prompts")
    for answer in found.answers("prompts"):
        assert answer.reply == expected.reply
        assert logprob_error(answer, expected) < LOGPROB_TOLERANCE
    assert not found.report["has_requests"]
