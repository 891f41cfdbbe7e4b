# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The wheel and the source distribution that ``make`` has built.

The wheel is made from the other.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILT = ROOT / ".venv" / "wheel"
PIP = ("-m", "pip", "--quiet", "--disable-pip-version-check")


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)


@pytest.fixture(scope="session")
def sdist() -> Path:
    (path,) = BUILT.glob("*.tar.gz")
    return path


@pytest.fixture(scope="session")
def wheel() -> Path:
    (path,) = BUILT.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with the wheel and its requirements."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    installed = run(python, "-I", *PIP, "install", wheel, cwd=folder)
    assert installed.returncode == 0, installed.stderr
    return python


def test_holds_the_package_and_nothing_beside_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.partition("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"vllm_ascend_kvext"}
    assert "vllm_ascend_kvext/patches/__init__.py" in names
    sources = (ROOT / "vllm_ascend_kvext").rglob("*.py")
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= set(names)
    assert not [name for name in names if "test" in name or "__pycache__" in name]


def test_is_for_this_python_and_platform_and_holds_one_compiled_module(wheel):
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    assert wheel.name.endswith(f"-{python}-{python}-{platform}.whl")
    with zipfile.ZipFile(wheel) as archive:
        libraries = [name for name in archive.namelist() if name.endswith((".so", ".a", ".dylib"))]
    assert libraries == [f"vllm_ascend_kvext/_native{sysconfig.get_config_var('EXT_SUFFIX')}"]


def test_the_sources_are_distributed(sdist):
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = (path for path in (ROOT / "csrc").rglob("*") if path.is_file())
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= names
    assert "CMakeLists.txt" in names


def test_the_compiled_module_needs_no_torch(python, wheel, tmp_path):
    code = (
        "import sys; from vllm_ascend_kvext import native; "
        "from vllm_ascend_kvext.transfer import page_transfer; "
        "print(native.native().describe()['version']); assert 'torch' not in sys.modules"
    )
    described = run(python, "-I", "-c", code, cwd=tmp_path)
    assert described.returncode == 0, described.stderr
    assert f"-{described.stdout.strip()}-" in wheel.name


def test_its_compiled_module_uses_the_cpu_and_moves_bytes(python, tmp_path):
    """A wheel of a compiler that does not know the CPU's features would have slow paths only."""
    checked = run(python, "-I", ROOT / "tools" / "check_wheel.py", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr


def test_requires_neither_torch_nor_vllm_and_has_one_entry_point(wheel):
    with zipfile.ZipFile(wheel) as archive:
        texts = {
            Path(name).name: archive.read(name).decode()
            for name in archive.namelist()
            if ".dist-info/" in name
        }
    metadata = Parser().parsestr(texts["METADATA"])
    lines = texts["entry_points.txt"].replace(" ", "").split("\n")
    assert [line for line in lines if line] == [
        "[vllm.general_plugins]",
        "ascend_kvext=vllm_ascend_kvext:register",
    ]
    required = [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(line.split(">")[0].split("<")[0] for line in required) == [
        "numpy",
        "packaging",
        "wrapt",
        "xxhash",
    ]
    assert metadata["License-Expression"] == "Apache-2.0"


def test_status_without_vllm_says_so_and_is_degraded(python, tmp_path):
    status = run(python, "-I", "-m", "vllm_ascend_kvext", "status", cwd=tmp_path)
    assert status.returncode == 1, status.stderr
    assert "Traceback" not in status.stderr
    assert "vLLM" in status.stdout
    assert "not installed" in status.stdout
    report = run(python, "-I", "-m", "vllm_ascend_kvext", "status", "--json", cwd=tmp_path)
    assert report.returncode == 1, report.stderr
    assert json.loads(report.stdout)
    report = run(python, "-I", "-m", "vllm_ascend_kvext", "collect-env", cwd=tmp_path)
    assert report.returncode == 0 and "python" in report.stdout.lower(), report.stderr
