# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest
import wrapt
from small_upstream import (
    FEATURE,
    MODULE,
    UPSTREAM,
    AddPackage,
    PlanPatches,
    declare,
    record_foreign,
)

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.plan import State, digest, plan_features
from vllm_ascend_kvext.patching.store import FingerprintStore

FREE = f"{MODULE}:Pool.free"
HOOK = {"kind": Kind.HOOK, "install": lambda: lambda: None}
FREE_023 = {"vllm": ("==0.23.*",)}
# A patch, the version of upstream, the state that is found, and a part of the reason.
FOUND: list[tuple[Patch, str, State, str]] = [
    *(
        (declare(target), "0.23.0", State.INERT, "")
        for target in ("Pool.free", "Pool.find", "Pool.count", "Pool.size", "touch")
    ),
    (declare("SmallPool.inherited"), "0.23.0", State.INERT, ""),
    *(
        (declare(target), "0.23.0", State.MISSING_TARGET, "has no attribute")
        for target in ("Pool.gone", "Gone.free", "gone")
    ),
    (
        declare("fake_upstream.gone:x"),
        "0.23.0",
        State.MISSING_TARGET,
        "fake_upstream.gone cannot be imported",
    ),
    # The target of a hook need not be a function.
    (declare("calls", **HOOK), "0.23.0", State.INERT, ""),
    (declare("gone", **HOOK), "0.23.0", State.MISSING_TARGET, ""),
    # The patch fits a rebuilt release with the same code.
    *(
        (declare("Pool.free", **FREE_023), version, State.INERT, "")
        for version in ("0.23.0.post1", "0.23.0+local", "0.23.0rc1")
    ),
    (declare("Pool.free", **FREE_023), "0.23.1", State.DRIFTED, "none is stored"),
    (declare("Pool.free"), "0.24.0", State.SKIPPED_VERSION, "for vLLM ==0.23.0.* only"),
]


@pytest.mark.parametrize(
    ("patch", "version", "state", "reason"), FOUND, ids=lambda each: getattr(each, "id", None)
)
def test_what_is_found(
    plan_patches: PlanPatches, patch: Patch, version: str, state: State, reason: str
) -> None:
    plan = plan_patches(patch, upstream=Upstream(version))
    (finding,) = plan.findings
    assert finding.state is state
    assert reason in finding.reason
    assert plan.fits is (state is State.INERT)
    assert bool(plan.misfits) is (state in (State.MISSING_TARGET, State.DRIFTED))


def test_a_function_relied_on_counts_like_the_target(upstream_root: Path) -> None:
    touch = f"{MODULE}:touch"
    patch = declare("Pool.free", relies_on=(touch,))
    known = {name: fingerprint_source(upstream_root, name) for name in (FREE, touch)}

    def plan(fingerprints: dict[str, str]) -> State:
        store = FingerprintStore({"vllm": {"0.23.0": fingerprints}})
        (plan,) = plan_features([FEATURE], [patch], UPSTREAM, store)
        return plan.findings[0].state

    assert plan(known) is State.INERT
    assert plan({**known, touch: "0" * 16}) is State.DRIFTED
    assert plan({FREE: known[FREE]}) is State.DRIFTED, (
        "a function without a stored fingerprint must not match"
    )


def test_a_patch_for_another_version_is_no_part_of_the_feature(plan_patches: PlanPatches) -> None:
    elsewhere = declare("Pool.gone", vllm=("==0.30.0.*",))
    plan = plan_patches(declare("Pool.free"), elsewhere)
    assert [finding.state for finding in plan.findings] == [State.INERT, State.SKIPPED_VERSION]
    assert plan.fits
    assert not plan_patches(elsewhere).fits, "a feature without a patch must not fit"


def test_a_foreign_wrapt_wrapper_is_looked_through(plan_patches: PlanPatches) -> None:
    plan_patches()
    pool = importlib.import_module(MODULE)
    pool.Pool.free = wrapt.FunctionWrapper(vars(pool.Pool)["free"], record_foreign([]))
    assert plan_patches(declare("Pool.free")).fits


def test_digest_names_the_plan(plan_patches: PlanPatches) -> None:
    one = declare("Pool.free")
    other = declare("touch")
    assert digest([plan_patches(one)]) == digest([plan_patches(one)])
    assert digest([plan_patches(one)]) != digest([plan_patches(one, other)])
    assert digest([plan_patches(one)]) != digest([plan_patches(one, upstream=Upstream("0.24"))])


