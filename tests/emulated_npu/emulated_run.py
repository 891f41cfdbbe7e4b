# SPDX-License-Identifier: Apache-2.0
"""Runs a workload in a process of the emulated environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",  # A seed of late streams is to find sets in the same order again.
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
}
SLEEPING = {
    "enable_sleep_mode": True,
    "additional_config": {"weight_nz_mode": 0},  # vLLM-Ascend wakes up with no other.
}
"""Arguments of an engine that can sleep."""


def run_script(script: str, *arguments: object, environ: Mapping[str, str] | None = None) -> str:
    """Run a script of this folder to its end; what it has printed."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_ASCEND_KVEXT_", "VLLM_PREFIX_CACHE_"))
    }
    ended = subprocess.run(
        [sys.executable, HERE / script, *map(str, arguments)],
        env=inherited | ENVIRON | dict(environ or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-6000:]
    return ended.stdout


def run_plans(
    script: str, plans: Mapping[str, Any], folder: Path, environ: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Serve plans, and return their reports by name."""
    report, file = folder / "report.json", folder / "plans.json"
    file.write_text(json.dumps(plans))
    devices = max(
        plan["engine"].get("tensor_parallel_size", 1) * plan["engine"].get("data_parallel_size", 1)
        for plan in plans.values()
    )
    log = run_script(
        script, report, file, environ={"EMULATED_NPU_DEVICES": str(devices), **environ}
    )
    reports: dict[str, dict[str, Any]] = json.loads(report.read_text())
    for name, found in reports.items():
        assert "error" not in found, f"{name}: {found['error']}\n{log[-3000:]}"
    return reports
