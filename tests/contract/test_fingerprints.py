# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The installed upstream is the one that was read when the fingerprints were stored.

The tests read source files. If a function differs, read it and check that the patch is still right.
Then store its fingerprint.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_kvext.commands.fingerprint import (
    SourceTree,
    compare,
    functions_of_interest,
    installed_trees,
    read,
)
from vllm_ascend_kvext.compat import (
    VLLM,
    VLLM_ASCEND,
    Upstream,
    installed_version,
    why_unsupported,
)
from vllm_ascend_kvext.patching.store import FingerprintStore


@pytest.fixture
def vllm() -> SourceTree:
    trees = [tree for tree in installed_trees() if tree.distribution == VLLM]
    if not trees:
        pytest.skip("vLLM is not installed")
    return trees[0]


@pytest.fixture
def vllm_ascend(monkeypatch: pytest.MonkeyPatch) -> Iterator[SourceTree]:
    folder = os.environ.get("KVEXT_ASCEND_SOURCES")
    if folder is None:
        pytest.skip("KVEXT_ASCEND_SOURCES names no folder with vllm_ascend")
    monkeypatch.syspath_prepend(folder)
    version = installed_version("vllm_ascend", distributions=())
    assert version is not None
    yield SourceTree(Path(folder), VLLM_ASCEND, version)


def test_vllm_is_a_supported_one(vllm: SourceTree) -> None:
    assert not why_unsupported(Upstream(vllm.version))


def test_every_function_of_vllm_resolves_and_is_as_stored(vllm: SourceTree) -> None:
    found, missing = read(vllm)
    assert not missing
    assert compare(vllm, found, FingerprintStore.load()) == []
    assert len(found) == len(functions_of_interest(VLLM, vllm.version)) > 0


def test_vllm_ascend_is_as_stored(vllm_ascend: SourceTree) -> None:
    found, _ = read(vllm_ascend)
    assert compare(vllm_ascend, found, FingerprintStore.load()) == []
    assert found


def test_an_edited_copy_is_told_apart(vllm: SourceTree, tmp_path: Path) -> None:
    name = functions_of_interest(VLLM, vllm.version)[0]
    module, _, qualname = name.partition(":")
    path = Path(*module.split(".")).with_suffix(".py")
    source = (vllm.root / path).read_text(encoding="utf-8")
    definition = f"def {qualname.rpartition('.')[2]}("
    assert definition in source
    copy = tmp_path / path
    copy.parent.mkdir(parents=True)
    copy.write_text(source.replace(definition, f"@edited\n    {definition}", 1), encoding="utf-8")
    edited = SourceTree(tmp_path, VLLM, vllm.version)
    found, _ = read(edited)
    differences = compare(edited, found, FingerprintStore.load())
    assert any(name in difference for difference in differences)
