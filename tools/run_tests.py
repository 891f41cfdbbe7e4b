# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Run every test suite in its environment, one per processor core, and add up the results.

A suite is one pytest process with paths, an interpreter and environment variables. A long folder is
divided into several suites. The suites that took longest in the last run start first, so that all
cores are busy to the end. A suite that fails does not stop the others. Its output is shown when it
has ended.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parent))  # The flag -I leaves this folder out.

import preloaded

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "out" / "tests"


TESTS = ROOT / "tests"

NOT_IN_SAMPLE = (
    "test_compressed_attention.py",
    "test_data_parallel.py",
    "test_decoding_beside_stores.py",
    "test_demo.py",
    "test_fine_states.py",
    "test_kernel_or_dma.py",
    "test_kimi_states.py",
    "test_late_graphs.py",
    "test_official_answers.py",
    "test_prefill_decode.py",
    "test_quantization.py",
    "test_serve_lines.py",
    "test_settings_start.py",
    "test_several_connectors.py",
    "test_shared_tier.py",
    "test_state_drafts.py",
    "test_state_hits.py",
    "test_state_repairs.py",
    "test_state_steps.py",
)
"""The files of `tests/emulated_npu` that take minutes. With the main release, only `make
test-ascend` runs them."""

EMULATED_NPU = "emulated-npu-"
"""What the names of the environments with an emulated NPU begin with."""

AARCH64_COMPILER = ROOT / ".venv" / "wheels" / "build" / "compiler-aarch64" / "c++"
"""The compiler of this machine that makes programs for aarch64, for modules that tests compile."""

OPS_ON_AARCH64 = (
    "ops/test_attention_keys.py",
    "ops/test_batched_dma.py",
    "ops/test_device_token_pages.py",
    "ops/test_key_rotation.py",
    "ops/test_page_transfer.py",
    "ops/test_threads.py",
    "ops/test_validation.py",
    "ops/test_worker_segments.py",
)
"""The files of `tests/ops` that need neither vLLM nor a compiler for the machine that they test."""

MAX_SUITE_S = 2400
"""The longest time of a suite. A slower suite hangs outside its tests, where pytest-timeout does
not apply."""

MAX_EMULATED_S = 3 * MAX_SUITE_S
"""The longest time of a suite whose programs qemu runs."""

LONG_ENGINE_FILES = (
    ("test_connector_serve.py",),
    ("test_serve_lines.py",),
    ("test_fast_prefix_cache.py",),
    ("test_hits_of_repairs.py",),
    ("test_shared_tier_engine.py", "test_shared_tier.py"),
    ("test_shared_tier_mooncake.py", "test_shared_tier_mooncake_engine.py"),
    ("test_repairs_of_states.py", "test_state_models.py", "test_state_requests.py"),
    ("test_connector_engine.py", "test_blending_engine.py", "test_question_engine.py"),
    (
        "test_connector_scheduler.py",
        "test_failed_loads.py",
        "test_metrics.py",
        "test_request_machine.py",
    ),
    (
        "test_reachability.py",
        "test_repairs.py",
        "test_retention_scheduler.py",
        "test_scheduler_differential.py",
    ),
)
"""The files of `tests/engine` that take long. Each row is one process, so that all cores are busy
to the end. Files share a process, because an import of vLLM takes a core ten seconds."""

ON_ASCENDS_MANAGERS = (
    "engine/test_aligned_steps.py",
    "engine/test_bound_methods.py",
    "engine/test_failed_loads.py::test_outputs_are_those_of_a_run_without_failures",
    "engine/test_fast_prefix_cache.py",
    "engine/test_hits_of_repairs.py",
    "engine/test_least_prompt.py",
    "engine/test_reachability.py",
    "engine/test_repairs.py",
    "engine/test_retention_scheduler.py",
)
"""The tests that run once more with the managers of vLLM-Ascend."""

NOT_ON_OTHER_VLLMS = ("engine/test_serve_lines.py",)
"""The files that run with the main vLLM only, because they need its servers."""

QUICK_ON_EMULATED_NPU = (
    "test_backend.py",
    "test_compressed_attention_operators.py",
    "test_graphs.py",
    "test_host_memory.py",
    "test_operators.py",
    "test_quantized_operators.py",
    "test_streams.py",
)
"""The files of `tests/emulated_npu` that start no engine. They share a process."""