ADDON = "vllm_ascend.patches:_ascend_free"
ADDON_SOURCE = "def _ascend_free(self, blocks, prepend=False):\n    return 'ascend'\n"
OTHER_ADDON = ADDON_SOURCE.replace("'ascend'", "'other'")
ON_ASCEND = Upstream("0.23.0", "0.23.0", has_torch_npu=True)
NAMED = declare("Pool.free", ascend=(ADDON,))
OWN = declare(ADDON)
NEWER = declare("Pool.free", ascend=("vllm_ascend.patches:only_in_newer",))
# A patch, upstream, whether the addon has replaced the function, the function, and the state that
# is found.
# Modules of vLLM-Ascend need torch_npu. Without torch_npu, their import may fail.
ON_ASCENDS: list[tuple[Patch, Upstream, bool, str, State, str]] = [
    (NAMED, ON_ASCEND, True, ADDON_SOURCE, State.INERT, ""),
    (declare("Pool.free"), ON_ASCEND, True, ADDON_SOURCE, State.DRIFTED, "_ascend_free at"),
    (NAMED, ON_ASCEND, False, OTHER_ADDON, State.DRIFTED, ADDON),
    (NAMED, ON_ASCEND, False, "", State.DRIFTED, ADDON),
    (NEWER, ON_ASCEND, False, ADDON_SOURCE, State.INERT, ""),
    (NAMED, Upstream("0.23.0"), True, ADDON_SOURCE, State.DRIFTED, "_ascend_free at"),
    (OWN, ON_ASCEND, False, ADDON_SOURCE, State.INERT, ""),
    (OWN, ON_ASCEND, False, OTHER_ADDON, State.DRIFTED, ADDON),
    *(
        (OWN, upstream, False, ADDON_SOURCE, State.SKIPPED_VERSION, "for vLLM-Ascend only")
        for upstream in (Upstream("0.23.0"), Upstream("0.23.0", "0.23.0"))
    ),
]


@pytest.mark.parametrize(
    ("patch", "upstream", "is_replaced", "source", "state", "reason"), ON_ASCENDS
)
def test_what_is_found_where_vllm_ascend_replaces_functions(
    upstream_root: Path,
    add_package: AddPackage,
    patch: Patch,
    upstream: Upstream,
    is_replaced: bool,
    source: str,
    state: State,
    reason: str,
) -> None:
    root = add_package("vllm_ascend", {"patches": ADDON_SOURCE})
    store = FingerprintStore(
        {
            "vllm": {"0.23.0": {FREE: fingerprint_source(upstream_root, FREE)}},
            "vllm-ascend": {"0.23.0": {ADDON: fingerprint_source(root, ADDON)}},
        }
    )
    add_package("vllm_ascend", {"patches": source})
    if is_replaced:
        addon = importlib.import_module("vllm_ascend.patches")
        importlib.import_module(MODULE).Pool.free = addon._ascend_free
    (plan,) = plan_features([FEATURE], [patch], upstream, store)
    (finding,) = plan.findings
    assert finding.state is state
    assert reason in finding.reason
    is_imported = is_replaced or (patch is OWN and upstream is ON_ASCEND)
    assert ("vllm_ascend.patches" in sys.modules) is is_imported, (
        "vLLM-Ascend's patches must only be imported if needed"
    )


AROUND = "vllm_ascend.patches:put_around.<locals>.free"
AROUND_SOURCE = """\
import functools


def put_around(pool):
    original = pool.free

    @functools.wraps(original)
    def free(self, blocks, prepend=False):
        return original(self, blocks, prepend)

    pool.free = free
"""


@pytest.mark.parametrize(
    ("known", "below", "state"),
    [
        pytest.param(AROUND_SOURCE, "", State.INERT, id="as it was read"),
        pytest.param(
            AROUND_SOURCE.replace("original = pool.free", "original = pool.find"),
            "",
            State.DRIFTED,
            id="it captures something else",
        ),
        pytest.param(
            AROUND_SOURCE.replace("prepend)", "True)"), "", State.DRIFTED, id="it does else"
        ),
        pytest.param(
            AROUND_SOURCE,
            "def free(self, blocks, prepend=False):\n    return []\n",
            State.DRIFTED,
            id="it is put around something else",
        ),
    ],
)
def test_a_closure_fits_with_what_it_is_put_around(
    upstream_root: Path, add_package: AddPackage, known: str, below: str, state: State
) -> None:
    root = add_package("vllm_ascend", {"patches": known, "below": below})
    store = FingerprintStore(
        {
            "vllm": {"0.23.0": {FREE: fingerprint_source(upstream_root, FREE)}},
            "vllm-ascend": {"0.23.0": {AROUND: fingerprint_source(root, AROUND)}},
        }
    )
    add_package("vllm_ascend", {"patches": AROUND_SOURCE, "below": below})
    pool = importlib.import_module(MODULE).Pool
    if below:
        pool.free = importlib.import_module("vllm_ascend.below").free
    importlib.import_module("vllm_ascend.patches").put_around(pool)
    patch = declare("Pool.free", ascend=(AROUND,))
    (plan,) = plan_features([FEATURE], [patch], ON_ASCEND, store)
    assert plan.findings[0].state is state, plan.findings[0].reason
