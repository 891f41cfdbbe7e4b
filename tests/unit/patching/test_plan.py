# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import wrapt
from small_upstream import (
    FEATURE,
    MODULE,
    SOURCE,
    UPSTREAM,
    AddPackage,
    PlanPatches,
    declare,
    record_foreign,
)

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.plan import FeaturePlan, State, digest, plan_features
from vllm_ascend_kvext.patching.store import FingerprintStore

FREE = f"{MODULE}:Pool.free"


def plan_feature(
    feature: str, ledger: list[Patch], upstream: Upstream, store: FingerprintStore
) -> FeaturePlan:
    (plan,) = plan_features([feature], ledger, upstream, store)
    return plan


@pytest.mark.parametrize(
    "target", ["Pool.free", "Pool.find", "Pool.count", "Pool.size", "SmallPool.inherited", "touch"]
)
def test_known_functions_fit(plan_patches: PlanPatches, target: str) -> None:
    plan = plan_patches(declare(target))
    assert [finding.state for finding in plan.findings] == [State.INERT], plan.findings
    assert plan.fits


def test_another_default_is_drift(
    plan_patches: PlanPatches, upstream_root: Path, add_package: AddPackage
) -> None:
    store = FingerprintStore({"vllm": {"0.23.0": {FREE: fingerprint_source(upstream_root, FREE)}}})
    add_package("fake_upstream", {"pool": SOURCE.replace("prepend=False", "prepend=True")})
    plan = plan_feature(FEATURE, [declare("Pool.free")], UPSTREAM, store)
    (finding,) = plan.misfits
    assert finding.state is State.DRIFTED
    assert not plan.fits
    for part in (FREE, "expected", *store.expected("vllm", "0.23.0", FREE), "pool.py:18"):
        assert part in finding.reason


def test_a_function_relied_on_counts_like_the_target(upstream_root: Path) -> None:
    touch = f"{MODULE}:touch"
    patch = declare("Pool.free", relies_on=(touch,))
    known = {name: fingerprint_source(upstream_root, name) for name in (FREE, touch)}

    def plan(fingerprints: dict[str, str]) -> State:
        store = FingerprintStore({"vllm": {"0.23.0": fingerprints}})
        return plan_feature(FEATURE, [patch], UPSTREAM, store).findings[0].state

    assert plan(known) is State.INERT
    assert plan({**known, touch: "0" * 16}) is State.DRIFTED
    assert plan({FREE: known[FREE]}) is State.DRIFTED, "nothing stored is no match"


@pytest.mark.parametrize(
    ("version", "fits"),
    [("0.23.0.post1", True), ("0.23.0+local", True), ("0.23.0rc1", True), ("0.23.1", False)],
)
def test_a_rebuilt_release_with_the_same_code_fits(
    plan_patches: PlanPatches, version: str, fits: bool
) -> None:
    patch = declare("Pool.free", vllm=("==0.23.*",))
    assert plan_patches(patch, upstream=Upstream(version)).fits is fits


@pytest.mark.parametrize("target", ["Pool.gone", "Gone.free", "gone"])
def test_missing_attribute(plan_patches: PlanPatches, target: str) -> None:
    (finding,) = plan_patches(declare(target)).misfits
    assert finding.state is State.MISSING_TARGET
    assert "has no attribute" in finding.reason


def test_missing_module(plan_patches: PlanPatches) -> None:
    (finding,) = plan_patches(declare("fake_upstream.gone:x")).misfits
    assert finding.state is State.MISSING_TARGET
    assert "fake_upstream.gone cannot be imported" in finding.reason


def test_a_patch_for_another_version_is_no_part_of_the_feature(plan_patches: PlanPatches) -> None:
    elsewhere = declare("Pool.gone", vllm=("==0.30.0.*",))
    plan = plan_patches(declare("Pool.free"), elsewhere)
    assert [finding.state for finding in plan.findings] == [State.INERT, State.SKIPPED_VERSION]
    assert plan.fits
    assert not plan_patches(elsewhere).fits, "a feature without a patch is none"


def test_a_patch_of_another_feature_is_left_out(plan_patches: PlanPatches) -> None:
    assert plan_patches(declare("Pool.gone", feature="other")).findings == ()


def test_the_target_of_a_hook_need_not_be_a_function(plan_patches: PlanPatches) -> None:
    hook = {"kind": Kind.HOOK, "install": lambda: lambda: None}
    assert plan_patches(declare("calls", **hook)).fits
    (finding,) = plan_patches(declare("gone", **hook)).misfits
    assert finding.state is State.MISSING_TARGET


def test_a_foreign_wrapt_wrapper_is_looked_through(plan_patches: PlanPatches) -> None:
    plan_patches()
    pool = importlib.import_module(MODULE)
    pool.Pool.free = wrapt.FunctionWrapper(vars(pool.Pool)["free"], record_foreign([]))
    assert plan_patches(declare("Pool.free")).fits