ON_OTHER_EMULATED_NPUS = (
    "test_backend.py",
    "test_blending.py",
    "test_compressed_attention.py",
    "test_compressed_attention_operators.py",
    "test_decoding_beside_stores.py",
    "test_features.py",
    "test_fine_states.py",
    "test_graphs.py",
    "test_kimi_states.py",
    "test_late_graphs.py",
    "test_models.py",
    "test_official_answers.py",
    "test_official_lines.py",
    "test_operators.py",
    "test_prefill_decode.py",
    "test_quantization.py",
    "test_quantized_operators.py",
    "test_settings_start.py",
    "test_several_connectors.py",
    "test_state_drafts.py",
    "test_state_hits.py",
    "test_state_repairs.py",
    "test_states_beside_connectors.py",
    "test_states_inside_blocks.py",
    "test_state_steps.py",
    "test_upstream_reports_on_npu.py",
    "test_window_blocks.py",
)
"""The files of `tests/emulated_npu` that also run with other releases of vLLM-Ascend."""

IN_OTHER_SAMPLES = ("test_official_lines.py", "test_settings_start.py")
"""The files of `tests/emulated_npu` that `make test` runs with other releases than the main one."""

NOT_ON_MAIN_EMULATED_NPU = (
    "test_kimi_states.py",
    "test_late_graphs.py",
    "test_states_beside_connectors.py",
    "test_states_inside_blocks.py",
    "test_window_blocks.py",
)
"""The files about a model or a defect that only other releases have."""

ON_V2_RUNNER = (
    "engine/test_connector_engine.py",
    "engine/test_blending_engine.py",
    "engine/test_repairs_of_states.py",
    "engine/test_state_models.py",
)
"""The files that `make test-ascend` runs with vLLM's V2 model runner, on later versions."""

V2_RUNNER = {"KVEXT_RUNNER": "v2"}
"""The variable that selects the V2 runner, see `support.scenarios.processes`."""

COMPARED_SOURCES = (
    "contract/test_fingerprints.py::test_vllm_ascend_is_as_stored",
    "contract/test_ascend_rotary.py",
)
"""The tests that compare the sources of vLLM-Ascend with what this package relies on."""

LMCACHE_FILES = (
    ("ascend", "test_lmcache_slices_on_ascend.py"),
    ("engine", "test_lmcache_engine.py"),
    ("engine", "test_serve_lines.py"),
)
"""The folders and files of the tests that need LMCache."""

ASCENDS_MANAGERS = {"KVEXT_MANAGERS": "ascend"}
"""The variable that applies vLLM-Ascend's patches to the process for good, see `support.family`."""

SAMPLE = {"KVEXT_TESTS": "sample"}
"""The variable that leaves out tests that say little about the version, see `support.sample`."""

LONG = {"KVEXT_CASES": "all"}
"""The variable that selects every test and all random cases, see `support.sample`."""

UNIT_WITH_TORCH = (
    "unit/connector/test_host_buffer.py",
    "unit/connector/test_memory_node.py",
    "unit/connector/test_question_probe.py",
    "unit/connector/test_secondary_tier.py",
    "unit/connector/test_shared_arena.py",
    "unit/connector/test_worker_side.py",
    "unit/shared_tier/test_backends.py",
    "unit/shared_tier/test_mooncake.py",
    "unit/transfer/test_compute_fence.py",
)
"""The files of `tests/unit` that skip tests if there is no torch or no Mooncake."""

CHECKED_SAMPLE = (
    "engine/test_patching.py::test_status_of_the_real_vllm_with_retention_requested",
    "engine/test_retention_scheduler.py::test_windows_outlive_drafts_in_flight",
    "ops/test_page_transfer.py",
)
"""The tests that need vLLM and that `make check` runs."""


@dataclass(frozen=True)
class Suite:
    """Paths below tests/, and the environment in which they run."""

    name: str
    environment: str
    paths: tuple[str, ...]
    variables: dict[str, str] = field(default_factory=dict)
    max_s: float = MAX_SUITE_S

    @property
    def imports_vllm(self) -> bool:
        """Whether `preloaded` saves time."""
        folders = ("ascend/", "benchmarks/", "emulated_npu/", "engine/")
        environments = ("vllm-", EMULATED_NPU)
        return self.environment.startswith(environments) and f"{self.paths[0]}/".startswith(folders)

    @property
    def flags(self) -> Sequence[str]:
        """The flags of the interpreter. With a seed of late streams, sets need the same order."""
        is_emulated = self.environment.startswith(EMULATED_NPU)
        return preloaded.HASHED_ALIKE if is_emulated else preloaded.ISOLATED

    @property
    def report(self) -> Path:
        """The path of pytest's report of the last run. It may not exist."""
        return REPORTS / (re.sub(r"[^A-Za-z0-9.]+", "-", self.name) + ".xml")


