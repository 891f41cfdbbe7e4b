# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_ascend_kvext``, its output and its exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_upstream import MODULE, PACKAGE, SOURCE, AddPackage, declare
from small_vllm import ENGINE, ENVS, OLD_ENVS, TARGET, World

import vllm_ascend_kvext
from vllm_ascend_kvext import compat
from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.blending.gate_records import GateRecord, write_record
from vllm_ascend_kvext.commands import fingerprint, ledger
from vllm_ascend_kvext.connector.options import OPTIONS
from vllm_ascend_kvext.errors import SettingsError
from vllm_ascend_kvext.features import FEATURES
from vllm_ascend_kvext.holes.eligibility import EngineRefusal, HoleRefusal
from vllm_ascend_kvext.patching.declaration import Feature
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import (
    DISABLE_VARIABLE,
    MODE_VARIABLE,
    RETENTION_INTERVAL_VARIABLE,
    RETENTION_VARIABLE,
    VARIABLES,
)

FROZEN_CLASS = """\
class Frozen(type):
    def __setattr__(cls, name, value):
        raise AttributeError("frozen")

"""
DRIFTED_ENGINE = ENGINE.replace("self", "self, more=1")


def lines_of(feature: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The printed lines that begin with the name of a feature, without the indent."""
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    return [line for line in lines if line.startswith(feature)]


class TestStatus:
    @staticmethod
    def status(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, Any]]:
        exit_status = main(["status", "--json"])
        return exit_status, json.loads(capsys.readouterr().out)

    def test_inert_is_ok(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        exit_status, report = self.status(capsys)
        assert (exit_status, report["verdict"]) == (0, "ok"), report
        assert report["patches"] == [
            {
                "id": f"T-{TARGET}",
                "feature": "retention",
                "kind": "wrap",
                "target": TARGET,
                "state": "inert",
                "reason": "",
            }
        ]
        assert report["upstream"]["vllm"] == "0.23.0"
        assert report["supported"] is True
        assert report["requested"] == {}

    def test_requested_is_applied(self, world: World, capsys: pytest.CaptureFixture[str]) -> None:
        world.set(interval="0")
        exit_status, report = self.status(capsys)
        assert exit_status == 0
        assert report["patches"][0]["state"] == "applied"
        assert report["requested"] == {RETENTION_INTERVAL_VARIABLE: "0"}
        assert world.is_patched

    def test_drift_unasked_is_degraded(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.upstream(engine=DRIFTED_ENGINE)
        exit_status, report = self.status(capsys)
        assert (exit_status, report["verdict"]) == (1, "degraded")
        assert report["patches"][0]["state"] == "drifted"
        assert "expected" in report["patches"][0]["reason"]

    @pytest.mark.parametrize("variables", [{"interval": "0"}, {"mode": "strict"}])
    def test_drift_of_what_was_asked_for_has_failed(
        self, world: World, capsys: pytest.CaptureFixture[str], variables: dict[str, str]
    ) -> None:
        world.upstream(engine=DRIFTED_ENGINE)
        world.set(**variables)
        exit_status, report = self.status(capsys)
        assert (exit_status, report["verdict"]) == (2, "failed")
        assert "DRIFTED" in report["error"]
        assert report["patches"][0]["state"] == "drifted"

    def test_failed_installation_is_shown(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.upstream(engine=FROZEN_CLASS + ENGINE.replace("Engine:", "Engine(metaclass=Frozen):"))
        world.set(interval="0")
        exit_status, report = self.status(capsys)
        assert exit_status == 2
        assert report["patches"][0]["state"] == "failed"
        assert "frozen" in report["patches"][0]["reason"]

    def test_wrong_settings_have_failed(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.set(mode="of")
        exit_status, report = self.status(capsys)
        assert exit_status == 2
        assert MODE_VARIABLE in report["error"]
        assert report["upstream"]["vllm"] == "0.23.0"

    def test_an_unexpected_failure_has_failed(
        self, world: World, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def detect(environ: object) -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(compat, "detect", detect)
        exit_status, report = self.status(capsys)
        assert (exit_status, report["error"]) == (2, "ZeroDivisionError: a bug")

    def test_off_is_ok_and_examines_nothing(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.set(mode="off", interval="0")
        exit_status, report = self.status(capsys)
        assert (exit_status, report["mode"], report["patches"]) == (0, "off", [])
        assert world.is_untouched

    @pytest.mark.parametrize("version", ["0.32.0", None])
    def test_unsupported_or_missing_vllm_is_degraded(
        self,
        world: World,
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        version: str | None,
    ) -> None:
        if version is None:
            monkeypatch.setitem(sys.modules, "vllm", None)
        else:
            world.upstream(version=version)
        exit_status, report = self.status(capsys)
        assert (exit_status, report["supported"]) == (1, False)
        assert report["upstream"]["vllm"] == version
        assert "==0.23.0.*" in report["notes"][0]

    def test_unsupported_and_requested_has_failed(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.upstream(version="0.32.0", envs=OLD_ENVS)
        world.set(interval="0")
        exit_status, report = self.status(capsys)
        assert exit_status == 2
        assert "0.32.0" in report["error"]

    def test_filtered_plugin_is_degraded(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.set(VLLM_PLUGINS="ascend")
        exit_status, report = self.status(capsys)
        assert exit_status == 1
        assert "VLLM_PLUGINS" in report["notes"][0]

    def test_filtered_plugin_that_something_is_asked_of_has_failed(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.set(VLLM_PLUGINS="ascend", interval="0")
        exit_status, report = self.status(capsys)
        assert exit_status == 2
        assert "VLLM_PLUGINS" in report["notes"][0]

    def test_what_upstream_prints_stays_out_of_the_report(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.upstream(engine=ENGINE + "print('hello')\n")
        assert main(["status", "--json"]) == 0
        captured = capsys.readouterr()
        json.loads(captured.out)
        assert captured.err == "hello\n"

    def test_a_requested_feature_says_which_variable_asks_for_it(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.set(interval="0")
        _, report = self.status(capsys)
        assert report["features"] == [
            {
                "name": "retention",
                "state": "on",
                "reason": f"asked for with {RETENTION_INTERVAL_VARIABLE}",
            }
        ]

    def test_a_feature_that_is_off_says_how_to_ask_for_it(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["status"]) == 0
        (line,) = lines_of("retention", capsys)
        assert line.split()[:2] == ["retention", "off"]
        assert f"{RETENTION_VARIABLE}=adaptive" in line

    def test_a_feature_that_others_need_says_which(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.features(Feature("retention", requires=("base",)), Feature("base"))
        world.ledger(
            declare(TARGET, feature="base"), declare(TARGET, feature="retention", id="T-outer")
        )
        world.set(interval="0")
        main(["status"])
        (line,) = lines_of("base", capsys)
        assert line.split(maxsplit=2) == ["base", "on", "needed by retention"]

    @pytest.mark.parametrize("text", ["abc", "1.5", "-1", "1e3"])
    def test_a_retention_interval_that_is_wrong_for_every_model_is_refused_as_at_engine_start(
        self, world: World, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        world.set(interval=text)
        exit_status, report = self.status(capsys)
        assert (exit_status, report["verdict"]) == (2, "failed")
        assert f"{RETENTION_INTERVAL_VARIABLE}={text!r}" in report["error"]
        assert report["features"][0]["state"] == "refused"
        with pytest.raises(SettingsError) as raised:
            world.register()
        assert report["error"] == str(raised.value)
        assert not world.is_patched

    @pytest.mark.parametrize("text", ["abc", "-1"])
    def test_an_unsupported_vllm_judges_its_own_interval(
        self, world: World, capsys: pytest.CaptureFixture[str], text: str
    ) -> None:
        world.upstream(version="0.32.0")
        world.set(interval=text)
        exit_status, _ = self.status(capsys)
        assert exit_status == 1

    def test_the_patches_are_counted_and_listed_on_request(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["status"]) == 0
        assert "patches: 1 inert" in capsys.readouterr().out
        assert main(["status", "--patches"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert printed[0].endswith(": ok")
        (row,) = [line for line in printed if line.startswith("T-")]
        assert row.split() == [f"T-{TARGET}", "retention", "inert", TARGET]

    def test_reasons_against_holes_are_listed_on_request(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["status"]) == 0
        assert "holes: computed with KvextConnector" in capsys.readouterr().out
        assert main(["status", "--holes"]) == 0
        printed = capsys.readouterr().out
        assert "engine: drafts " in printed
        assert 'hole_refusals_total{reason="adapter"}' in printed
        _, report = self.status(capsys)
        refused = {row["what"].partition(": ")[2] for row in report["holes"]}
        assert {reason.value for reason in (*HoleRefusal, *EngineRefusal)} <= refused

    def test_models_that_were_asked_are_counted_and_listed_on_request(
        self, world: World, capsys: pytest.CaptureFixture[str], tmp_path: Path
    ) -> None:
        main(["status"])
        assert "blending:" not in capsys.readouterr().out
        records = [
            GateRecord("model/one", True, "they agree", "2026-01-01T00:00:00+00:00"),
            GateRecord("model/two", False, "they do not", "2026-01-02T00:00:00+00:00"),
        ]
        for record in records:
            write_record(str(tmp_path), record.model.replace("/", "-"), record)
        world.upstream(envs=f"{ENVS}VLLM_CACHE_ROOT = {str(tmp_path)!r}\n")
        assert main(["status"]) == 0
        assert "blending: 2 checks of models, 1 passed" in capsys.readouterr().out
        assert main(["status", "--blending"]) == 0
        two, one = capsys.readouterr().out.splitlines()[-2:]
        assert two.split()[:2] == ["model/two", "computed"] and "they do not" in two
        assert one.split()[:2] == ["model/one", "reused"] and "they agree" in one
        _, report = self.status(capsys)
        assert [row["model"] for row in report["models"]] == ["model/two", "model/one"]

    def test_a_line_per_feature_says_how_the_features_of_this_package_stand(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.features(*FEATURES)
        world.ledger(*(declare(TARGET, feature=feature.name) for feature in FEATURES))
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= len(FEATURES) + 5
        assert lines[-1].startswith("shortest prompt that hits: it depends on the model")

    REPAIR = "drafts-in-flight"

    @pytest.mark.parametrize(
        ("disabled", "patch", "engine", "state", "reason", "exit_status"),
        [
            ("", {}, ENGINE, "on", "on by default", 0),
            (REPAIR, {}, ENGINE, "off", f"{DISABLE_VARIABLE} names it", 0),
            (REPAIR, {}, DRIFTED_ENGINE, "off", "it would not fit", 0),
            ("", {}, DRIFTED_ENGINE, "refused", f"T-{TARGET} drifted", 1),
            ("", {"vllm": ("==0.30.0.*",)}, ENGINE, "not needed", "vLLM 0.23.0", 0),
        ],
    )
    def test_a_repair_says_how_it_stands_and_why(
        self,
        world: World,
        capsys: pytest.CaptureFixture[str],
        disabled: str,
        patch: dict[str, Any],
        engine: str,
        state: str,
        reason: str,
        exit_status: int,
    ) -> None:
        world.features(Feature(self.REPAIR, default_on=True))
        world.ledger(declare(TARGET, feature=self.REPAIR, **patch))
        world.upstream(engine=engine)
        world.set(**{DISABLE_VARIABLE: disabled})
        found, report = self.status(capsys)
        (row,) = report["features"]
        assert (row["name"], row["state"]) == (self.REPAIR, state)
        assert reason in row["reason"]
        assert found == exit_status

    @pytest.mark.parametrize("variables", [{"mode": "off"}, {"version": "0.32.0"}])
    def test_every_feature_is_off_where_nothing_is_planned(
        self, world: World, capsys: pytest.CaptureFixture[str], variables: dict[str, str]
    ) -> None:
        version = variables.pop("version", "0.23.0")
        world.upstream(version=version)
        world.set(**variables)
        _, report = self.status(capsys)
        assert {row["state"] for row in report["features"]} == {"off"}


class TestFingerprint:
    NAME = f"{MODULE}:Pool.free"

    @pytest.fixture
    def arguments(
        self, upstream_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> list[str]:
        """Those that read the small upstream into a store of the test's own."""
        monkeypatch.setattr(fingerprint, "PATCHES", (declare("Pool.free"),))
        sources = ["--sources", str(upstream_root), "--distribution", "vllm", "--version", "0.23.0"]
        return ["fingerprint", "--store", str(tmp_path / "store.json"), *sources]

    def test_what_was_written_is_as_stored(
        self, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(arguments) == 1
        assert f"not stored  {self.NAME}" in capsys.readouterr().out
        assert main([*arguments, "--write"]) == 0
        assert main(arguments) == 0
        assert "As stored: vllm 0.23.0." in capsys.readouterr().out
        assert FingerprintStore.load(tmp_path / "store.json").expected("vllm", "0.23.0", self.NAME)
        assert MODULE not in sys.modules, "sources are read and not imported"

    def test_a_change_is_reported(
        self, arguments: list[str], add_package: AddPackage, capsys: pytest.CaptureFixture[str]
    ) -> None:
        main([*arguments, "--write"])
        add_package(PACKAGE, {"pool": SOURCE.replace("prepend=False", "prepend=True")})
        assert main(arguments) == 1
        assert self.NAME in capsys.readouterr().out

    def test_a_missing_function_is_not_stored(
        self,
        arguments: list[str],
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(fingerprint, "PATCHES", (declare("Pool.gone"),))
        assert main([*arguments, "--write"]) == 1
        assert "does not define 'Pool.gone'" in capsys.readouterr().out
        assert not (tmp_path / "store.json").exists()

    def test_a_version_that_no_patch_names_is_compared_with_every_stored_one(
        self,
        arguments: list[str],
        add_package: AddPackage,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        names = ("Pool.free", "Pool.find", "Pool.count")
        monkeypatch.setattr(fingerprint, "PATCHES", tuple(map(declare, names)))
        main([*arguments, "--write"])
        new = SOURCE.replace("prepend=False", "prepend=True").replace("def count", "def number")
        add_package(PACKAGE, {"pool": new})
        capsys.readouterr()
        arguments[arguments.index("0.23.0")] = "0.30.0"
        assert main(arguments) == 1
        _, *rows = (line.split("  ") for line in capsys.readouterr().out.splitlines())
        assert [[cell.strip() for cell in row if cell.strip()][:2] for row in rows] == [
            ["absent", f"{MODULE}:Pool.count"],
            ["differs from 0.23.0", f"{MODULE}:Pool.free"],
            ["as in 0.23.0", f"{MODULE}:Pool.find"],
        ]
        assert main([*arguments, "--write"]) == 1, "nothing is stored that no patch counts on"
        assert "no patch names it" in capsys.readouterr().out
        assert main(arguments) == 1

    def test_sources_that_are_not_there_are_refused(
        self, arguments: list[str], upstream_root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments[arguments.index(str(upstream_root))] = str(upstream_root / "gone")
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("--sources: expected a folder, found none at ")
        assert str(upstream_root / "gone") in error

    def test_half_a_source_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fingerprint", "--version", "0.23.0"]) == 2
        assert "go together" in capsys.readouterr().err


class TestCollectEnv:
    @staticmethod
    def collect(*arguments: str, **variables: str) -> str:
        package_root = Path(vllm_ascend_kvext.__file__).parent.parent
        path = os.pathsep.join([variables.pop("PYTHONPATH", ""), str(package_root)])
        return subprocess.run(
            [sys.executable, "-m", "vllm_ascend_kvext", "collect-env", *arguments],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables, "PYTHONPATH": path},
        ).stdout

    def test_prints_whatever_is_broken(self, tmp_path: Path) -> None:
        for dependency in ("packaging", "wrapt"):
            (tmp_path / f"{dependency}.py").write_text("raise OSError('broken')\n")
        report = json.loads(self.collect("--json", PYTHONPATH=str(tmp_path)))
        assert report["upstream"] == "OSError: broken"
        assert report["python"].startswith("CPython 3.")

    def test_shows_our_variables_and_no_secret(self) -> None:
        printed = self.collect(VLLM_API_KEY="s3cret", VLLM_ASCEND_KVEXT_MODE="strict")
        assert "VLLM_ASCEND_KVEXT_MODE: strict" in printed
        assert "VLLM_API_KEY" in printed
        assert "s3cret" not in printed


def test_the_ledger_shows_every_patch(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger"]) == 0
    printed = capsys.readouterr().out
    assert all(f"| {patch.id} |" in printed for patch in ledger.PATCHES)


def test_the_settings_show_every_variable_and_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["settings"]) == 0
    printed = capsys.readouterr().out
    assert all(f"## `{variable.name}`" in printed for variable in VARIABLES)
    assert all(f"## `{option.key}`" in printed for option in OPTIONS)


@pytest.mark.parametrize("command", ["status", "collect-env", "fingerprint", "ledger", "settings"])
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main([command, "--help"])
    assert exited.value.code == 0
    assert f"vllm_ascend_kvext {command}" in capsys.readouterr().out


def test_help_lists_commands_and_variables(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(variable.name in printed for variable in VARIABLES)
    assert "collect-env" in printed
