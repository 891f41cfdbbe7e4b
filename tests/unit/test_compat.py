# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

import sys
import types

import pytest
from small_upstream import AddPackage

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.compat import Upstream

VERSION_FILE = """\
version: str
__version__: str

__version__ = version = '{}'
"""


@pytest.mark.parametrize(
    ("vllm", "vllm_ascend", "ok"),
    [
        ("0.23.0", None, True),
        ("0.23.0", "0.23.0", True),
        ("0.23.0.post1", "0.23.0.post1", True),
        ("0.23.0+cpu", None, True),
        ("0.23.0rc2", None, True),
        ("0.23.1", None, False),
        ("0.24.0", None, False),
        ("0.20.2", None, False),
        ("0.32.0", None, False),
        # An unknown vLLM-Ascend, or one of another release, makes a supported vLLM unsupported.
        ("0.23.0", "0.22.1rc1", False),
        ("0.22.1", "0.23.0", False),
        ("0.23.0", "0.24.0", False),
        ("0.23.0", "unknown", False),
        ("unknown", None, False),
        (None, None, False),
    ],
)
def test_support(vllm: str | None, vllm_ascend: str | None, ok: bool) -> None:
    reason = compat.why_unsupported(Upstream(vllm, vllm_ascend))
    assert bool(reason) is not ok
    if not ok:
        assert str(vllm or "not installed") in reason and "==0.23.0.*" in reason


def test_version_is_that_of_the_package_an_import_would_get(add_package: AddPackage) -> None:
    add_package("vllm", {"_version": VERSION_FILE.format("0.23.0+cpu")})
    assert compat.detect({}).vllm == "0.23.0+cpu"
    assert "vllm" not in sys.modules, "the detection has imported vLLM"


def test_vllm_version_variable_counts_where_vllm_ascend_reads_it(add_package: AddPackage) -> None:
    add_package("vllm", {"_version": VERSION_FILE.format("0.1.dev1")})
    environ = {"VLLM_VERSION": "0.23.0"}
    assert compat.detect(environ).vllm == "0.1.dev1"
    add_package("vllm_ascend", {"_version": VERSION_FILE.format("0.23.0")})
    assert compat.detect(environ) == Upstream(
        "0.23.0", "0.23.0", has_torch_npu=compat.detect(environ).has_torch_npu
    )
    assert "vllm_ascend" not in sys.modules


def test_a_version_is_that_of_metadata_where_no_file_tells_or_unknown(
    add_package: AddPackage,
) -> None:
    folder = add_package("nameless", {})
    assert compat.installed_version("nameless", distributions=("no-such",)) == "unknown"
    version = compat.installed_version("nameless", distributions=("no-such", "packaging"))
    assert version is not None and version[0].isdigit()
    assert compat.installed_version("no_such_package", distributions=("packaging",)) is None
    (folder / "nameless" / "__init__.py").unlink()
    assert compat.package_folder("nameless") is None, (
        "a folder of this name was taken for the package"
    )


def test_torch_npu_made_by_hand_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
    assert compat.detect({}).has_torch_npu
