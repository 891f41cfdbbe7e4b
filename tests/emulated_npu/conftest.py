# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models, which are written once, and reports of late streams."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import draft_models
import pytest
import quantized_models
import random_models
from support.scenarios import processes

LATE_MODELS = {
    "windows": "one window",
    "latents": "latent attention, experts",
    "states": "states",
    "8 bits": "full attention, 8 bits",
}
"""Models of `random_models` and `quantized_models`, by kind of ``late_streams.py``."""


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a model of `random_models`, `draft_models` or `quantized_models`."""

    @cache
    def folder_of(model: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        writers = draft_models.WRITERS | draft_models.STATE_WRITERS | quantized_models.WRITERS
        if model in writers:
            writers[model](folder)
        else:
            random_models.write(folder, random_models.CONFIGS[model]())
        return folder

    return folder_of


@pytest.fixture(scope="module")
def run_late_streams(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Runs ``late_streams.py`` with some options, and returns its report."""

    def run(
        *options: str, kind: str = "windows", environ: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, Any]:
        report = tmp_path_factory.mktemp("report") / "report.json"
        ended = processes.run(
            Path(__file__).with_name("late_streams.py"),
            [str(report), str(folder_of(LATE_MODELS[kind])), "--kind", kind, *options],
            environ,
            processes.NPU,
        )
        assert not ended.exit_code, ended.log[-6000:]
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return run
