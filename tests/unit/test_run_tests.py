# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""`tools/run_tests.py` runs every test file, each in one process per version."""

from __future__ import annotations

import ast
import importlib
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]
UPSTREAMS = ["2.0:2.0", "1.0:1.0rc1"]


@pytest.fixture
def run_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(TESTS.parent / "tools")
    return importlib.import_module("run_tests")


def files_of(paths: tuple[str, ...]) -> list[Path]:
    """The test files that pytest finds for some paths below tests/."""
    found = []
    for path in paths:
        whole = TESTS / path.partition("::")[0]
        assert whole.exists(), f"{path} is named in tools/run_tests.py, but does not exist"
        found += sorted(whole.rglob("test_*.py")) if whole.is_dir() else [whole]
    return found


@pytest.fixture
def with_ascend(run_tests: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`tools/run_tests.py`, with the sources of vLLM-Ascend present."""
    monkeypatch.setattr(run_tests, "ascend_sources", lambda version: {"KVEXT_ASCEND_SOURCES": "x"})
    return run_tests


def test_every_test_file_runs_once_on_the_main_version(with_ascend: ModuleType) -> None:
    run_tests = with_ascend
    runs = Counter(
        file
        for suite in run_tests.suites(UPSTREAMS, pythons=[])
        if suite.environment == "vllm-2.0" and not suite.name.startswith("managers, ")
        for file in files_of(suite.paths)
    )
    for suite in run_tests.emulated_npu_suites(UPSTREAMS):
        if suite.environment == "emulated-npu-2.0":
            runs.update(files_of(suite.paths))
    elsewhere = {TESTS / "emulated_npu" / file for file in run_tests.NOT_ON_MAIN_EMULATED_NPU}
    assert runs == Counter({*TESTS.rglob("test_*.py")} - elsewhere)


def test_no_suite_of_the_main_release_consists_of_files_that_skip_there(
    run_tests: ModuleType,
) -> None:
    """A suite in which nothing runs fails `make test`."""
    skipped = set()
    for file in (TESTS / "emulated_npu").glob("test_*.py"):
        for statement in ast.parse(file.read_text()).body:
            text = ast.unparse(statement)
            if text.startswith("pytestmark = ") and "skipif(IS_0_23" in text:
                skipped.add(file.name)
    assert skipped == set(run_tests.NOT_ON_MAIN_EMULATED_NPU)
    assert skipped <= set(run_tests.ON_OTHER_EMULATED_NPUS)


def test_what_runs_on_aarch64_imports_no_vllm(run_tests: ModuleType) -> None:
    """There is none for the emulated environment. One file that wants it ends the whole suite."""
    files = files_of(run_tests.OPS_ON_AARCH64)
    wanting = [path.name for path in files if "vllm" in imported_at_once(path, set())]
    assert not wanting


def imported_at_once(path: Path, seen: set[Path]) -> set[str]:
    """The packages that a file of tests/ imports when it is imported, also through `support`."""
    packages: set[str] = set()
    seen.add(path)
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.ImportFrom):
            names = [f"{statement.module}.{each.name}" for each in statement.names]
        elif isinstance(statement, ast.Import):
            names = [each.name for each in statement.names]
        else:
            continue
        for name in names:
            packages.add(name.partition(".")[0])
            module = TESTS / name.replace(".", "/")
            for file in (module.with_suffix(".py"), module.parent.with_suffix(".py")):
                if name.startswith("support.") and file.is_file() and file not in seen:
                    packages |= imported_at_once(file, seen)
    return packages


def test_totals_name_a_suite_in_which_nothing_ran(
    run_tests: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"first": run_tests.Result(1, 0, 0, 1.0), "second": run_tests.Result(0, 0, 2, 1.0)}
    assert [result.is_green for result in results.values()] == [True, False]
    run_tests.print_totals(results, 2.0, 1)
    *_, named, last = capsys.readouterr().out.splitlines()
    assert named.startswith("second: no test ran")
    assert last == "1 passed, 0 failed, 2 skipped"


def test_make_test_starts_some_lines_on_the_emulated_npu_of_every_release(
    run_tests: ModuleType,
) -> None:
    """For other releases than the main one, all settings start there, too, and nothing else.

    An engine of the main vLLM starts the settings on a CPU.
    """
    files: dict[str, set[str]] = {}
    for suite in run_tests.emulated_npu_suites(UPSTREAMS, is_sample=True):
        assert suite.paths and suite.variables == run_tests.SAMPLE
        files.setdefault(suite.environment, set()).update(suite.paths)
    settings, lines = (
        f"emulated_npu/test_{name}.py" for name in ("settings_start", "official_lines")
    )
    assert files["emulated-npu-1.0rc1"] == {settings, lines}
    assert files["emulated-npu-2.0"] > {lines} and settings not in files["emulated-npu-2.0"]
    everything = run_tests.emulated_npu_suites(UPSTREAMS)
    assert [settings in suite.paths for suite in everything].count(True) == len(UPSTREAMS)


def test_what_both_families_of_managers_have_runs_on_each(with_ascend: ModuleType) -> None:
    files: dict[bool, set[Path]] = {True: set(), False: set()}
    for suite in with_ascend.suites(UPSTREAMS, pythons=[]):
        is_ascend = suite.variables.get("KVEXT_MANAGERS") == "ascend"
        files[is_ascend] |= set(files_of(suite.paths))
    shared = set(files_of(with_ascend.ON_ASCENDS_MANAGERS))
    assert files[True] & files[False] == shared
    assert files[True] - shared == set((TESTS / "ascend").rglob("test_*.py"))


def test_on_every_version_the_levels_that_need_vllm_run_and_on_all_but_one_as_a_sample(
    with_ascend: ModuleType,
) -> None:
    suites = list(with_ascend.suites(UPSTREAMS, pythons=["3.12"]))
    needing = {file for level in ("contract", "engine", "ascend") for file in files_of((level,))}
    elsewhere = {TESTS / file for file in with_ascend.NOT_ON_OTHER_VLLMS}
    for environment, files in (("vllm-2.0", needing), ("vllm-1.0", needing - elsewhere)):
        own = [suite for suite in suites if suite.environment == environment]
        assert files <= {file for suite in own for file in files_of(suite.paths)}
    assert [suite.paths for suite in suites if suite.environment == "python-3.12"] == [("unit",)]
    for suite in suites:
        is_sample = suite.variables.get("KVEXT_TESTS") == "sample"
        is_again = suite.environment == "vllm-1.0" or suite.name.startswith("managers")
        assert is_sample == is_again, suite.name


def test_what_has_run_without_torch_does_not_run_again_with_it(run_tests: ModuleType) -> None:
    here = "{}.{}".format(*sys.version_info)
    suites = run_tests.suites(UPSTREAMS, pythons=[here])
    unit = [suite for suite in suites if suite.paths[0].startswith("unit")]
    assert [suite.environment for suite in unit] == [f"python-{here}", "vllm-2.0"]
    assert unit[0].paths == ("unit",)
    reasons = ("importorskip" + '("torch")', "support.mooncake " + "import")
    needing = {
        file
        for file in files_of(("unit",))
        if any(reason in file.read_text() for reason in reasons)
    }
    assert {*files_of(unit[1].paths)} == needing


def test_the_checks_are_a_part_of_all_tests_on_the_main_version(run_tests: ModuleType) -> None:
    """No two suites write to the same report."""
    checks = list(run_tests.checks(UPSTREAMS))
    suites = [*run_tests.suites(UPSTREAMS, pythons=["3.12"]), *checks]
    assert len({suite.report for suite in suites}) == len(suites)
    assert {suite.environment for suite in checks} == {"vllm-2.0"}
    files = [file for suite in checks for file in files_of(suite.paths)]
    assert len(files) == len(set(files))
    assert set((TESTS / "unit").rglob("test_*.py")) < set(files)


def test_lmcache_has_suites_where_it_has_an_environment(
    run_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    assert not list(run_tests.lmcache_suites(UPSTREAMS, "3.0"))
    for name in ("lmcache-3.0-vllm-1.0", "lmcache-3.0-vllm-9.0", "lmcache-4.0"):
        (tmp_path / ".venv" / name).mkdir(parents=True)
        (tmp_path / ".venv" / name / ".package").touch()
    suites = list(run_tests.lmcache_suites(UPSTREAMS, "3.0"))
    assert {suite.environment for suite in suites} == {"lmcache-3.0-vllm-1.0"}
    for suite in suites:
        (path,) = suite.paths
        assert files_of((path,)) == [TESTS / path]
        assert "lmcache" in (TESTS / path).read_text()
