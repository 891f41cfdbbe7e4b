# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What an import loads. `make lint` checks who imports whom: see ``[tool.importlinter]``."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import vllm_ascend_kvext

TENSORS = {"torch", "torch_npu", "transformers", "vllm", "vllm_ascend"}
ROOMS_WITHOUT_TENSORS = (
    *("groups", "holes", "layout", "lmcache", "patches", "prefix_cache", "retention", "store"),
)
NATIVE = "import vllm_ascend_kvext.transfer.page_transfer as _, vllm_ascend_kvext.native as n"
COLLECT = "import pytest\nassert not pytest.main(['--collect-only', '-qq', '-p', 'no:cacheprovider'"


def room(name: str) -> str:
    """Code that imports all modules of a room."""
    root = Path(vllm_ascend_kvext.__file__).parent
    modules = [each.name for each in pkgutil.iter_modules([str(root / name)]) if not each.ispkg]
    names = [f"vllm_ascend_kvext.{name}", *(f"vllm_ascend_kvext.{name}.{each}" for each in modules)]
    return "\n".join(f"import {each}" for each in names)


@pytest.mark.parametrize(
    ("code", "not_loaded"),
    [
        # If a plugin cannot be imported, vLLM only logs a line, and serves without the plugin.
        ("import vllm_ascend_kvext", TENSORS | {"numpy", "packaging", "wrapt"}),
        *((room(name), TENSORS) for name in ROOMS_WITHOUT_TENSORS),
        (f"{NATIVE}\nn.native()", TENSORS),
        # The tests in this folder run where neither vLLM nor torch is installed.
        (f"{COLLECT}, {str(Path(__file__).parent)!r}])", TENSORS),
    ],
    ids=["package", *ROOMS_WITHOUT_TENSORS, "compiled module", "unit tests"],
)
def test_neither_vllm_nor_torch_is_loaded(code: str, not_loaded: set[str], tmp_path: Path) -> None:
    script = f"import sys\nsys.path[:] = {sys.path!r}\n{code}\nprint('\\n', *sys.modules)"
    found = subprocess.run(
        [sys.executable, "-I", "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr + found.stdout[-2000:]
    loaded = {name.partition(".")[0] for name in found.stdout.rpartition("\n ")[2].split()}
    assert "vllm_ascend_kvext" in loaded and not loaded & not_loaded
