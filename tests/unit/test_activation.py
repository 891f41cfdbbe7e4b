# SPDX-License-Identifier: Apache-2.0
"""What `register` does for each combination of wishes and upstreams."""

from __future__ import annotations

import importlib
import logging
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from small_upstream import declare, record
from small_vllm import ENGINE, ENVS, OLD_ENVS, TARGET, World

import vllm_ascend_kvext
from vllm_ascend_kvext import activation, compat
from vllm_ascend_kvext.errors import PatchError, SettingsError
from vllm_ascend_kvext.patching.declaration import Feature
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.plan import State
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
)


def test_nothing_requested_costs_nothing(world: World) -> None:
    world.register()
    assert world.is_untouched
    assert "vllm" not in sys.modules
    assert world.records == []


@pytest.mark.parametrize("mode", ["safe", "strict"])
def test_requested_and_fitting_is_applied_once(world: World, mode: str) -> None:
    world.set(mode=mode, interval="0")
    world.register()
    assert world.is_patched
    (summary,) = world.logged(logging.INFO)
    assert f"T-{TARGET}" in summary
    assert "vLLM 0.23.0" in summary
    world.register()
    assert world.is_patched
    assert len(world.records) == 1, "one line per process"


def test_strict_plans_and_installs_nothing_unasked(world: World) -> None:
    world.set(mode="strict")
    world.register()
    assert not world.is_untouched
    assert not world.is_patched
    assert world.records == []


@pytest.mark.parametrize("text", ["", "  "])
def test_a_blank_interval_is_unset_to_vllm_too(world: World, text: str) -> None:
    world.set(interval=text)
    world.register()
    assert RETENTION_INTERVAL_VARIABLE not in os.environ
    assert world.is_untouched


def test_in_mode_off_a_blank_interval_is_vllms_to_judge(world: World) -> None:
    world.set(mode="off", interval=" ")
    world.register()
    assert os.environ[RETENTION_INTERVAL_VARIABLE] == " "


class TestDrift:
    @pytest.fixture(autouse=True)
    def drift(self, world: World) -> None:
        world.upstream(engine=ENGINE.replace("self", "self, more=1"))

    def test_requested_raises_with_expected_found_and_remedy(self, world: World) -> None:
        world.set(interval="0")
        with pytest.raises(PatchError) as raised:
            world.register()
        message = str(raised.value)
        (expected,) = FingerprintStore.load().expected("vllm", "0.23.0", TARGET)
        for part in (
            f"T-{TARGET} DRIFTED",
            f"expected {expected}",
            "found ",
            "engine.py:2",
            "vLLM 0.23.0",
            RETENTION_INTERVAL_VARIABLE,
            "python -m vllm_ascend_kvext status",
            f"{MODE_VARIABLE}=off",
        ):
            assert part in message
        assert not world.is_patched

    def test_every_misfit_is_listed(self, world: World) -> None:
        gone = declare("vllm.engine:Engine.gone", feature="retention")
        world.ledger(*activation.PATCHES, gone)
        world.set(interval="0")
        with pytest.raises(PatchError, match=r"(?s)DRIFTED.*MISSING_TARGET"):
            world.register()

    def test_not_requested_is_not_even_looked_at(self, world: World) -> None:
        world.register()
        assert world.is_untouched
        assert world.records == []

    def test_on_by_default_is_left_out_with_one_warning(self, world: World) -> None:
        world.monkeypatch.setattr(activation, "FEATURES", (Feature("retention", default_on=True),))
        world.register()
        (warning,) = world.logged(logging.WARNING)
        assert "DRIFTED" in warning
        assert not world.is_patched

    def test_strict_raises_unasked(self, world: World) -> None:
        world.set(mode="strict")
        with pytest.raises(PatchError, match="DRIFTED"):
            world.register()
        assert not world.is_patched


