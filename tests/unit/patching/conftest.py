# SPDX-License-Identifier: Apache-2.0
"""Plans against the small upstream."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from small_upstream import FEATURE, UPSTREAM, PlanPatches

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.plan import FeaturePlan, plan_features
from vllm_ascend_kvext.patching.store import FingerprintStore


@pytest.fixture
def plan_patches(upstream_root: Path) -> PlanPatches:
    """Plans patches against the small upstream, of which every function is stored."""

    def plan(*patches: Patch, upstream: Upstream = UPSTREAM, feature: str = FEATURE) -> FeaturePlan:
        store = _stored(upstream_root, patches)
        (plan,) = plan_features([feature], patches, upstream, store)
        return plan

    return plan


def _stored(root: Path, patches: tuple[Patch, ...]) -> FingerprintStore:
    fingerprints = {}
    for name in {name for patch in patches for name in patch.fingerprinted}:
        # An inherited method has the fingerprint of the class that defines it.
        defined = name.replace("SmallPool.inherited", "Base.inherited")
        with contextlib.suppress(FingerprintError):  # missing upstream is what some tests are about
            fingerprints[name] = fingerprint_source(root, defined)
    return FingerprintStore({"vllm": {"0.23.0": fingerprints}})
