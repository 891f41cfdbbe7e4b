# SPDX-License-Identifier: Apache-2.0
"""`tools/run_tests.py` runs every test file, each in one process per version."""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

TESTS = Path(__file__).parents[1]
UPSTREAMS = ["2.0:2.0", "1.0:1.0rc1"]


@pytest.fixture
def run_tests(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    path = TESTS.parent / "tools" / "run_tests.py"
    spec = importlib.util.spec_from_file_location("run_tests", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "run_tests", module)  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def files_of(paths: tuple[str, ...]) -> list[Path]:
    """The test files that pytest finds in some paths below tests/."""
    found = []
    for path in paths:
        whole = TESTS / path.partition("::")[0]
        assert whole.exists(), f"{path}: named in tools/run_tests.py, and not there"
        found += sorted(whole.rglob("test_*.py")) if whole.is_dir() else [whole]
    return found


def test_every_test_file_runs_once_on_the_main_version(run_tests: ModuleType) -> None:
    runs = Counter(
        file
        for suite in run_tests.suites(UPSTREAMS, pythons=[])
        if suite.environment == "vllm-2.0"
        for file in files_of(suite.paths)
    )
    for suite in run_tests.emulated_npu_suites(UPSTREAMS):
        runs.update(files_of(suite.paths))
    assert runs == Counter(TESTS.rglob("test_*.py"))


def test_the_levels_that_need_vllm_run_on_every_version(run_tests: ModuleType) -> None:
    suites = list(run_tests.suites(UPSTREAMS, pythons=["3.12"]))
    for level in ("contract", "engine", "ascend"):
        expected = set((TESTS / level).rglob("test_*.py"))
        for environment in ("vllm-2.0", "vllm-1.0"):
            own = [suite for suite in suites if suite.environment == environment]
            assert expected <= {file for suite in own for file in files_of(suite.paths)}
    assert [suite.paths for suite in suites if suite.environment == "python-3.12"] == [("unit",)]


def test_of_further_releases_of_vllm_ascend_the_sources_are_compared(
    run_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "ROOT", tmp_path)
    sources = tmp_path / ".venv" / "vllm-ascend-2.0.post1"
    (sources / "vllm_ascend").mkdir(parents=True)
    without, with_it = (list(run_tests.suites(UPSTREAMS, [], more)) for more in ([], ["2.0.post1"]))
    (suite,) = (suite for suite in with_it if suite not in without)
    assert suite.environment == "vllm-2.0"
    assert suite.variables == {"KVEXT_ASCEND_SOURCES": str(sources)}
    assert {file.parent for file in files_of(suite.paths)} == {TESTS / "contract"}


def test_all_but_the_main_version_run_a_sample(run_tests: ModuleType) -> None:
    for suite in run_tests.suites(UPSTREAMS, pythons=["3.12"]):
        is_sample = suite.variables.get("KVEXT_TESTS") == "sample"
        assert is_sample == (suite.environment != "vllm-2.0"), suite.name


def test_the_checks_are_a_part_of_all_tests_on_the_main_version(run_tests: ModuleType) -> None:
    checks = list(run_tests.checks(UPSTREAMS))
    assert {suite.environment for suite in checks} == {"vllm-2.0"}
    files = [file for suite in checks for file in files_of(suite.paths)]
    assert len(files) == len(set(files))
    assert set((TESTS / "unit").rglob("test_*.py")) < set(files)


def test_no_two_suites_share_a_report(run_tests: ModuleType) -> None:
    suites = [*run_tests.suites(UPSTREAMS, pythons=["3.12"]), *run_tests.checks(UPSTREAMS)]
    assert len({suite.report for suite in suites}) == len(suites)


def test_the_suite_that_took_longest_the_last_time_starts_first(
    run_tests: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_tests, "REPORTS", tmp_path)
    short, long, new = (run_tests.Suite(name, "", ()) for name in ("short", "long", "new"))
    for suite, duration_s in ((short, 1.5), (long, 20)):
        suite.report.write_text(f'<testsuites><testsuite time="{duration_s}"/></testsuites>')
    newer = run_tests.Suite("newer", "", ())
    assert run_tests.longest_first([short, new, long, newer]) == [newer, new, long, short]


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