def test_a_foreign_function_in_its_place_is_drift(plan_patches: PlanPatches) -> None:
    pool = importlib.import_module(MODULE)

    def free(self: object, blocks: object, prepend: bool = False) -> None: ...

    pool.Pool.free = free
    (finding,) = plan_patches(declare("Pool.free")).misfits
    assert finding.state is State.DRIFTED
    assert "test_plan.py" in finding.reason


def test_planning_changes_nothing(plan_patches: PlanPatches) -> None:
    pool = importlib.import_module(MODULE)
    before = dict(vars(pool.Pool))
    plan_patches(declare("Pool.free"), declare("SmallPool.inherited"))
    assert dict(vars(pool.Pool)) == before
    assert "inherited" not in vars(pool.SmallPool)


def test_digest_names_the_plan(plan_patches: PlanPatches) -> None:
    one, other = declare("Pool.free"), declare("touch")
    assert digest([plan_patches(one)]) == digest([plan_patches(one)])
    assert digest([plan_patches(one)]) != digest([plan_patches(one, other)])
    assert digest([plan_patches(one)]) != digest([plan_patches(one, upstream=Upstream("0.24"))])


class TestWithVllmAscend:
    """A package that replaces functions of upstream, as vLLM-Ascend does."""

    ADDON = "vllm_ascend.patches:_ascend_free"
    ADDON_SOURCE = "def _ascend_free(self, blocks, prepend=False):\n    return 'ascend'\n"
    WITH_ASCEND = Upstream("0.23.0", "0.23.0")

    @pytest.fixture
    def store(self, upstream_root: Path, add_package: AddPackage) -> FingerprintStore:
        root = add_package("vllm_ascend", {"patches": self.ADDON_SOURCE})
        return FingerprintStore(
            {
                "vllm": {"0.23.0": {FREE: fingerprint_source(upstream_root, FREE)}},
                "vllm-ascend": {"0.23.0": {self.ADDON: fingerprint_source(root, self.ADDON)}},
            }
        )

    def replace(self) -> None:
        pool = importlib.import_module(MODULE)
        pool.Pool.free = importlib.import_module("vllm_ascend.patches")._ascend_free

    def test_a_replacement_that_the_ledger_names_fits(self, store: FingerprintStore) -> None:
        self.replace()
        patch = declare("Pool.free", ascend=(self.ADDON,))
        assert plan_feature(FEATURE, [patch], self.WITH_ASCEND, store).fits

    def test_a_replacement_that_it_does_not_name_is_drift(self, store: FingerprintStore) -> None:
        self.replace()
        plan = plan_feature(FEATURE, [declare("Pool.free")], self.WITH_ASCEND, store)
        assert plan.findings[0].state is State.DRIFTED
        assert "_ascend_free at" in plan.findings[0].reason

    def test_a_drifted_file_of_it_is_drift_before_it_replaces_anything(
        self, store: FingerprintStore, add_package: AddPackage
    ) -> None:
        add_package("vllm_ascend", {"patches": self.ADDON_SOURCE.replace("'ascend'", "'other'")})
        patch = declare("Pool.free", ascend=(self.ADDON,))
        plan = plan_feature(FEATURE, [patch], self.WITH_ASCEND, store)
        assert plan.findings[0].state is State.DRIFTED
        assert self.ADDON in plan.findings[0].reason
        assert "vllm_ascend.patches" not in sys.modules, "an import would apply its patches"

    def test_a_function_that_vanished_is_drift(
        self, store: FingerprintStore, add_package: AddPackage
    ) -> None:
        add_package("vllm_ascend", {"patches": ""})
        patch = declare("Pool.free", ascend=(self.ADDON,))
        plan = plan_feature(FEATURE, [patch], self.WITH_ASCEND, store)
        assert plan.findings[0].state is State.DRIFTED

    def test_a_function_that_was_absent_and_is_absent_fits(self, store: FingerprintStore) -> None:
        patch = declare("Pool.free", ascend=("vllm_ascend.patches:only_in_newer",))
        assert plan_feature(FEATURE, [patch], self.WITH_ASCEND, store).fits

    def test_its_own_functions_can_be_patched(self, store: FingerprintStore) -> None:
        patch = declare(self.ADDON)
        assert plan_feature(FEATURE, [patch], self.WITH_ASCEND, store).fits
        (finding,) = plan_feature(FEATURE, [patch], Upstream("0.23.0"), store).findings
        assert finding.state is State.SKIPPED_VERSION
        assert finding.reason == "for vLLM-Ascend only"

    def test_a_drifted_function_of_its_own_is_refused(
        self, store: FingerprintStore, add_package: AddPackage
    ) -> None:
        add_package("vllm_ascend", {"patches": self.ADDON_SOURCE.replace("'ascend'", "'other'")})
        (finding,) = plan_feature(FEATURE, [declare(self.ADDON)], self.WITH_ASCEND, store).findings
        assert finding.state is State.DRIFTED

    def test_without_it_its_functions_do_not_count(self, store: FingerprintStore) -> None:
        self.replace()
        patch = declare("Pool.free", ascend=(self.ADDON,))
        assert not plan_feature(FEATURE, [patch], Upstream("0.23.0"), store).fits
