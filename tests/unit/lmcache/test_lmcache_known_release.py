# SPDX-License-Identifier: Apache-2.0
"""LMCache's objects are changed only where its code is that which was read."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.patches.lmcache import known_release
from vllm_ascend_kvext.patches.lmcache.known_release import RELIED_ON, differences, is_as_read
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source, forget_sources
from vllm_ascend_kvext.patching.store import FingerprintStore

RELEASE = "0.5.6"


@pytest.fixture
def lmcache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A package that has all functions that are relied on."""
    modules: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name in RELIED_ON:
        module, _, qualname = name.partition(":")
        owner, _, function = qualname.rpartition(".")
        modules[module][owner].append(function)
    for module, owners in modules.items():
        path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = []
        for owner, functions in owners.items():
            lines += [f"class {owner}:"] if owner else []
            lines += [
                f"{' ' * 4 * bool(owner)}def {function}(self): pass" for function in functions
            ]
        path.write_text("\n".join(lines))
    monkeypatch.setattr(compat, "package_folder", lambda package: tmp_path / package)
    monkeypatch.setattr(known_release, "version", lambda: RELEASE)
    yield tmp_path
    forget_sources()
    is_as_read.cache_clear()


@pytest.fixture
def store(lmcache: Path) -> FingerprintStore:
    found = {name: fingerprint_source(lmcache, name) for name in RELIED_ON}
    return FingerprintStore({compat.LMCACHE: {RELEASE: found}})


def test_what_was_read_is_known(lmcache: Path, store: FingerprintStore) -> None:
    assert differences(store) == []


def test_what_differs_or_is_missing_is_named(lmcache: Path, store: FingerprintStore) -> None:
    name = RELIED_ON[0]
    path = lmcache.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")
    path.write_text(path.read_text().replace("pass", "return 1", 1))
    forget_sources()
    assert differences(store) == [name]
    path.unlink()
    forget_sources()
    gone = {name for name in RELIED_ON if name.startswith(RELIED_ON[0].partition(":")[0])}
    assert set(differences(store)) == gone


def test_another_release_is_unknown(
    lmcache: Path, store: FingerprintStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_release, "version", lambda: "0.5.7")
    assert differences(store) == list(RELIED_ON)


@pytest.mark.parametrize("differing", [[], ["lmcache.a:f"]])
def test_what_is_unknown_is_said_once(
    differing: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_as_read.cache_clear()
    monkeypatch.setattr(known_release, "differences", lambda store: differing)
    monkeypatch.setattr(known_release, "version", lambda: "0.5.7")
    with caplog.at_level(logging.WARNING):
        assert [is_as_read(), is_as_read()] == [not differing] * 2
    is_as_read.cache_clear()
    assert len(caplog.messages) == len(differing)
    for message in caplog.messages:
        for text in ("0.5.7", "lmcache.a:f", "Stores are not checked", "Install LMCache 0.5.6"):
            assert text in message
