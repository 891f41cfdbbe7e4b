# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Every documented variable and option starts vLLM-Ascend with the answers of vLLM-Ascend alone.

See ``tests/engine/test_settings_start.py``. `make test` runs this file on every release.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from emulated_plans import pool_of
from support.scenarios.answers import NPU_TOLERANCE
from support.scenarios.processes import NPU
from support.settings_checks import NAMES, Starts


@pytest.fixture(scope="module")
def starts(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Starts:
    return Starts(tmp_path_factory, folder_of("windows"), NPU, **pool_of("windows"))


@pytest.mark.parametrize("name", NAMES)
def test_an_engine_starts_and_answers_as_vllm_ascend_alone(starts: Starts, name: str) -> None:
    starts.check(name, NPU_TOLERANCE)
