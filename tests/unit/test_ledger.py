# SPDX-License-Identifier: Apache-2.0
"""The ledger keeps the rules that the machinery cannot check while it runs."""

from __future__ import annotations

import subprocess
import sys

import pytest
from packaging.specifiers import SpecifierSet

from vllm_ascend_kvext.activation import FEATURES
from vllm_ascend_kvext.compat import SUPPORTED, VLLM, VLLM_ASCEND, version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.store import FingerprintStore

every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)


def test_ids_are_unique() -> None:
    ids = [patch.id for patch in PATCHES]
    assert len(ids) == len(set(ids)) > 0


def test_every_feature_has_patches_and_every_patch_a_feature() -> None:
    assert {patch.feature for patch in PATCHES} == {feature.name for feature in FEATURES}


@every_patch
def test_version_ranges_are_closed_and_supported(patch: Patch) -> None:
    supported = {release.vllm for release in SUPPORTED}
    assert patch.vllm
    assert set(patch.vllm) <= supported
    assert all(spec.operator == "==" for text in patch.vllm for spec in SpecifierSet(text))


@every_patch
def test_every_patch_says_why_and_until_when(patch: Patch) -> None:
    assert patch.why.endswith(".")
    assert patch.retire_when


@every_patch
def test_every_function_it_counts_on_is_stored_for_each_release(patch: Patch) -> None:
    store = FingerprintStore.load()
    distribution = VLLM_ASCEND if patch.is_for_vllm_ascend else VLLM
    for release in SUPPORTED:
        if release.vllm not in patch.vllm:
            continue
        versions = [v for v in store.versions(distribution) if version_in(v, release.vllm)]
        assert versions
        for name in patch.fingerprinted:
            assert store.expected(distribution, versions[0], name), f"{name} of {versions[0]}"


@every_patch
def test_every_function_of_vllm_ascend_exists_in_a_release(patch: Patch) -> None:
    store = FingerprintStore.load()
    for name in patch.ascend:
        assert any(
            store.expected(VLLM_ASCEND, version, name) for version in store.versions(VLLM_ASCEND)
        ), name


def test_every_supported_release_has_been_read() -> None:
    store = FingerprintStore.load()
    for release in SUPPORTED:
        assert any(version_in(v, release.vllm) for v in store.versions(VLLM))
        assert any(version_in(v, release.vllm_ascend) for v in store.versions(VLLM_ASCEND))


def test_nothing_is_stored_that_no_patch_counts_on() -> None:
    wanted = {
        name for patch in PATCHES for name in patch.fingerprinted + patch.ascend + patch.lmcache
    }
    stored = {
        name
        for versions in FingerprintStore.load().distributions.values()
        for fingerprints in versions.values()
        for name in fingerprints
    }
    assert stored <= wanted


def test_the_ledger_imports_nothing_of_upstream() -> None:
    script = (
        "import sys, vllm_ascend_kvext.patches\n"
        "found = {'vllm', 'vllm_ascend', 'torch'} & set(sys.modules)\n"
        "sys.exit(str(found) if found else 0)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_patch_is_either_a_hook_or_has_a_wrapper() -> None:
    fields = {"id": "T", "target": "m:f", "feature": "f", "vllm": (), "why": "", "retire_when": ""}
    with pytest.raises(ValueError, match="T: a hook patch needs install"):
        Patch(**fields, kind=Kind.HOOK, wrapper=print)
    with pytest.raises(ValueError, match="T: a wrap patch needs wrapper"):
        Patch(**fields, kind=Kind.WRAP)
