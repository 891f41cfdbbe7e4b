# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

from pathlib import Path

from vllm_ascend_kvext.patching.store import FingerprintStore

STORE = FingerprintStore({"vllm": {"0.23.0": {"m:f": "a"}, "0.22.0": {"m:f": "b"}}})


def test_expected_is_that_of_the_same_release() -> None:
    assert STORE.expected("vllm", "0.23.0", "m:f") == {"a"}
    assert STORE.expected("vllm", "0.23.0.post2", "m:f") == {"a"}
    assert STORE.expected("vllm", "0.22.0rc1", "m:f") == {"b"}
    for distribution, version, name in (
        ("vllm", "0.23.1", "m:f"),
        ("vllm", "not a version", "m:f"),
        ("vllm", "0.23.0", "m:g"),
        ("vllm-ascend", "0.23.0", "m:f"),
    ):
        assert STORE.expected(distribution, version, name) == frozenset()


def test_two_builds_of_a_release_both_count() -> None:
    store = STORE.replacing("vllm", "0.23.0.post1", {"m:f": "c"})
    assert store.expected("vllm", "0.23.0", "m:f") == {"a", "c"}
    assert STORE.expected("vllm", "0.23.0", "m:f") == {"a"}, "the store was changed in place"


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "fingerprints.json"
    assert FingerprintStore.load(path) == FingerprintStore({})
    STORE.save(path)
    assert FingerprintStore.load(path) == STORE
    assert path.read_text(encoding="utf-8").endswith("}\n")


def test_versions_are_listed_newest_first() -> None:
    assert STORE.versions("vllm") == ("0.23.0", "0.22.0")
    assert STORE.versions("vllm-ascend") == ()
