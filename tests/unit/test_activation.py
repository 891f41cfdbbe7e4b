# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What `register` does for each combination of settings and upstreams, and what status shows."""

from __future__ import annotations

import importlib
import json
import logging
import os
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import pytest
from small_upstream import declare, record
from small_vllm import ENGINE, ENVS, OLD_ENVS, TARGET, World

from vllm_ascend_kvext import activation, compat
from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.errors import KvextError, PatchError, SettingsError
from vllm_ascend_kvext.patching.declaration import Feature
from vllm_ascend_kvext.patching.fingerprint import fingerprint_source
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
)

DRIFTED = ENGINE.replace("self", "self, more=1")
FROZEN = f"""\
class Frozen(type):
    def __setattr__(cls, name, value):
        raise AttributeError("frozen")

{ENGINE.replace("Engine:", "Engine(metaclass=Frozen):")}"""
REPAIR = "two-phase-allocation"
"""The repair is on by default. Its name is a real one, because the switch knows no others."""

INTERVAL = {"interval": "0"}
NOT_KNOWN = (f"{RETENTION_INTERVAL_VARIABLE}, which this vLLM does not know",)


@dataclass(frozen=True)
class Case:
    """What is set, what is installed, and the result.

    Attributes:
        end: The state of the engine's function: ``patched``, ``imported`` and not patched, or
            ``untouched``.
        says: Parts of the only record of the log, or of the error. If empty, nothing is said.
        repair: Fields of a repair's patch. None if there is no repair.
        is_required: Whether retention needs the repair.
    """

    end: str
    variables: dict[str, str] = field(default_factory=dict)
    says: tuple[str, ...] = ()
    level: int = logging.WARNING
    error: type[KvextError] | None = None
    engine: str = ENGINE
    version: str = "0.23.0"
    repair: dict[str, Any] | None = None
    is_required: bool = False


CASES = {
    "nothing asked for": Case("untouched"),
    "not to be installed": Case("imported", INTERVAL, ("frozen",), error=PatchError, engine=FROZEN),
    "unsupported, which judges its own interval": Case(
        "untouched", {"interval": "abc"}, ("==0.23.0.*",), version="0.24.0"
    ),
    "nothing asked for, strict": Case("imported", {"mode": "strict"}),
    "blank": Case("untouched", {"interval": ""}),
    "blanks": Case("untouched", {"interval": "  "}),
    "off": Case("untouched", {"mode": "off", "VLLM_ASCEND_KVEXT_TYPO": "1"} | INTERVAL),
    "wrong mode": Case("untouched", {"mode": "of"}, ("MODE='of'",), error=SettingsError),
    "unknown variable": Case(
        "untouched", {"VLLM_ASCEND_KVEXT_TYPO": "1"}, ("TYPO",), error=SettingsError
    ),
    "unknown name of a feature": Case(
        "untouched",
        {DISABLE_VARIABLE: "typo"},
        (f"{DISABLE_VARIABLE}='typo'",),
        error=SettingsError,
    ),
    "drift of what nobody asked for": Case("untouched", engine=DRIFTED),
    "drift, strict": Case(
        "imported", {"mode": "strict"}, ("DRIFTED",), error=PatchError, engine=DRIFTED
    ),
    "repair": Case("patched", says=("applied",), level=logging.INFO, repair={}),
    "repair, drift": Case("imported", says=("DRIFTED",), engine=DRIFTED, repair={}),
    "asked for, and needs a repair": Case(
        *("patched", INTERVAL, ("2 patch(es) applied", REPAIR, "retention")),
        level=logging.INFO,
        repair={},
        is_required=True,
    ),
    "asked for, and needs a repair, drift": Case(
        *("imported", INTERVAL, (REPAIR, "DRIFTED")),
        error=PatchError,
        engine=DRIFTED,
        repair={},
        is_required=True,
    ),
    "unsupported": Case(
        "untouched", says=("untouched", "found vLLM 0.32.0", "==0.23.0.*"), version="0.32.0"
    ),
    "unsupported, off": Case("untouched", {"mode": "off"}, version="0.32.0"),
    "unsupported, strict": Case(
        *("untouched", {"mode": "strict"}, ("found vLLM 0.32.0",)),
        error=PatchError,
        version="0.32.0",
    ),
    "unsupported, asked for": Case(
        "untouched", INTERVAL, NOT_KNOWN, error=PatchError, version="0.32.0"
    ),
    "unsupported, asked for by a variable of ours": Case(
        *("untouched", {RETENTION_VARIABLE: "adaptive"}),
        says=(f"{RETENTION_VARIABLE}, which this vLLM does not know",),
        error=PatchError,
        version="0.32.0",
    ),
    "unsupported, and vLLM knows the variable": Case(
        "untouched", INTERVAL, ("whose own implementation obeys it",), version="0.24.0"
    ),
}
for text in ("abc", "1.5", "-1", "1e3"):
    CASES[f"wrong interval {text}"] = Case(
        *("imported", {"interval": text}, (f"{RETENTION_INTERVAL_VARIABLE}={text!r}",)),
        error=SettingsError,
    )
for mode in ("safe", "strict"):
    CASES |= {
        f"asked for, {mode}": Case(
            *("patched", INTERVAL | {"mode": mode}, ("1 patch(es) applied", "vLLM 0.23.0")),
            level=logging.INFO,
        ),
        f"repair left out, {mode}": Case(
            "imported", {"mode": mode, DISABLE_VARIABLE: REPAIR}, repair={}
        ),
        f"repair left out, drift, {mode}": Case(
            "imported", {"mode": mode, DISABLE_VARIABLE: REPAIR}, engine=DRIFTED, repair={}
        ),
        f"repair for other releases, {mode}": Case(
            "imported", {"mode": mode}, repair={"vllm": ("==0.30.0.*",)}
        ),
    }


