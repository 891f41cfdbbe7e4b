# SPDX-License-Identifier: Apache-2.0
"""LMCacheMPConnector on the real engine with a real LMCache server, where LMCache is installed.

`make test-lmcache` runs this in an environment that has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from lmcache_runs import (
    HIT_TOKENS,
    LMCacheServer,
    Run,
    connected,
    needs_lmcache,
)
from offload.server import free_ports
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import PLUGIN_OFF

pytestmark = needs_lmcache

KEYS_OFF = {"VLLM_ASCEND_KVEXT_LMCACHE_KEYS": "0"}
LMCACHE_MODE = {"lmcache.mp.mp_transfer_mode": "lmcache_driven"}
"""Without which the connector does not start on a CPU by itself."""

NO_HYBRID = {"disable_hybrid_kv_cache_manager": True}


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Of a server that runs as long as the tests of this file."""
    (port,) = free_ports(1)
    log = tmp_path_factory.mktemp("server") / "server.log"
    server = LMCacheServer(["--port", str(port), "--l1-size-gb", "1"], log)
    yield port
    server.stop()


@pytest.fixture(scope="module")
def answered(run_lmcache: Run, port: int) -> dict[str, Served]:
    """Three processes, each after the one before, on one server.

    Engines that share it are those with and without the hybrid manager, and a model of one group.
    """
    hybrid = {"model": "alternating", "engine": connected(port)}
    single = {"model": "alternating", "engine": connected(port) | NO_HYBRID}
    full = {"model": "full", "engine": connected(port)}
    stored = run_lmcache({"single": single, "hybrid": hybrid, "full": full})
    warm = run_lmcache({"hybrid": hybrid, "single": single, "full": full})
    by_itself = {"model": "alternating", "engine": connected(port, **LMCACHE_MODE)}
    plain = {name: {"model": name} for name in ("alternating", "full")}
    without = run_lmcache({"hybrid": by_itself} | plain, environ=PLUGIN_OFF)
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


def test_below_multi_connector_it_is_made_as_by_itself(
    answered: dict[str, Served], run_lmcache: Run, port: int
) -> None:
    (closed_port,) = free_ports(1)

    def below(own_port: int) -> dict[str, Any]:
        child = connected(own_port)["kv_transfer_config"]
        multi = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"connectors": [child]},
        }
        return {"model": "alternating", "engine": {"kv_transfer_config": multi}}

    found = run_lmcache(
        {
            "multi": {**below(port), "prompts": [1, 3, 2.0, 3]},
            "plain": {"model": "alternating", "prompts": [1, 3, 3]},
            "nobody": below(closed_port),
        },
        environ={"VLLM_ASCEND_KVEXT_LMCACHE_KEYS": "1"},
    )
    multi = found["multi"]
    assert "error" not in multi.report, multi.report["error"]
    assert "##kvext-" in multi.log
    assert multi.report["num_groups"] > 1
    # Another process has stored the first, with the same groups and without MultiConnector.
    assert multi.hit_tokens("prompts") == [HIT_TOKENS, 0, HIT_TOKENS]
    assert multi.logprob_error("prompts", found["plain"]) < LOGPROB_TOLERANCE
    refusal = found["nobody"].report["error"]
    assert f"expected LMCache's server at tcp://127.0.0.1:{closed_port}" in refusal
