# SPDX-License-Identifier: Apache-2.0
"""The tests in this folder run where neither vLLM nor torch is installed, and load neither."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

COLLECT = """
import sys
import pytest

exit_code = pytest.main(["--collect-only", "-qq", "-p", "no:cacheprovider", sys.argv[1]])
found = {"torch", "torch_npu", "transformers", "vllm", "vllm_ascend"} & set(sys.modules)
sys.exit(f"collecting tests/unit ends with {exit_code!r} and loads {found}" if found or exit_code
         else 0)
"""


def test_collecting_the_unit_tests_loads_neither_vllm_nor_torch(tmp_path: Path) -> None:
    collected = subprocess.run(
        [sys.executable, "-I", "-c", COLLECT, str(Path(__file__).parent)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert collected.returncode == 0, collected.stderr + collected.stdout[-2000:]
