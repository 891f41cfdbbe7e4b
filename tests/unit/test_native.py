# SPDX-License-Identifier: Apache-2.0
"""The compiled module is found, needs nothing at run time but numpy, and moves bytes."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from support.checkout import run_in
from support.transfer.cases import TransferCase, TransferMemory, assert_same, cases

import vllm_ascend_kvext
from vllm_ascend_kvext.native import native

CHECKOUT = Path(__file__).parents[2]

DESCRIBE = """
from vllm_ascend_kvext import native
print(native.__file__)
print(native.native().__file__)
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the package's sources, which hold no compiled module."""
    shutil.copytree(
        CHECKOUT / "vllm_ascend_kvext",
        tmp_path / "vllm_ascend_kvext",
        ignore=shutil.ignore_patterns("__pycache__", "*.so"),
    )
    return tmp_path


def test_it_says_what_it_is() -> None:
    described = native().describe()
    assert described["version"] == vllm_ascend_kvext.__version__
    assert described["instruction_sets"][-1] == "memcpy"
    assert described["kernel"] == described["instruction_sets"][0]


@settings(max_examples=50, deadline=None, suppress_health_check=list(HealthCheck))
@given(cases(max_page_bytes=2000))
def test_it_moves_bytes(case: TransferCase) -> None:
    memory = TransferMemory.random(case)
    expected = memory.after(case)
    native().page_transfer(*memory.descriptors(case))
    assert_same(memory.snapshot(), expected)


def test_it_imports_neither_torch_nor_vllm() -> None:
    script = (
        "import sys; from vllm_ascend_kvext import native; "
        "from vllm_ascend_kvext.transfer import page_transfer, oracle; "
        "native.native(); print([n for n in ('torch', 'vllm') if n in sys.modules])"
    )
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert finished.stdout == "[]\n", finished.stderr


def test_a_checkout_takes_the_installed_one(checkout: Path) -> None:
    finished = run_in(checkout, DESCRIBE)
    assert finished.returncode == 0, finished.stderr
    package, module = finished.stdout.splitlines()
    assert package.startswith(str(checkout))
    assert not module.startswith(str(checkout))


def test_a_checkout_takes_none_of_another_version(checkout: Path) -> None:
    package = checkout / "vllm_ascend_kvext" / "__init__.py"
    package.write_text(package.read_text().replace('__version__ = "', '__version__ = "9'))
    finished = run_in(checkout, DESCRIBE)
    assert f"expected version 9{vllm_ascend_kvext.__version__}" in finished.stderr
    assert f"found {vllm_ascend_kvext.__version__}" in finished.stderr
    assert "CompiledModuleError" in finished.stderr.splitlines()[-1]


def test_a_checkout_takes_none_that_lacks_a_function(checkout: Path) -> None:
    """The installed module may be older than the sources, and of the same version."""
    stub = checkout / "vllm_ascend_kvext" / "_native.pyi"
    stub.write_text(stub.read_text() + "\ndef added_since() -> None: ...\n")
    finished = run_in(checkout, DESCRIBE)
    last = finished.stderr.splitlines()[-1]
    assert (
        f"CompiledModuleError: {native().__file__}: expected the functions and classes of {stub}"
        in last
    )
    assert "found none named added_since: " in last
    assert "Install that package again." in last


WITHOUT_INSTALLED_PACKAGE = """
import numpy
sys.path[1:] = [entry for entry in sys.path[1:] if "site-packages" not in entry]
"""


def test_where_there_is_none_only_a_transfer_fails(checkout: Path) -> None:
    finished = run_in(checkout, WITHOUT_INSTALLED_PACKAGE + DESCRIBE)
    assert finished.stdout.startswith(str(checkout))
    last = finished.stderr.splitlines()[-1]
    assert "CompiledModuleError: vllm_ascend_kvext._native: expected _native." in last
    assert "found none on sys.path. Install the package for this interpreter" in last


def test_one_that_does_not_load_says_why(checkout: Path) -> None:
    name = Path(native().__file__).name
    (checkout / "vllm_ascend_kvext" / name).write_bytes(b"not a library")
    finished = run_in(checkout, DESCRIBE)
    last = finished.stderr.splitlines()[-1]
    assert "CompiledModuleError: vllm_ascend_kvext._native does not load: " in last
    assert "Install the package again." in last


def test_without_numpy_the_descriptors_say_so() -> None:
    script = """
import sys
sys.modules["numpy"] = None
import vllm_ascend_kvext.transfer
from vllm_ascend_kvext import _native
_native.describe()
import vllm_ascend_kvext.transfer.schema
"""
    finished = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert finished.stderr.count("line 7, in <module>") == 1  # All before it went well.
    assert "import of numpy halted" in finished.stderr.splitlines()[-1]
