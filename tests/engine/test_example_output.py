# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The examples print only their own lines. If one fails, it names the file with vLLM's lines."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
MAX_LINES = 12
"""The maximum number of lines of the example below, with its lines of progress."""

LOUD = """
import os, subprocess, sys
from pathlib import Path
from engine_log import engine_log
with engine_log(Path("out/loud.log")) as terminal:
    print("from print")
    print("from stderr", file=sys.stderr)
    os.write(2, b"from compiled code\\n")
    subprocess.run("echo from a process; echo and its stderr >&2", shell=True)
    print("progress", file=terminal)
print("a table")
"""


def run(folder: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env={**inherited, **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )


@pytest.mark.main_version
def test_an_example_prints_no_line_of_vllm(tmp_path: Path) -> None:
    ended = run(tmp_path, str(EXAMPLES / "offload_hybrid.py"))
    assert ended.returncode == 0, ended.stdout
    assert "WARNING" not in ended.stdout and "Loading safetensors" not in ended.stdout
    assert len(ended.stdout.splitlines()) <= MAX_LINES
    assert ended.stdout.endswith("All outputs are identical to those without a connector.\n")
    assert "WARNING" in (tmp_path / "out" / "offload_hybrid.log").read_text()


@pytest.mark.main_version
@pytest.mark.parametrize("name", ["retention", "offload_hybrid", "holes"])
def test_an_example_that_fails_names_the_log(tmp_path: Path, name: str) -> None:
    """vLLM ends while it is imported, in the example's process or in a process that it starts."""
    absent = str(tmp_path / "absent.json")
    ended = run(tmp_path, str(EXAMPLES / f"{name}.py"), VLLM_LOGGING_CONFIG_PATH=absent)
    assert ended.returncode == 1
    log = tmp_path / "out" / f"{name}.log"
    assert f"The log of vLLM: {log}\n" in ended.stdout
    assert absent in (log.read_text() if name == "retention" else ended.stdout)


def test_what_is_printed_around_the_engine_is_seen(tmp_path: Path) -> None:
    ended = run(tmp_path, "-c", LOUD, PYTHONPATH=str(EXAMPLES))
    assert ended.stdout == "progress\na table\n"
    log = (tmp_path / "out" / "loud.log").read_text().splitlines()
    assert sorted(log) == sorted(
        ["from print", "from stderr", "from compiled code", "from a process", "and its stderr"]
    )