every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def arrange(world: World, case: Case) -> None:
    if case.repair is not None:
        requires = (REPAIR,) * case.is_required
        world.features(
            Feature("retention", requires=requires), Feature(REPAIR, default_on=not requires)
        )
        world.ledger(
            declare(TARGET, feature=REPAIR, wrapper=record(world.calls), **case.repair),
            *(declare(TARGET, id="T-outer", feature="retention") for _ in requires),
        )
    envs = OLD_ENVS if case.version == "0.32.0" else ENVS
    world.upstream(case.version, case.engine, envs)
    world.set(**case.variables)


@every_case
def test_what_comes_of_wishes_and_upstreams(world: World, case: Case) -> None:
    arrange(world, case)
    said = ""
    for _ in range(2 if case.error is None else 1):  # A process logs only one line.
        if case.error is None:
            world.register()
        else:
            with pytest.raises(case.error) as raised:
                world.register()
            said = str(raised.value)
        if case.end == "patched":
            assert world.is_patched
        elif case.end == "imported":
            assert not world.is_patched
        else:
            assert world.is_untouched
    if case.error is None and case.says:
        assert {record.levelno for record in world.records} == {case.level}
        said = world.records[0].getMessage()
        assert len(world.records) == 1 + (case.level == logging.WARNING)
    else:
        assert world.records == []
    assert all(part in said for part in case.says) and bool(said) == bool(case.says)


@every_case
def test_status_says_what_register_does(
    world: World, case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    arrange(world, case)
    exit_status = main(["status", "--json"])
    report = json.loads(capsys.readouterr().out)
    is_degraded = bool(case.says) and case.level == logging.WARNING
    is_degraded |= case.engine is DRIFTED and case.repair is None  # ``status`` plans every feature.
    assert exit_status == (2 if case.error else is_degraded), report
    assert report["verdict"] == ("ok", "degraded", "failed")[exit_status]
    assert bool(report["notes"]) == (exit_status == 1)
    assert case.error is None or all(part in report["error"] for part in case.says)
    if case.error is SettingsError and "interval" not in case.variables:
        return
    is_supported, is_off = case.version == "0.23.0", case.variables.get("mode") == "off"
    assert (report["upstream"]["vllm"], report["supported"]) == (case.version, is_supported)
    is_asked = "interval" in case.variables and not is_off and case.variables["interval"].strip()
    requested = {RETENTION_INTERVAL_VARIABLE: case.variables["interval"]} if is_asked else {}
    assert report["requested"] == requested or RETENTION_VARIABLE in report["requested"]
    if is_off or not is_supported:
        assert world.is_untouched and not report["patches"]
        return
    patch, *others = report["patches"]
    assert len(others) == case.is_required
    assert patch["target"] == TARGET and patch["kind"] == "wrap"
    states = {DRIFTED: "drifted", FROZEN: "failed"}
    state = "applied" if case.end == "patched" else states.get(case.engine, "inert")
    is_for_others = (case.repair or {}).get("vllm") is not None
    assert patch["state"] == state or is_for_others
    assert state != "drifted" or "expected" in patch["reason"]
    assert case.engine is not FROZEN or "frozen" in patch["reason"]
    if case.is_required and not case.error:
        rows = [(row["name"], row["state"], row["reason"]) for row in report["features"]]
        assert rows == [
            ("retention", "on", f"asked for with {RETENTION_INTERVAL_VARIABLE}"),
            (REPAIR, "on", "needed by retention"),
        ]
    elif case.repair is not None and not case.error:
        is_drifted, is_disabled = case.engine is DRIFTED, DISABLE_VARIABLE in case.variables
        stands, reason = {
            (False, False): ("on", "on by default"),
            (True, False): ("refused", f"T-{TARGET} drifted"),
            (False, True): ("off", f"{DISABLE_VARIABLE} names it"),
            (True, True): ("off", "it would not fit"),
        }[is_drifted, is_disabled]
        if is_for_others:
            stands, reason = "not needed", "vLLM 0.23.0"
        (repair,) = [feature for feature in report["features"] if feature["name"] == REPAIR]
        assert repair["state"] == stands and reason in repair["reason"]


def test_an_interval_that_is_blank_is_unset_to_vllm_too_but_in_mode_off(world: World) -> None:
    world.set(mode="off", interval=" ")
    world.register()
    assert os.environ[RETENTION_INTERVAL_VARIABLE] == " "
    world.set(mode="safe")
    world.register()
    assert RETENTION_INTERVAL_VARIABLE not in os.environ


def test_drift_of_what_was_asked_for_raises_with_expected_found_and_remedy(world: World) -> None:
    world.upstream(engine=DRIFTED)
    world.ledger(*activation.PATCHES, declare("vllm.engine:Engine.gone", feature="retention"))
    world.set(**INTERVAL)
    with pytest.raises(PatchError) as raised:
        world.register()
    (expected,) = FingerprintStore.load().expected("vllm", "0.23.0", TARGET)
    for part in (
        f"T-{TARGET} DRIFTED",
        f"expected {expected}",
        "found ",
        "engine.py:2",
        "MISSING_TARGET",
        "vLLM 0.23.0",
        RETENTION_INTERVAL_VARIABLE,
        "python -m vllm_ascend_kvext status",
        f"{MODE_VARIABLE}=off",
    ):
        assert part in str(raised.value)
    assert not world.is_patched


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
