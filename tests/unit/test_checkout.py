# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The package works in a checkout. There, ``patches/`` lies beside it, without a compiled module.

vLLM inspects models with ``python -m``, which puts the working directory first on the path. If
vLLM is started in a checkout, this process imports the package from there, whatever is installed.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from support.checkout import copy_checkout, run_in

import vllm_ascend_kvext
from vllm_ascend_kvext.native import native

FOUND = """
import vllm_ascend_kvext
from vllm_ascend_kvext import patches
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patches.repairs import kv_cache_manager
assert kv_cache_manager.PATCHES[0] in PATCHES
root = sys.path[0] or __import__("os").getcwd()
assert vllm_ascend_kvext.__file__ == f"{root}/vllm_ascend_kvext/__init__.py"
assert patches.__file__ == f"{root}/patches/__init__.py"
"""
REGISTERED_WITHOUT_VLLM = """
sys.modules["vllm"] = None
import vllm_ascend_kvext
vllm_ascend_kvext.register()
from vllm_ascend_kvext import activation
assert activation.__file__.startswith(sys.path[0] or __import__("os").getcwd()), activation.__file__
"""
# If installed, the package contains the patches. Modules beside it do not belong to it.
INSTALLED = """
import vllm_ascend_kvext
from vllm_ascend_kvext.patches import PATCHES
assert list(vllm_ascend_kvext.__path__) == [vllm_ascend_kvext.__path__[0]]
try:
    import vllm_ascend_kvext.stranger
except ModuleNotFoundError:
    pass
else:
    raise AssertionError(vllm_ascend_kvext.stranger)
"""
DESCRIBE = """
from vllm_ascend_kvext import native
print(native.__file__)
print(native.native().__file__)
"""
WITHOUT_INSTALLED_PACKAGE = """
import numpy
sys.path[1:] = [entry for entry in sys.path[1:] if "site-packages" not in entry]
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return copy_checkout(tmp_path)


@pytest.mark.parametrize("code", [FOUND, REGISTERED_WITHOUT_VLLM, INSTALLED])
def test_a_checkout_and_an_installed_package_find_their_patches(checkout: Path, code: str) -> None:
    if code is INSTALLED:
        (checkout / "patches").rename(checkout / "vllm_ascend_kvext" / "patches")
        (checkout / "stranger.py").touch()
    completed = run_in(checkout, code)
    assert completed.returncode == 0, completed.stderr


def test_a_checkout_takes_the_installed_compiled_module(checkout: Path) -> None:
    finished = run_in(checkout, DESCRIBE)
    assert finished.returncode == 0, finished.stderr
    package, module = finished.stdout.splitlines()
    assert package.startswith(str(checkout))
    assert not module.startswith(str(checkout))


def of_another_version(package: Path) -> None:
    init = package / "__init__.py"
    init.write_text(init.read_text().replace('__version__ = "', '__version__ = "9'))


def lacks_a_function(package: Path) -> None:
    """The installed module may be older than the sources, although it has the same version."""
    stub = package / "_native.pyi"
    stub.write_text(stub.read_text() + "\ndef added_since() -> None: ...\n")


def does_not_load(package: Path) -> None:
    (package / Path(native().__file__ or "").name).write_bytes(b"not a library")


VERSION = vllm_ascend_kvext.__version__


@pytest.mark.parametrize(
    ("spoil", "code", "texts"),
    [
        (of_another_version, DESCRIBE, (f"expected version 9{VERSION}", f"found {VERSION}")),
        (
            lacks_a_function,
            DESCRIBE,
            (
                f"{native().__file__}: expected the functions and classes of ",
                "found none named added_since: ",
                "Install that package again.",
            ),
        ),
        (
            lambda package: None,
            WITHOUT_INSTALLED_PACKAGE + DESCRIBE,
            (
                "vllm_ascend_kvext._native: expected _native.",
                "found none on sys.path. Install the package for this interpreter",
            ),
        ),
        (
            does_not_load,
            DESCRIBE,
            ("vllm_ascend_kvext._native does not load: ", "Install the package again."),
        ),
    ],
)
def test_a_compiled_module_that_does_not_fit_is_refused(
    checkout: Path, spoil: object, code: str, texts: tuple[str, ...]
) -> None:
    assert callable(spoil)
    spoil(checkout / "vllm_ascend_kvext")
    finished = run_in(checkout, code)
    assert finished.stdout.startswith(str(checkout)), (
        "without a compiled module, only transfers may fail"
    )
    last = finished.stderr.splitlines()[-1]
    assert "CompiledModuleError: " in last
    assert all(text in last for text in texts), last