class TestRepairs:
    """Features that are on by default, under the name of a real one: the switch knows no other."""

    NAME = "two-phase-allocation"

    @pytest.fixture(autouse=True)
    def repair(self, world: World) -> None:
        world.features(Feature("retention"), Feature(self.NAME, default_on=True))
        world.ledger(declare(TARGET, feature=self.NAME, wrapper=record(world.calls)))

    def test_on_by_default_is_applied_unasked(self, world: World) -> None:
        world.register()
        assert world.is_patched
        assert len(world.logged(logging.INFO)) == 1

    @pytest.mark.parametrize("mode", ["safe", "strict"])
    def test_switched_off_is_left_out(self, world: World, mode: str) -> None:
        world.set(mode=mode, **{DISABLE_VARIABLE: self.NAME})
        world.register()
        assert not world.is_patched
        assert world.records == []

    @pytest.mark.parametrize("mode", ["safe", "strict"])
    def test_switched_off_may_have_drifted(self, world: World, mode: str) -> None:
        world.upstream(engine=ENGINE.replace("self", "self, more=1"))
        world.set(mode=mode, **{DISABLE_VARIABLE: self.NAME})
        world.register()
        assert world.records == []

    @pytest.mark.parametrize("mode", ["safe", "strict"])
    def test_for_other_releases_it_is_not_missed(self, world: World, mode: str) -> None:
        patch = declare(TARGET, feature=self.NAME, vllm=("==0.30.0.*",))
        world.ledger(patch)
        world.set(mode=mode)
        world.register()
        assert world.records == []

    def test_a_feature_brings_what_it_requires(self, world: World) -> None:
        world.features(Feature("retention", requires=(self.NAME,)), Feature(self.NAME))
        envs = declare("vllm.engine:Engine.rest", feature="retention")
        world.upstream(engine=f"{ENGINE}    def rest(self):\n        pass\n")
        store = FingerprintStore.load().replacing(
            "vllm",
            "0.23.0",
            {name: fingerprint_source(Path(sys.path[0]), name) for name in (TARGET, envs.target)},
        )
        world.monkeypatch.setattr(FingerprintStore, "load", lambda: store)
        world.ledger(*activation.PATCHES, envs)
        applied = activation.apply_feature("retention")
        assert set(applied) == {f"T-{TARGET}", envs.id}
        assert world.is_patched
        assert tuple(activation.revert_feature("retention")) == tuple(reversed(applied))
        assert not world.is_patched
        world.set(interval="0")
        world.register()
        assert world.is_patched

    def test_a_requirement_that_does_not_fit_stops_the_request(self, world: World) -> None:
        world.features(Feature("retention", requires=(self.NAME,)), Feature(self.NAME))
        world.upstream(engine=ENGINE.replace("self", "self, more=1"))
        world.set(interval="0")
        with pytest.raises(PatchError, match=f"(?s){self.NAME}.*DRIFTED"):
            world.register()
        with pytest.raises(PatchError, match=f"(?s){self.NAME}.*DRIFTED"):
            activation.apply_feature("retention")


def test_off_does_nothing_whatever_else_is_set(world: World) -> None:
    world.set(mode="off", interval="0", VLLM_ASCEND_KVEXT_TYPO="1")
    world.register()
    assert world.is_untouched
    assert world.records == []


@pytest.mark.parametrize("variables", [{"mode": "of"}, {"VLLM_ASCEND_KVEXT_TYPO": "1"}])
def test_wrong_settings_raise(world: World, variables: dict[str, str]) -> None:
    world.set(**variables)
    with pytest.raises(SettingsError):
        world.register()
    assert world.is_untouched


class TestUnsupported:
    @pytest.fixture(autouse=True)
    def unsupported(self, world: World) -> None:
        world.upstream(version="0.32.0", envs=OLD_ENVS)

    def test_leaves_vllm_untouched_with_one_warning(self, world: World) -> None:
        world.register()
        (warning,) = world.logged(logging.WARNING)
        for part in ("untouched", "found vLLM 0.32.0", "==0.23.0.*"):
            assert part in warning
        assert world.is_untouched

    def test_strict_raises(self, world: World) -> None:
        world.set(mode="strict")
        with pytest.raises(PatchError, match=r"found vLLM 0\.32\.0"):
            world.register()

    def test_a_request_that_vllm_does_not_know_raises(self, world: World) -> None:
        world.set(interval="0")
        with pytest.raises(PatchError, match=rf"{RETENTION_INTERVAL_VARIABLE}.*does not know"):
            world.register()
        assert world.is_untouched

    def test_what_only_this_package_knows_is_never_left_to_vllm(self, world: World) -> None:
        world.set(**{RETENTION_VARIABLE: "adaptive"})
        with pytest.raises(PatchError, match=rf"{RETENTION_VARIABLE}.*does not know"):
            world.register()
        assert world.is_untouched

    def test_a_request_that_vllm_knows_is_left_to_it(self, world: World) -> None:
        world.upstream(version="0.24.0", envs=ENVS)
        world.set(interval="0")
        world.register()
        (warning,) = world.logged(logging.WARNING)
        assert "whose own implementation obeys it" in warning
        assert world.is_untouched

    def test_off_is_silent(self, world: World) -> None:
        world.set(mode="off")
        world.register()
        assert world.records == []


class TestOwnVariables:
    def known(self) -> dict[str, Any]:
        return importlib.import_module("vllm.envs").environment_variables

    @pytest.mark.parametrize("mode", ["off", "safe", "strict"])
    def test_set_ones_are_introduced_to_vllm(self, world: World, mode: str) -> None:
        world.set(mode=mode)
        world.register()
        assert self.known()[MODE_VARIABLE]() == mode

    def test_unset_ones_are_not(self, world: World) -> None:
        world.register()
        assert set(self.known()) == {RETENTION_INTERVAL_VARIABLE}


