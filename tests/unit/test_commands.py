# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``python -m vllm_ascend_kvext``: its output, and its exit status."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from small_upstream import MODULE, PACKAGE, SOURCE, AddPackage, declare
from small_vllm import ENGINE, TARGET, World

import vllm_ascend_kvext
from vllm_ascend_kvext import compat
from vllm_ascend_kvext.__main__ import main
from vllm_ascend_kvext.commands import fingerprint, ledger, upstream_changes
from vllm_ascend_kvext.features import FEATURES
from vllm_ascend_kvext.patching.fingerprint import source_of
from vllm_ascend_kvext.patching.store import FingerprintStore
from vllm_ascend_kvext.settings import (
    RETENTION_VARIABLE,
)

Status = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def status(world: World, capsys: pytest.CaptureFixture[str]) -> Status:
    """The exit status and the report."""

    def run(**variables: str) -> tuple[int, dict[str, Any]]:
        world.set(**variables)
        exit_status = main(["status", "--json"])
        report = json.loads(capsys.readouterr().out)
        assert report["verdict"] == ("ok", "degraded", "failed")[exit_status]
        return exit_status, report

    return run


class TestStatus:
    @pytest.mark.parametrize(("asked_for", "exit_status"), [({}, 1), ({"interval": "0"}, 2)])
    def test_a_filter_of_plugins_is_noted(
        self, status: Status, asked_for: dict[str, str], exit_status: int
    ) -> None:
        found, report = status(VLLM_PLUGINS="ascend", **asked_for)
        assert found == exit_status
        (note,) = report["notes"]
        assert note.endswith("Set VLLM_PLUGINS=ascend,ascend_kvext")

    def test_missing_vllm_is_degraded_and_an_unexpected_failure_has_failed(
        self, status: Status, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        exit_status, report = status()
        assert (exit_status, report["upstream"]["vllm"]) == (1, None)
        monkeypatch.setattr(compat, "detect", lambda environ: 1 / 0)
        exit_status, report = status()
        assert (exit_status, report["error"]) == (2, "ZeroDivisionError: division by zero")

    def test_what_upstream_prints_stays_out_of_the_report(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.upstream(engine=ENGINE + "print('hello')\n")
        assert main(["status", "--json"]) == 0
        captured = capsys.readouterr()
        json.loads(captured.out)
        assert captured.err == "hello\n"

    def test_people_read_features_counts_and_on_request_patches(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["status"]) == 0
        first, _, feature, *rest = capsys.readouterr().out.splitlines()
        assert first.endswith(": ok")
        assert feature.split()[:2] == ["retention", "off"]
        assert f"{RETENTION_VARIABLE}=adaptive" in feature
        assert rest[0].startswith("patches: 1 inert")
        assert main(["status", "--patches"]) == 0
        (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("T-")]
        assert row.split() == [f"T-{TARGET}", "retention", "inert", TARGET]

    @pytest.mark.parametrize("asked_for", [{}, {"interval": "0"}])
    def test_without_vllm_people_read_what_is_missing_and_no_features(
        self,
        world: World,
        asked_for: dict[str, str],
        capsys: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setitem(sys.modules, "vllm", None)
        world.set(**asked_for)
        assert main(["status"]) == (2 if asked_for else 1)
        first, mode, *rest = capsys.readouterr().out.splitlines()
        assert "on no vLLM" in first and mode.split()[0] == "mode"
        (said,) = [line for line in rest if line and not line.startswith("patches")]
        assert "vLLM is not installed for" in said
        assert said.endswith("asks for a feature.") is bool(asked_for)

    def test_a_line_per_feature_says_how_the_features_of_this_package_stand(
        self, world: World, capsys: pytest.CaptureFixture[str]
    ) -> None:
        world.features(*FEATURES)
        world.ledger(*(declare(TARGET, feature=feature.name) for feature in FEATURES))
        assert main(["status"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) <= len(FEATURES) + 3


class TestLedger:
    def test_what_is_free_is_listed_by_range(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["ledger"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("KVX-1xx  retention; repairs: ")
        assert lines[-1].startswith("  free: KVX-505 to 599")

    def test_neither_a_used_nor_a_retired_id_is_listed(self) -> None:
        lines = ledger.render(["KVX-101", "KVX-104"], ["KVX-102"])
        assert lines[:2] == [
            "KVX-1xx  retention; repairs: 2 in use, 1 retired",
            "  free: KVX-103, KVX-105 to 199",
        ]


class TestFingerprint:
    NAME = f"{MODULE}:Pool.free"

    @pytest.fixture
    def arguments(
        self, upstream_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> list[str]:
        """Arguments that read the small upstream into a store of the test."""
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
        assert MODULE not in sys.modules, "the command has imported the sources"

    def test_a_change_is_reported_and_a_missing_function_is_not_stored(
        self,
        arguments: list[str],
        tmp_path: Path,
        add_package: AddPackage,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        main([*arguments, "--write"])
        add_package(PACKAGE, {"pool": SOURCE.replace("prepend=False", "prepend=True")})
        assert main(arguments) == 1
        assert self.NAME in capsys.readouterr().out
        (tmp_path / "store.json").unlink()
        monkeypatch.setattr(fingerprint, "PATCHES", (declare("Pool.gone"),))
        assert main([*arguments, "--write"]) == 1
        assert "does not define 'Pool.gone'" in capsys.readouterr().out
        assert not (tmp_path / "store.json").exists()

    def test_a_version_that_no_patch_names_is_compared_with_every_stored_one(
        self,
        arguments: list[str],
        upstream_root: Path,
        tmp_path: Path,
        add_package: AddPackage,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        of_two = declare("Pool.count", id="T-two", relies_on=(f"{MODULE}:Pool.find",))
        patches = (*map(declare, ("Pool.free", "Pool.find")), of_two)
        monkeypatch.setattr(fingerprint, "PATCHES", patches)
        main([*arguments, "--write"])
        old = tmp_path / "old"
        shutil.copytree(upstream_root, old)
        new = SOURCE.replace("prepend=False", "prepend=True").replace("def count", "def number")
        add_package(PACKAGE, {"pool": new})
        capsys.readouterr()
        arguments[arguments.index("0.23.0")] = "0.30.0"
        assert main(arguments) == 1
        listed = capsys.readouterr().out
        _, *table, as_before = listed.splitlines()
        assert as_before == "Patches with nothing to read: T-Pool.find."
        rows = [line.split("  ") for line in table]
        assert [[cell.strip() for cell in row if cell.strip()][:2] for row in rows] == [
            ["absent", f"{MODULE}:Pool.count"],
            ["differs from 0.23.0", f"{MODULE}:Pool.free"],
            ["as in 0.23.0", f"{MODULE}:Pool.find"],
        ]
        main([*arguments, "--against", str(old)])
        again, _, shown = capsys.readouterr().out.partition("\n\n")
        assert again == listed.rstrip("\n")
        changed = [line for line in shown.splitlines() if line.startswith(("+", "-"))]
        assert ["prepend=False" in changed[2], "prepend=True" in changed[3]] == [True, True]
        assert len(changed) == 4, "expected the changed lines of the one function that differs"
        assert main([*arguments, "--write"]) == 1, "a fingerprint was stored that no patch needs"
        assert "no patch names it" in capsys.readouterr().out
        assert main(arguments) == 1

    def test_patches_of_other_versions_are_not_listed(
        self,
        arguments: list[str],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        older = declare("Pool.free", id="T-older", vllm=("==0.20.0.*",))
        monkeypatch.setattr(fingerprint, "PATCHES", (declare("Pool.free"), older))
        main([*arguments, "--write"])
        arguments[arguments.index("0.23.0")] = "0.30.0"
        capsys.readouterr()
        main(arguments)
        listed = capsys.readouterr().out
        assert "T-Pool.free" in listed
        assert "T-older" not in listed

    def test_docstrings_are_no_difference(self, tmp_path: Path) -> None:
        for folder, docstring in (("old", '"""One."""'), ("new", '"""\n    Two.\n    """\n')):
            (tmp_path / folder).mkdir()
            source = f"def free():\n    {docstring}\n    return 1  # what for\n"
            (tmp_path / folder / "pool.py").write_text(source)
        heading, *lines = upstream_changes.diff(tmp_path / "old", tmp_path / "new", "pool:free")
        assert (heading, lines) == ("", [])
        assert source_of(tmp_path / "new", "pool:free") == [
            "def free():",
            "    return 1  # what for",
        ]

    def test_functions_that_are_imported_and_no_patch_counts_on_are_compared(
        self, tmp_path: Path
    ) -> None:
        name = "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys"
        for folder, source in (
            ("old", "def {}():\n    return 1\n\n\ndef not_ours():\n    return 1\n"),
            ("new", "def {}():\n    return 2\n\n\ndef not_ours():\n    return 2\n"),
            ("gone", ""),
        ):
            path = tmp_path / folder / "vllm" / "v1" / "core" / "kv_cache_utils.py"
            path.parent.mkdir(parents=True)
            path.write_text(source.format(name.partition(":")[2]))
        old, new = tmp_path / "old", tmp_path / "new"
        shown = upstream_changes.changed_imports(old, new, "vllm", set())
        assert shown[1:3] == [f"--- {name}", f"+++ {name}"]
        assert shown[-2:] == ["-    return 1", "+    return 2"]
        assert upstream_changes.changed_imports(old, new, "vllm", {name}) == []
        _, absent = upstream_changes.changed_imports(old, tmp_path / "gone", "vllm", set())
        assert absent.startswith(f"{name}: ")
        assert "does not define" in absent

    def test_names_that_upstream_has_lost_are_listed_with_the_file_that_has_them(
        self, tmp_path: Path
    ) -> None:
        for folder, source in (
            ("old", "self.single_type_managers = self.not_ours = 1\nself.block_pool = 2\n"),
            ("new", "self.block_pool = 2  # no single_type_managers\n"),
        ):
            (tmp_path / folder / "vllm").mkdir(parents=True)
            (tmp_path / folder / "vllm" / "core.py").write_text(source)
        _, heading, *lost = upstream_changes.lost_names(tmp_path / "old", tmp_path / "new", "vllm")
        assert heading.endswith(": 1.")
        (line,) = lost
        assert line.startswith("single_type_managers  ")
        assert "block_managers/kv_cache_manager.py" in line

    def test_sources_that_are_not_there_are_refused(
        self, arguments: list[str], upstream_root: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments[arguments.index(str(upstream_root))] = str(upstream_root / "gone")
        assert main(arguments) == 2
        error = capsys.readouterr().err
        assert error.startswith("--sources: expected a folder, found none at ")
        assert str(upstream_root / "gone") in error
        assert main(["fingerprint", "--version", "0.23.0"]) == 2
        assert "go together" in capsys.readouterr().err


class TestCollectEnv:
    @staticmethod
    def collect(**variables: str) -> str:
        package_root = Path(vllm_ascend_kvext.__file__).parent.parent
        path = os.pathsep.join([variables.pop("PYTHONPATH", ""), str(package_root)])
        return subprocess.run(
            [sys.executable, "-m", "vllm_ascend_kvext", "collect-env"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, **variables, "PYTHONPATH": path},
        ).stdout

    def test_prints_whatever_is_broken(self, tmp_path: Path) -> None:
        for dependency in ("packaging", "wrapt"):
            (tmp_path / f"{dependency}.py").write_text("raise OSError('broken')\n")
        report = self.collect(PYTHONPATH=str(tmp_path))
        assert "\nupstream: OSError: broken\n" in report
        assert "\npython: CPython 3." in report

    def test_shows_our_variables_and_no_secret(self) -> None:
        printed = self.collect(VLLM_API_KEY="s3cret", VLLM_ASCEND_KVEXT_MODE="strict")
        assert "VLLM_ASCEND_KVEXT_MODE: strict" in printed
        assert "VLLM_API_KEY" in printed
        assert "s3cret" not in printed


def test_help_lists_commands_and_every_command_explains_itself(
    capsys: pytest.CaptureFixture[str],
) -> None:
    commands = ("status", "collect-env", "fingerprint", "check-model", "replay")
    asked = {"": commands} | {name: (f"vllm_ascend_kvext {name}",) for name in commands}
    for command, texts in asked.items():
        with pytest.raises(SystemExit) as exited:
            main([*command.split(), "--help"])
        printed = capsys.readouterr().out
        assert exited.value.code == 0 and all(text in printed for text in texts)
