# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Damaged descriptors against the compiled core, under the sanitizers."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

CSRC = Path(__file__).parents[2] / "csrc"
FUZZ = Path(__file__).parents[1] / "native" / "fuzz" / "fuzz.cpp"
SECONDS = "5"


@pytest.fixture(scope="module")
def fuzz(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, built with AddressSanitizer and UndefinedBehaviorSanitizer."""
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "A C++ compiler built the package; the same is needed here."
    program = tmp_path_factory.mktemp("fuzz") / "fuzz"
    built = subprocess.run(
        [
            *(compiler, "-std=c++17", "-O1", "-g", "-pthread", "-Wall", "-Wextra", "-Werror"),
            *("-fsanitize=address,undefined", "-fno-sanitize-recover=all"),
            *("-I", CSRC, "-I", CSRC / "include"),
            *sorted((CSRC / "cpu").glob("*.cpp")),
            *(FUZZ, "-o", program),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return program


@pytest.mark.parametrize("seed", ["1", "2"])
def test_nothing_is_read_or_written_out_of_range(fuzz: Path, seed: str) -> None:
    # vLLM's CPU platform preloads libraries into child processes. ASan's must be the first.
    environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    finished = subprocess.run(
        [fuzz, SECONDS, seed],
        capture_output=True,
        env=environ,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr[-5000:]
    accepted, refused = map(int, finished.stdout.split())
    # Both ways are taken often. If all damage was noticed, copying would stay untested.
    assert min(accepted, refused) > 20
