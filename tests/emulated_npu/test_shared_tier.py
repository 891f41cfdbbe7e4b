# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""DeepSeek-V4 on the emulated NPU: an engine hits single row units that another one has put."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from compressed_attention_model import write_model
from emulated_plans import connector
from support.connector.shared_objects import forge, objects
from support.scenarios import processes
from support.scenarios.answers import Served
from support.scenarios.processes import NO_PREFIX_CACHING, NPU, Plan
from test_compressed_attention import BLOCK_TOKENS, CONTROL, ENGINE, TOLERANCE

from vllm_ascend_kvext.shared_tier.backend import SEAL_BYTES

PROMPTS_TOKENS = (300, 700, 1500)
DEVICES: dict[int, dict[str, Any]] = {
    1: {},
    2: {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"},
}


@pytest.fixture(scope="module", params=DEVICES)
def num_devices(request: pytest.FixtureRequest) -> int:
    return int(request.param)


@pytest.fixture(scope="module")
def folder(num_devices: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tier")


@pytest.fixture(scope="module")
def serve(
    num_devices: int, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[Mapping[str, Any]], Served]:
    """Serve an engine in its own process, with or without the tier."""
    model = tmp_path_factory.mktemp("model")
    write_model(model)

    def serve(options: Mapping[str, Any]) -> Served:
        engine = ENGINE | NO_PREFIX_CACHING | options
        plan = Plan(model, ("turns",), "compressed_attention", engine)
        return processes.serve(tmp_path_factory, {"engine": plan}, {}, NPU)["engine"]

    return serve


@pytest.fixture(scope="module")
def sharing(num_devices: int, folder: Path) -> dict[str, Any]:
    return connector(shared_tier=f"file://{folder}") | DEVICES[num_devices]


@pytest.fixture(scope="module")
def engines(serve: Callable[[Mapping[str, Any]], Served], sharing: dict[str, Any]) -> list[Served]:
    """Engines: one without the tier, and two that share it."""
    return [serve(options) for options in ({}, sharing, sharing)]


def test_another_engine_hits_to_the_last_row_unit(engines: list[Served]) -> None:
    alone, first, second = engines
    hits = [(length - 1) // BLOCK_TOKENS * BLOCK_TOKENS for length in PROMPTS_TOKENS]
    assert first.hit_tokens("first") == [0] * len(hits)
    assert second.hit_tokens("first") == hits
    assert second.report["own"]["transfer_bytes.get"] > 0
    for served in (first, second):
        served.check_equal(alone, ("first", "again", "next turn"), TOLERANCE)
        served.check_nothing_is_left()


def test_what_is_equal_on_all_ranks_is_put_once(engines: list[Served], folder: Path) -> None:
    paths = objects(folder)
    assert {path.parts[-4] for path in paths} == {"r0"}
    num_bytes = sum(path.stat().st_size for path in paths)
    assert 0.9 * num_bytes < engines[1].report["own"]["transfer_bytes.put"] <= num_bytes


def test_what_is_equal_on_all_ranks_is_got_once(
    engines: list[Served], folder: Path, num_devices: int
) -> None:
    own = engines[2].report["own"]
    assert own["host_sharing_workers"] == num_devices
    # By more than one rank, more would be got than there is.
    num_bytes = sum(path.stat().st_size for path in objects(folder))
    print(num_devices, "devices got", own["transfer_bytes.get"], "of", num_bytes, "bytes")
    assert num_bytes / 2 < own["transfer_bytes.get"] <= num_bytes


def test_wrong_bytes_would_change_answers(
    engines: list[Served],
    serve: Callable[[Mapping[str, Any]], Served],
    sharing: dict[str, Any],
    folder: Path,
) -> None:
    """As a control, objects get zeros and a trailer that is right for zeros."""
    for path in objects(folder):
        forge(folder, path, bytes(path.stat().st_size - SEAL_BYTES))
    served = serve(sharing)
    assert served.hit_tokens("first") == engines[2].hit_tokens("first")
    assert served.logprob_error("first", engines[0]) > CONTROL
