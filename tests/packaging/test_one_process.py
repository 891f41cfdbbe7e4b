# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Suites can share a process, in any order and any working directory.

Each folder has modules that its tests import. Two modules of one name would hide each other.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDERS = ("unit", "ops", "engine", "contract", "packaging")
"""All but ``ascend``.

Beside others it is skipped, because it patches vLLM for the whole process.
"""


@pytest.mark.parametrize("folders", [FOLDERS, FOLDERS[::-1]], ids=["unit first", "unit last"])
def test_all_suites_are_collected_in_one_process(folders: tuple[str, ...], tmp_path: Path) -> None:
    options = ("--collect-only", "-qq", "-p", "no:cacheprovider")
    collected = subprocess.run(
        [sys.executable, "-I", "-m", "pytest", *options, *(str(TESTS / name) for name in folders)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stdout[-3000:]
    for name in folders:
        assert f"tests/{name}/test_" in collected.stdout