@dataclass(frozen=True)
class Result:
    """The counts of pytest."""

    passed: int
    failed: int
    skipped: int
    duration_s: float

    @property
    def is_empty(self) -> bool:
        """Whether no test ran. A suite that checks nothing is as bad as one that fails."""
        return self.passed == self.failed == 0

    @property
    def is_green(self) -> bool:
        return self.failed == 0 and not self.is_empty


def suites(
    upstreams: list[str], pythons: list[str], compared_ascends: Sequence[str] = ()
) -> Iterator[Suite]:
    """Every test on the main version, and on other versions the tests that differ there.

    Short suites come first.

    Args:
        upstreams: Pairs ``<vLLM version>:<vLLM-Ascend version>``; the first pair is the main one.
        pythons: Versions of Python, such as ``3.12``, that have an environment without vLLM.
        compared_ascends: Versions of vLLM-Ascend for the main vLLM whose functions are only
            compared with the stored fingerprints.
    """
    main_vllm, _, main_ascend = upstreams[0].partition(":")
    main_environment = f"vllm-{main_vllm}"
    for python in pythons:
        yield Suite(f"package alone, Python {python}", f"python-{python}", ("unit",))
    yield Suite("wheel", main_environment, ("packaging",))
    yield Suite("benchmarks", main_environment, ("benchmarks",))
    yield Suite("transfer op", main_environment, ("ops",), ascend_sources(main_ascend))
    is_alone = "{}.{}".format(*sys.version_info) in pythons
    unit = UNIT_WITH_TORCH if is_alone else ("unit",)
    yield Suite(f"unit, vLLM {main_vllm}", main_environment, unit)
    for ascend in compared_ascends:
        sources = ascend_sources(ascend)
        yield Suite(f"vLLM-Ascend {ascend}: sources", main_environment, COMPARED_SOURCES, sources)
    for folder in ("contract", "ascend", "engine"):
        for upstream in upstreams:
            vllm, _, ascend = upstream.partition(":")
            on = f"vLLM-Ascend {ascend} on vLLM {vllm}" if folder == "ascend" else f"vLLM {vllm}"
            variables = ascend_sources(ascend) | ({} if vllm == main_vllm else SAMPLE)
            chosen: list[Suite] = []
            if folder == "ascend":
                if not ascend_sources(ascend):
                    continue  # There is no vLLM-Ascend for this Python.
                variables |= ASCENDS_MANAGERS
                environ = variables | SAMPLE
                chosen.append(
                    Suite(f"managers, {on}", f"vllm-{vllm}", ON_ASCENDS_MANAGERS, environ)
                )
            whole = Suite(f"{folder}, {on}", f"vllm-{vllm}", (folder,), variables)
            chosen += engine_rows(whole) if folder == "engine" else [whole]
            left_out = () if vllm == main_vllm else NOT_ON_OTHER_VLLMS
            for suite in chosen:
                paths = tuple(path for path in suite.paths if path not in left_out)
                if paths:
                    yield replace(suite, paths=paths)


def lmcache_suites(upstreams: list[str], version: str) -> Iterator[Suite]:
    """The tests that need LMCache and its server, for each vLLM that has an environment with it.

    ``make test-lmcache`` makes these environments. Without them, the files skip in other suites.

    Args:
        upstreams: See `suites`.
        version: The version of LMCache.
    """
    for number, upstream in enumerate(upstreams):
        vllm, _, ascend = upstream.partition(":")
        environment = f"lmcache-{version}" + (f"-vllm-{vllm}" if number else "")
        if not (ROOT / ".venv" / environment / ".package").exists():
            continue
        on = f"LMCache {version}, vLLM {vllm}"
        for folder, file in LMCACHE_FILES:
            variables = ascend_sources(ascend) | (ASCENDS_MANAGERS if folder == "ascend" else {})
            yield Suite(f"{on}: {folder}", environment, (f"{folder}/{file}",), variables)


def v2_runner_suites(upstreams: list[str]) -> Iterator[Suite]:
    """The tests that run once more with vLLM's V2 model runner. Arguments: see `suites`."""
    for upstream in upstreams[1:]:
        vllm = upstream.partition(":")[0]
        for path in ON_V2_RUNNER:
            name = f"engine, vLLM {vllm}, V2 runner: {Path(path).stem.removeprefix('test_')}"
            yield Suite(name, f"vllm-{vllm}", (path,), SAMPLE | V2_RUNNER)


