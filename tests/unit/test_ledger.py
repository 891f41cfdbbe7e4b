# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The ledger follows the rules that the machinery cannot check while it runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from vllm_ascend_kvext.activation import FEATURES
from vllm_ascend_kvext.compat import VLLM, VLLM_ASCEND, version_in
from vllm_ascend_kvext.patches import PATCHES
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.ids import RETIRED_IDS, free_ids, misused_ids
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.supported import SUPPORTED

CHECKOUT = Path(__file__).parents[2]

every_patch = pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.id)


def test_an_id_is_unique_in_a_range_and_never_comes_back() -> None:
    assert len(PATCHES) > 0
    assert not misused_ids([patch.id for patch in PATCHES], RETIRED_IDS)


def test_an_id_that_two_patches_have_or_that_is_retired_or_malformed_is_found() -> None:
    ids = ["KVX-101", "KVX-102", "KVX-101", "KVX-601", "KVX-12"]
    assert misused_ids(ids, {"KVX-102"}) == [
        "KVX-102 is retired, and must not come back",
        "KVX-101 has two patches",
        "KVX-601 is in no range",
        "KVX-12 is in no range",
    ]


def test_a_patch_that_is_deleted_leaves_its_id_among_the_retired() -> None:
    """The changelog names the id of every patch, so no id is forgotten."""
    named = set(re.findall(r"KVX-[0-9]{3}", (CHECKOUT / "CHANGELOG.md").read_text()))
    ids = {patch.id for patch in PATCHES}
    assert ids - named == set(), "name new patches in the changelog, in the list of those added"
    assert named - ids - set(RETIRED_IDS) == set(), "put the id into RETIRED_IDS"


def test_free_ids_are_those_that_no_patch_has_or_had() -> None:
    taken = ["KVX-101", "KVX-103", "KVX-104", "KVX-199", "KVX-201"]
    assert free_ids(1, taken) == [("KVX-102", "KVX-102"), ("KVX-105", "KVX-198")]
    assert free_ids(3, taken) == [("KVX-301", "KVX-399")]


def test_every_feature_has_patches_and_every_patch_a_feature() -> None:
    assert {patch.feature for patch in PATCHES} == {feature.name for feature in FEATURES}


def test_what_a_feature_requires_requires_nothing_itself() -> None:
    required = {name for feature in FEATURES for name in feature.requires}
    assert not any(feature.requires for feature in FEATURES if feature.name in required)


def test_learning_is_held_before_steps_are_made_for_a_reset() -> None:
    """Both wrap one function. In a feature, the later wrapper is the outer one."""
    ids = [patch.id for patch in PATCHES if patch.feature == "connector"]
    drains, holds = (next(p for p in PATCHES if p.id == name) for name in ("KVX-403", "KVX-416"))
    assert drains.target == holds.target
    assert ids.index(drains.id) < ids.index(holds.id)


@every_patch
def test_a_patch_says_why_until_when_and_for_which_supported_versions(patch: Patch) -> None:
    assert patch.why.endswith(".") and patch.retire_when
    assert set(patch.vllm) <= {release.vllm for release in SUPPORTED} and patch.vllm
    assert all(spec.operator == "==" for text in patch.vllm for spec in SpecifierSet(text))


@every_patch
def test_every_function_it_counts_on_is_stored_for_each_release(patch: Patch) -> None:
    store = FingerprintStore.load()
    distribution = VLLM_ASCEND if patch.is_for_vllm_ascend else VLLM
    for release in SUPPORTED:
        if release.vllm not in patch.vllm:
            continue
        versions = [v for v in store.versions(distribution) if version_in(v, release.vllm)]
        assert versions and any(
            version_in(v, release.vllm_ascend) for v in store.versions(VLLM_ASCEND)
        )
        for name in patch.fingerprinted:
            assert store.expected(distribution, versions[0], name), f"{name} of {versions[0]}"


@every_patch
def test_every_function_of_vllm_ascend_exists_in_a_release(patch: Patch) -> None:
    store = FingerprintStore.load()
    for name in patch.ascend:
        assert any(
            store.expected(VLLM_ASCEND, version, name) for version in store.versions(VLLM_ASCEND)
        ), name


def test_nothing_is_stored_that_no_patch_counts_on() -> None:
    wanted = {name for patch in PATCHES for name in patch.fingerprinted + patch.ascend}
    stored = {
        name
        for versions in FingerprintStore.load().distributions.values()
        for fingerprints in versions.values()
        for name in fingerprints
    }
    assert stored <= wanted


def test_a_patch_is_either_a_hook_or_has_a_wrapper() -> None:
    fields = {"id": "T", "target": "m:f", "feature": "f", "vllm": (), "why": "", "retire_when": ""}
    with pytest.raises(ValueError, match="T: a hook patch needs install and no other"):
        Patch(**fields, kind=Kind.HOOK, wrapper=print)
    with pytest.raises(ValueError, match="T: a wrap patch needs wrapper"):
        Patch(**fields, kind=Kind.WRAP)
