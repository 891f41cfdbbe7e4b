# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Fixtures that write small upstreams to disk."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import small_upstream
from small_upstream import FEATURE, UPSTREAM, AddPackage, PlanPatches
from small_vllm import World

from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.errors import FingerprintError
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source, forget_sources
from vllm_ascend_kvext.patching.plan import FeaturePlan, plan_features
from vllm_ascend_kvext.patching.store import FingerprintStore


@pytest.fixture
def add_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[AddPackage]:
    """Write modules below one folder of ``sys.path``. They are forgotten after the test.

    ``add_package("pkg", {"mod": "source"})`` returns the folder that holds ``pkg``.
    """
    monkeypatch.syspath_prepend(str(tmp_path))
    imported: set[str] = set()

    def add(package: str, modules: dict[str, str]) -> Path:
        for name in _modules_of(package):
            if package in imported:
                del sys.modules[name]
            else:
                # This is a real module. It comes back after the test.
                monkeypatch.delitem(sys.modules, name)
        forget_sources()
        imported.add(package)
        for name, source in {"__init__": "", **modules}.items():
            path = tmp_path.joinpath(package, *name.split(".")).with_suffix(".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(source, encoding="utf-8")
        return tmp_path

    yield add
    for package in imported:
        for name in _modules_of(package):
            del sys.modules[name]


def _modules_of(package: str) -> list[str]:
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


@pytest.fixture
def upstream_root(add_package: AddPackage) -> Path:
    """The folder that holds the package ``fake_upstream``. Nothing of the package is imported."""
    return add_package(small_upstream.PACKAGE, {"pool": small_upstream.SOURCE})


@pytest.fixture
def plan_patches(upstream_root: Path) -> PlanPatches:
    """Plan patches against the small upstream. The fingerprints of its functions are stored."""

    def plan(*patches: Patch, upstream: Upstream = UPSTREAM, feature: str = FEATURE) -> FeaturePlan:
        fingerprints = {}
        for name in {name for patch in patches for name in patch.fingerprinted}:
            # An inherited method has the fingerprint of the class that defines it.
            defined = name.replace("SmallPool.inherited", "Base.inherited")
            with contextlib.suppress(FingerprintError):  # Some tests test this error.
                fingerprints[name] = fingerprint_source(upstream_root, defined)
        store = FingerprintStore({"vllm": {"0.23.0": fingerprints}})
        (plan,) = plan_features([feature], patches, upstream, store)
        return plan

    return plan


@pytest.fixture
def world(add_package: AddPackage, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    world = World(add_package, monkeypatch)
    handler = logging.Handler()
    handler.emit = world.records.append  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.ascend_kvext")
    logger.addHandler(handler)
    monkeypatch.setattr(logger, "level", logging.DEBUG)
    yield world
    logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def _log_records_reach_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a test of another folder has imported vLLM, vLLM hides its records from other loggers."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
