# SPDX-License-Identifier: Apache-2.0
"""vLLM starts in a checkout of this project, with nothing cached from an earlier start.

It inspects the model in a process that imports the package from the working directory.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import served

pytestmark = pytest.mark.main_version

CHECKOUT = Path(__file__).parents[2]

# An editable install would answer the import before the working directory is looked at.
WITHOUT_EDITABLE_INSTALL = """
import sys
sys.meta_path[:] = [f for f in sys.meta_path if not type(f).__module__.startswith("_editable_")]
"""


def test_starts_in_a_checkout(tiny_model: Path, tmp_path: Path) -> None:
    checkout, site, report = (tmp_path / name for name in ("checkout", "site", "report.json"))
    for folder in ("vllm_ascend_kvext", "patches"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(CHECKOUT / folder, checkout / folder, ignore=ignored)
    imported = checkout / "imported"
    with (checkout / "patches" / "__init__.py").open("a") as source:
        source.write(f"\nopen({str(imported)!r}, 'w').close()\n")
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALL)
    environ = {"PYTHONPATH": str(site), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    ended = served.start(tiny_model, report, environ, {}, ["chat"], folder=checkout)
    assert ended.exit_code == 0, ended.log[-6000:]
    assert report.is_file()
    assert imported.is_file(), "no process has imported the package from the checkout"