def emulated_npu_suites(upstreams: list[str], is_sample: bool = False) -> Iterator[Suite]:
    """The tests of the whole vLLM-Ascend. Each file that starts engines has its own process.

    Args:
        upstreams: See `suites`.
        is_sample: Whether to take only the files for which `make test` has time. `make test-ascend`
            runs all files.
    """
    for upstream in upstreams:
        ascend = upstream.rpartition(":")[2]
        is_main = upstream == upstreams[0]
        files = []
        for file in sorted(path.name for path in (TESTS / "emulated_npu").glob("test_*.py")):
            if is_main:
                is_elsewhere = file in NOT_ON_MAIN_EMULATED_NPU
                is_left_out = file in NOT_IN_SAMPLE
            else:
                is_elsewhere = file not in ON_OTHER_EMULATED_NPUS
                is_left_out = file not in IN_OTHER_SAMPLES
            if not is_elsewhere and not (is_sample and is_left_out):
                files.append(file)
        quick = tuple(file for file in files if file in QUICK_ON_EMULATED_NPU)
        rows = [quick, *((file,) for file in files if file not in quick)]
        for row in filter(None, rows):
            name = row[-1].removeprefix("test_").removesuffix(".py")
            yield Suite(
                f"vLLM-Ascend {ascend} on the emulated NPU: {name}",
                f"{EMULATED_NPU}{ascend}",
                tuple(f"emulated_npu/{file}" for file in row),
                SAMPLE if is_sample else {},
            )


def aarch64_suites() -> Iterator[Suite]:
    """The tests that need no vLLM, in the emulated environment of ``make test-aarch64``."""
    variables = {"CXX": str(AARCH64_COMPILER), "QEMU_CPU": "neoverse-n1"}
    yield Suite("unit, aarch64", "aarch64", ("unit",), variables, MAX_EMULATED_S)
    yield Suite("transfer op, aarch64", "aarch64", OPS_ON_AARCH64, variables, MAX_EMULATED_S)


def checks(upstreams: list[str]) -> Iterator[Suite]:
    """The tests to run after every change: a part of `suites` on the main version.

    Short suites come first.
    """
    main_vllm, _, main_ascend = upstreams[0].partition(":")
    environment = f"vllm-{main_vllm}"
    variables = ascend_sources(main_ascend)
    yield Suite("contract", environment, ("contract",), variables)
    # The tests with Mooncake's servers take 40 s, and wait most of the time.
    servers = TESTS / "unit" / "shared_tier" / "test_mooncake.py"
    without_servers = {"PYTEST_ADDOPTS": f"--ignore={servers}"}
    yield Suite("unit", environment, ("unit",), variables | without_servers)
    yield Suite("sample of engine and transfers", environment, CHECKED_SAMPLE, variables)


def engine_rows(suite: Suite) -> Iterator[Suite]:
    """Divide the suite of `tests/engine`: one suite per row of long files, and one for the rest."""
    rest = {file.name for file in (TESTS / "engine").glob("test_*.py")}
    for row in LONG_ENGINE_FILES:
        rest -= {*row}
        name = f"{suite.name}: {row[0].removeprefix('test_').removesuffix('.py')}"
        yield replace(suite, name=name, paths=tuple(f"engine/{file}" for file in row))
    yield replace(suite, paths=tuple(f"engine/{file}" for file in sorted(rest)))


def longest_first(chosen: list[Suite]) -> list[Suite]:
    """Sort suites by the duration in the last run's reports, the longest first.

    Suites without a report come before all others, in reversed order.
    """

    def last_duration_s(suite: Suite) -> float:
        if not suite.report.exists():
            return math.inf
        elements = ElementTree.parse(suite.report).iter("testsuite")
        return sum(float(element.get("time", 0)) for element in elements)

    return sorted(reversed(chosen), key=last_duration_s, reverse=True)


def ascend_sources(version: str) -> dict[str, str]:
    """The variable with the sources of vLLM-Ascend. Tests that need them skip without it."""
    folder = ROOT / ".venv" / f"vllm-ascend-{version}"
    return {"KVEXT_ASCEND_SOURCES": str(folder)} if (folder / "vllm_ascend").is_dir() else {}


