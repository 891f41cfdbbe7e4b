# SPDX-License-Identifier: Apache-2.0
"""LMCache's objects are changed only where its code is that which was read."""

from __future__ import annotations

import logging

import pytest
from small_upstream import AddPackage

from vllm_ascend_kvext import compat
from vllm_ascend_kvext.patches.lmcache import known_release
from vllm_ascend_kvext.patches.lmcache.known_release import differences, is_as_read
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.store import FingerprintStore

RELEASE = "0.5.6"
NAMES = ("lmcache.a:f", "lmcache.a:g", "lmcache.b:h")
SOURCES = {"a": "def f(): pass\ndef g(): pass\n", "b": "def h(): pass\n"}


def test_what_differs_or_is_missing_or_of_another_release_is_named(
    add_package: AddPackage, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = add_package("lmcache", SOURCES)
    found = {name: fingerprint_source(root, name) for name in NAMES}
    store = FingerprintStore({compat.LMCACHE: {RELEASE: found}})
    monkeypatch.setattr(known_release, "RELIED_ON", NAMES)
    monkeypatch.setattr(known_release, "version", lambda: RELEASE)
    assert differences(store) == []
    add_package("lmcache", SOURCES | {"a": "def f(): return 1\ndef g(): pass\n"})
    assert differences(store) == ["lmcache.a:f"]
    add_package("lmcache", SOURCES | {"a": ""})
    assert differences(store) == ["lmcache.a:f", "lmcache.a:g"]
    add_package("lmcache", SOURCES)
    monkeypatch.setattr(known_release, "version", lambda: "0.5.7")
    assert differences(store) == list(NAMES)
    monkeypatch.setattr(compat, "package_folder", lambda package: None)
    assert differences(store) == list(NAMES)


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
        for text in ("0.5.7", "lmcache.a:f", "wrong below MultiConnector", "Install LMCache 0.5.6"):
            assert text in message
