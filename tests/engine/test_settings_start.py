# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every documented variable and option starts an engine, which answers as vLLM does alone.

The engines run a hybrid model on the main vLLM. ``tests/emulated_npu/test_settings_start.py`` does
the same with vLLM-Ascend on each supported pair. ``tests/unit/test_settings_starts.py`` fails if a
documented setting is in no start.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.scenarios.answers import LOGPROB_TOLERANCE
from support.scenarios.processes import CPU
from support.settings_checks import NAMES, Starts


@pytest.fixture(scope="module")
def starts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory, tiny_model, CPU)


@pytest.mark.main_version
@pytest.mark.parametrize("name", NAMES)
def test_an_engine_starts_and_answers_as_vllm_alone(starts: Starts, name: str) -> None:
    starts.check(name, LOGPROB_TOLERANCE)
