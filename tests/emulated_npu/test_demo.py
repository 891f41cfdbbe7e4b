# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The output of `make demo-ascend`."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "ascend_emulated.py"
NOTICE = "The NPU is emulated on this CPU. No hardware was used, and times would mean nothing."
MAX_LINES = 40


def test_the_demo_shows_each_source_of_tokens_and_says_that_it_is_emulated(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, str(EXAMPLE)],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout
    lines = ended.stdout.splitlines()
    assert len(lines) <= MAX_LINES
    assert (lines[0], lines[-1]) == (NOTICE, NOTICE)
    assert "All outputs are identical to those without this package" in lines[-2]
    of_models = {}
    for line in lines:
        name, is_sum, numbers = line.partition(", all ")
        if is_sum:
            of_models[name.strip()] = [
                int(number.replace(",", "")) for number in re.findall(r"[\d,]+", numbers)
            ]
    assert [*of_models] == ["windows", "full attention"]
    for prompt, device, host, computed, in_holes, without in of_models.values():
        assert prompt == device + host + computed
        assert min(device, host) > 0
        assert in_holes < computed < without
    assert of_models["full attention"][4] > 0, "host memory has lost chunks in the middle"
