# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Runs scripts in a copy of this project, whatever is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]

# An editable install finds modules before Python searches the path.
WITHOUT_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""


def copy_checkout(folder: Path) -> Path:
    """Copy the sources of the package, but no compiled module. The checkout stays unchanged."""
    for name in ("vllm_ascend_kvext", "patches"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(CHECKOUT / name, folder / name, ignore=ignored)
    return folder


def run_in(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script like ``python -m`` runs a module: with the working directory on the path."""
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_EDITABLE_INSTALL + script],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
