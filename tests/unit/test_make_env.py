# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What environments consist of. The archives for these tests lie in a folder."""

from __future__ import annotations

import importlib
import io
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

PYPROJECT = """\
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
"""


def has_pip() -> bool:
    """Whether pip is installed. Searching for the module would change how setuptools imports."""
    return any(metadata.distributions(name="pip"))


@pytest.mark.skipif(not has_pip(), reason="no pip in this environment (aarch64)")
def test_of_a_source_archive_the_package_is_unpacked_and_nothing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    make_env = importlib.import_module("make_env")
    contents = {
        "pyproject.toml": PYPROJECT,
        "setup.py": "raise SystemExit('it was run')",
        "PKG-INFO": "Metadata-Version: 2.1\nName: vllm_ascend\nVersion: 0.23.0.post1\n",
        "vllm_ascend/__init__.py": "",
        "vllm_ascend/core/pool.py": "size = 3",
        "vllm_ascend/../outside.py": "",
        "tests/test_pool.py": "",
    }
    links = tmp_path / "links"
    links.mkdir()
    with tarfile.open(links / "vllm_ascend-0.23.0.post1.tar.gz", "w:gz") as archive:
        for name, text in contents.items():
            member = tarfile.TarInfo(f"vllm_ascend-0.23.0.post1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    folder = tmp_path / "unpacked"
    make_env.unpack_ascend(folder, "0.23.0.post1")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.py")}
    assert found == {"vllm_ascend/__init__.py", "vllm_ascend/core/pool.py"}
    assert (folder / "vllm_ascend/core/pool.py").read_text() == "size = 3"
    assert len(list(folder.rglob("*.pyc"))) == len(found)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["links", "unpacked"]


def test_packages_are_linked_with_their_bytecode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "tools")
    make_env = importlib.import_module("make_env")
    site_packages = property(lambda environment: environment.folder)
    monkeypatch.setattr(make_env.Environment, "site_packages", site_packages)
    source, target = tmp_path / "source", tmp_path / "target"
    for path in ("vllm/core.py", "vllm/__pycache__/core.cpython-311.pyc", "vllm_ascend_kvext/a.py"):
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        (source / path).touch()
    target.mkdir()
    make_env.link_packages(make_env.Environment(source), make_env.Environment(target))
    linked = {str(path.relative_to(target)) for path in target.rglob("*.py*")}
    assert linked == {"vllm/core.py", "vllm/__pycache__/core.cpython-311.pyc"}
