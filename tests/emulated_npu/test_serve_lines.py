# SPDX-License-Identifier: Apache-2.0
"""Every ``vllm serve`` line of the documentation starts vLLM-Ascend's engine, and it answers."""

from __future__ import annotations

from pathlib import Path

import pytest
import random_models
from support.scenarios.processes import NPU
from support.serve_lines import ServeLine, serve_lines, start

LINES = [line for line in serve_lines() if line.connector != "LMCacheMPConnector"]
"""LMCache is not installed in this environment."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    random_models.write(folder, random_models.one_window_and_one_full())
    return folder


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.place)
def test_a_printed_line_starts(line: ServeLine, model: Path) -> None:
    started = start(line, model, "engine", dict(NPU.environ), model)
    assert started.report, started.log[-4000:]
    assert started.report["platform"] == "NPUPlatform"
    assert started.report["connector"] == (line.connector or "NoneType")
    assert started.report["recomputes"] is bool(line.connector)
    assert len(started.report["answer"]) == 4