class TestUnexpectedFailure:
    @pytest.fixture(autouse=True)
    def bug(self, world: World) -> None:
        def detect(environ: object) -> None:
            raise ZeroDivisionError("a bug")

        world.monkeypatch.setattr(compat, "detect", detect)

    def test_does_not_take_vllm_down(self, world: World) -> None:
        world.register()
        assert len(world.logged(logging.WARNING)) == 1
        (debug,) = [record for record in world.records if record.levelno == logging.DEBUG]
        assert debug.exc_info is not None
        assert debug.exc_info[0] is ZeroDivisionError

    @pytest.mark.parametrize("variables", [{"interval": "0"}, {"mode": "strict"}])
    def test_is_raised_where_something_was_asked_for(
        self, world: World, variables: dict[str, str]
    ) -> None:
        world.set(**variables)
        with pytest.raises(ZeroDivisionError):
            world.register()


class TestVllmAscend:
    ADDON = "vllm_ascend.patch:_step"
    SOURCE = """\
def _ensure_global_patch():
    import vllm.engine
    from vllm_ascend.patch import _step
    vllm.engine.Engine.step = _step
"""
    PATCH = "def _step(self):\n    return 'stock'\n"

    @pytest.fixture(autouse=True)
    def installed(self, world: World) -> None:
        modules = {
            "__init__": self.SOURCE,
            "_version": "__version__ = '0.23.0'\n",
            "patch": self.PATCH,
        }
        root = world.add_package("vllm_ascend", modules)
        store = FingerprintStore.load().replacing(
            "vllm-ascend", "0.23.0", {self.ADDON: fingerprint_source(root, self.ADDON)}
        )
        world.monkeypatch.setattr(FingerprintStore, "load", lambda: store)
        world.monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
        patch = declare(
            TARGET, feature="retention", wrapper=record(world.calls), ascend=(self.ADDON,)
        )
        world.ledger(patch)

    def is_in_place(self) -> bool:
        step = vars(importlib.import_module("vllm.engine").Engine)["step"]
        return getattr(step, "__wrapped__", step).__name__ == "_step"

    def test_its_patches_go_first_and_ours_wrap_them(self, world: World) -> None:
        world.set(interval="0")
        world.register()
        assert world.is_patched
        assert self.is_in_place()

    def test_it_is_not_touched_without_need(self, world: World) -> None:
        world.register()
        assert "vllm_ascend" not in sys.modules

    @pytest.mark.parametrize(("plugins", "goes_first"), [("ascend_kvext", False), ("ascend", True)])
    def test_the_plugin_filter_counts(self, world: World, plugins: str, goes_first: bool) -> None:
        world.set(interval="0", VLLM_PLUGINS=plugins)
        world.register()
        assert world.is_patched
        assert self.is_in_place() is goes_first

    def test_without_torch_npu_it_stays_out(self, world: World) -> None:
        world.monkeypatch.setitem(sys.modules, "torch_npu", None)
        world.set(interval="0")
        world.register()
        assert world.is_patched
        assert not self.is_in_place()

    def test_its_failure_is_named(self, world: World) -> None:
        source = "def _ensure_global_patch():\n    raise OSError('no NPU')\n"
        world.add_package("vllm_ascend", {"__init__": source, "patch": self.PATCH})
        world.set(interval="0")
        with pytest.raises(PatchError, match=r"vLLM-Ascend 0\.23\.0.*no NPU"):
            world.register()

    def test_of_an_unsupported_version_it_spoils_everything(self, world: World) -> None:
        world.add_package("vllm_ascend", {"_version": "__version__ = '0.24.0'\n"})
        world.register()
        (warning,) = world.logged(logging.WARNING)
        assert "vLLM-Ascend 0.24.0" in warning


def test_apply_and_revert_a_feature_by_name(world: World) -> None:
    patch_id = f"T-{TARGET}"
    assert activation.apply_feature("retention") == (patch_id,)
    assert world.is_patched
    assert activation.apply_feature("retention") == ()
    assert activation.revert_feature("retention") == {patch_id: State.INERT}
    assert not world.is_patched


def test_apply_refuses_what_it_does_not_know(world: World) -> None:
    with pytest.raises(PatchError, match="no feature 'holes'; there are: retention"):
        activation.apply_feature("holes")
    world.upstream(version="0.32.0")
    with pytest.raises(PatchError, match="Unsupported upstream"):
        activation.apply_feature("retention")


def test_importing_the_package_is_light() -> None:
    script = (
        "import sys, vllm_ascend_kvext\n"
        "heavy = {'torch', 'vllm', 'wrapt', 'packaging', 'vllm_ascend_kvext.activation'}\n"
        "sys.exit(str(heavy & set(sys.modules)) if heavy & set(sys.modules) else 0)\n"
    )
    package_root = Path(vllm_ascend_kvext.__file__).parent.parent
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={**os.environ, "PYTHONPATH": str(package_root)},
    )