def run(suite: Suite, sockets: Mapping[str, str]) -> Result:
    """Run one suite.

    Args:
        suite: The suite.
        sockets: The sockets of `preloaded`, by environment.
    """
    report = suite.report
    report.unlink(missing_ok=True)
    pytest = [
        "-m",
        "pytest",
        "--quiet",
        f"--junitxml={report}",
        "--override-ini=junit_family=xunit1",
        *(str(TESTS / path) for path in suite.paths),
    ]
    started_s = time.monotonic()
    # Each release has its own cache. Two releases of vLLM in one cache would overwrite each other's
    # results of inspecting a model, and every engine would inspect the model again.
    cache = {"VLLM_CACHE_ROOT": str(ROOT / "out" / "cache" / suite.environment)}
    environ = {**preloaded.ENVIRON, **os.environ, **cache, **suite.variables}
    # The output goes to a file, because a child that outlives the suite would keep a pipe open.
    log = report.with_suffix(".txt")
    socket = sockets.get(suite.environment) if suite.imports_vllm else None
    if socket is not None:
        environ[preloaded.VARIABLE] = socket
    # The suite does not run in the checkout, so that processes of tests do not import from it.
    program = preloaded.Program(pytest, environ, str(REPORTS), str(log))
    # The flags leave out the checkout, the user's packages and PYTHONPATH, so that the installed
    # package is tested.
    environ.pop("PYTHONPATH", None)
    interpreter = (str(ROOT / ".venv" / suite.environment / "bin" / "python"), *suite.flags)
    try:
        exit_code = preloaded.run_either_way(program, suite.max_s, interpreter, socket)
    except (OSError, EOFError, subprocess.TimeoutExpired) as error:
        exit_code = 1
        with log.open("a") as output:
            output.write(f"\n{type(error).__name__}: {error}\n")
    duration_s = time.monotonic() - started_s
    text = log.read_text(errors="replace")
    print(f"\n=== {suite.name}: {duration_s:.0f} s\n{text}", flush=True)
    return read_report(report, exit_code, duration_s)


def read_report(report: Path, exit_code: int, duration_s: float) -> Result:
    """Read the counts of pytest's report. A suite that ended badly has at least one failure."""
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


def print_totals(results: dict[str, Result], duration_s: float, num_processes: int) -> None:
    """One line per suite, then the sum."""
    print("\n=== totals")
    width = max(map(len, results), default=0)
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
            f"{name:{width}} {result.passed:6} passed {result.failed:4} failed "
            f"{result.skipped:4} skipped {result.duration_s:6.0f} s"
        )
    total = lines["all"]
    busy = total.duration_s / (duration_s * num_processes)
    print(f"{duration_s:.0f} s, {num_processes} at a time, busy {busy:.0%} of the time")
    for name, result in results.items():
        if result.is_empty:
            print(f"{name}: no test ran, which fails the run; the suite has to leave out its files")
    # The last line has the form of pytest's own summary.
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--upstream", action="append", default=[], metavar="VLLM:ASCEND")
    parser.add_argument("--compared-ascend", action="append", default=[], metavar="VERSION")
    parser.add_argument("--python", action="append", default=[], metavar="VERSION")
    parser.add_argument("--lmcache", default="", metavar="VERSION")
    parser.add_argument("--check", action="store_true", help="the short selection of `make check`")
    parser.add_argument("--emulated-npu", action="store_true", help="what `make test-ascend` runs")
    parser.add_argument("--aarch64", action="store_true", help="what `make test-aarch64` runs")
    parser.add_argument("--long", action="store_true", help="what `make test-long` runs")
    parser.add_argument("--only", default="", help="suites whose name contains this text")
    options = parser.parse_args()
    REPORTS.mkdir(parents=True, exist_ok=True)
    if options.check:
        known = [*checks(options.upstream)]
    elif options.aarch64:
        known = [*aarch64_suites()]
    elif options.emulated_npu:
        known = [*emulated_npu_suites(options.upstream), *v2_runner_suites(options.upstream)]
    else:
        known = [*suites(options.upstream, options.python, options.compared_ascend)]
        known += lmcache_suites(options.upstream, options.lmcache)
        if options.long:
            known = [replace(suite, variables=suite.variables | LONG) for suite in known]
        known += emulated_npu_suites(options.upstream, is_sample=True)
    chosen = [suite for suite in known if options.only in suite.name]
    num_processes = min(4, os.cpu_count() or 1)
    started_s = time.monotonic()
    with ExitStack() as stack:
        sockets = {
            name: stack.enter_context(
                preloaded.served(
                    ROOT / ".venv" / name / "bin" / "python", REPORTS / f"{name}.txt", flags=flags
                )
            )
            for name, flags in {
                suite.environment: suite.flags for suite in chosen if suite.imports_vllm
            }.items()
        }
        executor = stack.enter_context(ThreadPoolExecutor(max_workers=num_processes))
        running = {
            suite.name: executor.submit(run, suite, sockets) for suite in longest_first(chosen)
        }
        try:
            results = {suite.name: running[suite.name].result() for suite in chosen}
        except KeyboardInterrupt:
            # The threads would wait for their suites. The suites end with their connections.
            os._exit(130)
    print_totals(results, time.monotonic() - started_s, num_processes)
    return 0 if results and all(result.is_green for result in results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
