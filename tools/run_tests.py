# SPDX-License-Identifier: Apache-2.0
"""Run every test suite in its environment, one per processor core, and add up the results.

A suite is one pytest process: some paths, an interpreter, environment variables. A suite that
fails does not stop the others. What a suite prints is shown when it has ended.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "out" / "tests"


@dataclass(frozen=True)
class Suite:
    """Paths below tests/, and where to run them."""

    name: str
    environment: str
    paths: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Result:
    """What pytest counted."""

    passed: int
    failed: int
    skipped: int
    duration_s: float

    @property
    def is_green(self) -> bool:
        return self.passed > 0 and self.failed == 0


def suites(upstreams: list[str], pythons: list[str]) -> Iterator[Suite]:
    """Fast suites first.

    Args:
        upstreams: ``<vLLM version>:<vLLM-Ascend version>`` each.
        pythons: Versions, such as ``3.12``, that have an environment without vLLM.
    """
    main_vllm, _, main_ascend = upstreams[0].partition(":")
    main_environment = f"vllm-{main_vllm}"
    for python in pythons:
        yield Suite(f"package alone, Python {python}", f"python-{python}", ("unit",))
    yield Suite("wheel", main_environment, ("packaging",))
    yield Suite("transfer op", main_environment, ("ops",), ascend_sources(main_ascend))
    for paths in (("unit", "contract"), ("ascend",), ("engine",)):
        for upstream in upstreams:
            vllm, _, ascend = upstream.partition(":")
            on = f"vLLM-Ascend {ascend} on vLLM {vllm}" if paths == ("ascend",) else f"vLLM {vllm}"
            name = f"{' and '.join(paths)}, {on}"
            yield Suite(name, f"vllm-{vllm}", paths, ascend_sources(ascend))


def ascend_sources(version: str) -> dict[str, str]:
    """The variable by which tests find vLLM-Ascend; without it they skip."""
    folder = ROOT / ".venv" / f"vllm-ascend-{version}"
    return {"KVEXT_ASCEND_SOURCES": str(folder)} if (folder / "vllm_ascend").is_dir() else {}


def run(suite: Suite) -> Result:
    """Run one suite."""
    report = REPORTS / (suite.name.replace(" ", "-").replace(",", "") + ".xml")
    report.unlink(missing_ok=True)
    # -I keeps the checkout, the user's packages and PYTHONPATH out: the installed package is
    # what is tested.
    command = [
        str(ROOT / ".venv" / suite.environment / "bin" / "python"),
        *("-I", "-m", "pytest", "--quiet"),
        *(f"--junitxml={report}", "--override-ini=junit_family=xunit1"),
        *(str(ROOT / "tests" / path) for path in suite.paths),
    ]
    started_s = time.monotonic()
    # Not in the checkout, so that neither do the processes which tests start import from it.
    # Two releases of vLLM that share a cache overwrite what the other one has found out about a
    # model, and every engine that starts finds it out again.
    cache = {"VLLM_CACHE_ROOT": str(ROOT / "out" / "cache" / suite.environment)}
    finished = subprocess.run(
        command,
        cwd=REPORTS,
        env={"OMP_NUM_THREADS": "1", **os.environ, **cache, **suite.variables},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    print(f"\n=== {suite.name}\n{finished.stdout}", flush=True)
    return read_report(report, finished.returncode, time.monotonic() - started_s)


def read_report(report: Path, exit_code: int, duration_s: float) -> Result:
    """Count from pytest's report; a suite that ended badly counts at least one failure."""
    if not report.exists():
        return Result(0, 1, 0, duration_s)
    counts = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for element in ElementTree.parse(report).iter("testsuite"):
        for name in counts:
            counts[name] += int(element.get(name, 0))
    failed = counts["failures"] + counts["errors"]
    passed = counts["tests"] - failed - counts["skipped"]
    all_skipped = exit_code == 0 or counts["skipped"] == counts["tests"] > 0
    return Result(passed, failed or int(not all_skipped), counts["skipped"], duration_s)


def print_totals(results: dict[str, Result]) -> None:
    """One line per suite, then the sum."""
    print("\n=== totals")
    lines = {
        **results,
        "all": Result(
            *(
                sum(getattr(result, name) for result in results.values())
                for name in ("passed", "failed", "skipped", "duration_s")
            )
        ),
    }
    for name, result in lines.items():
        print(
            f"{name:40} {result.passed:6} passed {result.failed:4} failed "
            f"{result.skipped:4} skipped {result.duration_s:6.0f} s"
        )
    # On a line of its own, in the words of pytest.
    total = lines["all"]
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream", action="append", default=[], metavar="VLLM:ASCEND")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION")
    parser.add_argument("--only", default="", help="suites whose name contains this text")
    options = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in suites(options.upstream, options.python) if options.only in s.name]
    # The longest come last in the table and first here, so that no core waits for one at the end.
    with ThreadPoolExecutor(max_workers=min(4, os.cpu_count() or 1)) as executor:
        running = {suite.name: executor.submit(run, suite) for suite in reversed(chosen)}
    results = {suite.name: running[suite.name].result() for suite in chosen}
    print_totals(results)
    return 0 if results and all(result.is_green for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
