# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every ``vllm serve`` line of the documentation starts vLLM-Ascend's engine, and it answers.

Combinations of schedulers and recomputing that docs/tested_on_ascend.md excludes are refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.sample import IS_SAMPLE
from support.scenarios.processes import NPU
from support.serve_lines import ServeLine, Started, serve_lines, start

LINES = [line for line in serve_lines() if line.connector != "LMCacheMPConnector"]
"""The lines of the documentation, except lines for LMCache, which is not installed here."""
WITH_CONNECTOR = next(line for line in LINES if line.connector == "KvextConnector")
CLASSES = {"": "NoneType", "MultiConnector": "AscendMultiConnector"}
"""The classes of connectors that have other names than in a line."""
MODELS = ("one window", "states")
STARTS = [
    pytest.param(line, model, id=f"{line.place}, {model}")
    for number, line in enumerate(LINES)
    for model in (MODELS[number % 2 :][:1] if IS_SAMPLE else MODELS)
]


def line_with(option: dict[str, object], role: str = "kv_both") -> ServeLine:
    """Start with an additional option of vLLM-Ascend."""
    transfer = {
        "kv_connector": "KvextConnector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"host_memory_gib": 1},
    }
    options = ["--kv-transfer-config", json.dumps(transfer)]
    options += ["--additional-config", json.dumps(option)]
    return ServeLine("", {}, ("MODEL", *options))


PROFILING = {"profiling_chunk_config": {"enabled": True}}
RECOMPUTE = {"recompute_scheduler_enable": True}

REFUSED: dict[str, tuple[ServeLine, dict[str, str], str]] = {
    "states, without the repair": (
        WITH_CONNECTOR,
        {"VLLM_ASCEND_KVEXT_DISABLE": "failed-loads"},
        "Hybrid models do not support recompute mode kv load failure policy now",
    ),
    "profiling-chunk": (
        line_with(PROFILING),
        {},
        "profiling_chunk_config requires pipeline parallelism (pp > 1)",
    ),
    "recompute with kv_both": (
        line_with(RECOMPUTE),
        {},
        "recompute_scheduler_enable can only be enabled on PD-disaggregated D nodes",
    ),
    "recompute with kv_consumer": (
        line_with(RECOMPUTE, role="kv_consumer"),
        {},
        "KvextConnector: expected kv_role kv_both, found kv_consumer",
    ),
}


@pytest.fixture
def start_line(folder_of: Callable[[str], Path]) -> Callable[..., Started]:
    def start_line(
        line: ServeLine, model: str, stage: str, environ: dict[str, str] | None = None
    ) -> Started:
        folder = folder_of(model)
        return start(line, folder, stage, {**NPU.environ, **(environ or {})}, folder)

    return start_line


@pytest.mark.parametrize(("line", "model"), STARTS)
def test_a_printed_line_starts(
    line: ServeLine, model: str, start_line: Callable[..., Started]
) -> None:
    started = start_line(line, model, "engine")
    assert started.report, started.log[-4000:]
    assert started.report["platform"] == "NPUPlatform"
    assert started.report["connector"] == CLASSES.get(line.connector, line.connector)
    assert started.report["recomputes"] is bool(line.connector)
    assert len(started.report["answer"]) == 4


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_work_is_refused(name: str, start_line: Callable[..., Started]) -> None:
    line, environ, message = REFUSED[name]
    started = start_line(line, "states", "scheduler", environ)
    assert not started.report
    assert message in started.log, started.log[-4000:]


def test_the_repair_allows_it_for_connectors_of_others(
    start_line: Callable[..., Started],
) -> None:
    """The repair recovers failed loads that any connector reports."""
    arguments = (word.replace("Kvext", "Example") for word in WITH_CONNECTOR.arguments)
    line = replace(WITH_CONNECTOR, arguments=tuple(arguments))
    started = start_line(line, "states", "config")
    assert started.report.get("policy") == "recompute", started.log[-4000:]
