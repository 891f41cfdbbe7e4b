# SPDX-License-Identifier: Apache-2.0
"""The package works from a checkout, where ``patches/`` lies beside it.

vLLM inspects models with ``python -m``, which puts the working directory first on the path: started
in a checkout, that process imports this package from there, whatever is installed.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.checkout import run_in

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy, so that nothing is written to the real one."""
    for folder in ("vllm_ascend_kvext", "patches"):
        shutil.copytree(
            CHECKOUT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__")
        )
    return tmp_path


def test_the_patches_are_found(checkout: Path) -> None:
    completed = run_in(
        checkout,
        """
import vllm_ascend_kvext
from vllm_ascend_kvext import patches
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patches.repairs import kv_cache_manager
assert PATCHES
assert kv_cache_manager.PATCHES[0] in PATCHES
print(vllm_ascend_kvext.__file__)
print(patches.__file__)
""",
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout.splitlines() == [
        str(checkout / "vllm_ascend_kvext" / "__init__.py"),
        str(checkout / "patches" / "__init__.py"),
    ]


def test_it_registers_where_there_is_no_vllm(checkout: Path) -> None:
    completed = run_in(
        checkout,
        """
sys.modules["vllm"] = None
import vllm_ascend_kvext
vllm_ascend_kvext.register()
from vllm_ascend_kvext import activation
assert activation.__file__.startswith(sys.path[0] or __import__("os").getcwd()), activation.__file__
""",
    )
    assert completed.returncode == 0, completed.stderr


def test_an_installed_package_looks_nowhere_else(checkout: Path) -> None:
    """Installed, the patches lie within, and what lies beside the package is none of its own."""
    (checkout / "patches").rename(checkout / "vllm_ascend_kvext" / "patches")
    (checkout / "stranger.py").touch()
    completed = run_in(
        checkout,
        """
import vllm_ascend_kvext
from vllm_ascend_kvext.patches import PATCHES
assert list(vllm_ascend_kvext.__path__) == [vllm_ascend_kvext.__path__[0]]
try:
    import vllm_ascend_kvext.stranger
except ModuleNotFoundError:
    pass
else:
    raise AssertionError(vllm_ascend_kvext.stranger)
""",
    )
    assert completed.returncode == 0, completed.stderr
