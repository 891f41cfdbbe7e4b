# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM starts in a checkout of this project. Nothing is cached from an earlier start.

vLLM inspects the model in a process that imports the package from the working directory.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkout import WITHOUT_EDITABLE_INSTALL, copy_checkout
from support.scenarios import processes

pytestmark = pytest.mark.main_version


def test_starts_in_a_checkout(
    tiny_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    checkout, site = copy_checkout(tmp_path / "checkout"), tmp_path / "site"
    imported = checkout / "imported"
    with (checkout / "patches" / "__init__.py").open("a") as source:
        source.write(f"\nopen({str(imported)!r}, 'w').close()\n")
    site.mkdir()
    (site / "sitecustomize.py").write_text(WITHOUT_EDITABLE_INSTALL)
    environ = {"PYTHONPATH": str(site), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    plans = {"": processes.Plan(tiny_model, ["chat"], "retention")}
    served = processes.serve(tmp_path_factory, plans, environ, working_folder=checkout)[""]
    assert served.labels
    assert imported.is_file(), "no process has imported the package from the checkout"
