# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts plans in a new process, and reads the report."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.scenarios.answers import Served
from support.upstream_version import IS_SINCE_0_30

sys.path.append(str(Path(__file__).parents[3] / "tools"))

import preloaded

INTERVAL = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"
PLUGIN_OFF = {"VLLM_ASCEND_KVEXT_MODE": "off"}
ADAPTIVE = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
TWO_CPUS = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""The variables of an engine with two workers."""
NO_PREFIX_CACHING = {"enable_prefix_caching": False}
DENSE: Mapping[str, Any] = {"prefix_cache_retention_interval": None} if IS_SINCE_0_30 else {}
"""The argument of an engine that caches every block. By default, vLLM 0.30 does not."""

RUNNER = "KVEXT_RUNNER"
IS_V2_RUNNER = os.environ.get(RUNNER) == "v2"
"""Whether engines use vLLM's V2 model runner. This is chosen for all tests of a process."""

ENGINE_ENVIRON = {
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "INFO",
}
if IS_V2_RUNNER:
    ENGINE_ENVIRON |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
_MAX_S = 1800
"""The maximum time of a process. pytest's own limit is smaller, unless it is raised."""


@dataclass(frozen=True)
class Platform:
    """A platform for engines, with its default block size.

    The interpreter of the tests runs the engines, with ``flags``.
    """

    block_tokens: int
    flags: Sequence[str]
    environ: Mapping[str, str]


CPU = Platform(32 if IS_SINCE_0_30 else 16, ("-I",), ENGINE_ENVIRON)
"""The CPU, with the smallest block size that this vLLM supports on it."""
NPU = Platform(
    128,  # vLLM-Ascend supports no other block size for most models.
    (),
    ENGINE_ENVIRON
    | {
        # With a seed of late streams, sets must always have the same order.
        "PYTHONHASHSEED": "0",
        # With this variable, each process would compile everything that it imports.
        "PYTHONDONTWRITEBYTECODE": "",
        # Models with graphs are of vLLM's mode with compilation, which is turned off above.
        "VLLM_USE_AOT_COMPILE": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
    },
)
"""The emulated NPU."""


@dataclass(frozen=True)
class Plan:
    """An engine, and what it is asked.

    Attributes:
        model: The folder of the model, or a function that makes it.
        module: A module of this package. It has the scenarios and the engine for them.
        engine: ``LLM`` arguments, in addition to the common ones.
        options: Options for the scenarios; see the module.
    """

    model: Path | Callable[[], Path]
    scenarios: Sequence[str]
    module: str = "connector"
    engine: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def on(self, platform: Platform) -> dict[str, Any]:
        """The plan as JSON data."""
        return {
            "module": self.module,
            "model": str(self.model() if callable(self.model) else self.model),
            "scenarios": list(self.scenarios),
            "engine": {"block_size": platform.block_tokens, **self.engine},
            **self.options,
        }

    @property
    def num_devices(self) -> int:
        sizes = ("tensor_parallel_size", "data_parallel_size")
        return int(self.engine.get(sizes[0], 1)) * int(self.engine.get(sizes[1], 1))


def connector(**extra: Any) -> dict[str, Any]:
    """The arguments of an engine with a KvextConnector, which has common and further options."""
    return {
        "kv_transfer_config": {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_memory_gib": 0.125,
                "chunk_tokens": 128,
                "load_if_slower": True,
                **extra,
            },
        },
    }


def blending(**extra: Any) -> dict[str, Any]:
    """The same arguments, but segments may be reused approximately, and nothing else is stored.

    Args:
        extra: Options of segments.
    """
    return connector(store_policy="never", segments={"selector": "heads", **extra})


class Reports(dict[str, Served]):
    """Reports by the name of a plan. A failed plan fails the test that asks for its report."""

    def __getitem__(self, name: str) -> Served:
        served = super().__getitem__(name)
        if "error" in served.report:
            pytest.fail(f"{name}: {served.report['error']}\n{served.log[-3000:]}")
        return served


class LazyReports(Mapping[str, Served]):
    """Reports of several processes. Each process starts when one of its reports is asked for.

    A process is given by environment variables and its plans. No two plans have the same name.
    """

    def __init__(
        self,
        folders: pytest.TempPathFactory,
        processes: Iterable[tuple[Mapping[str, str], Mapping[str, Plan]]],
        platform: Platform = CPU,
    ) -> None:
        self._folders = folders
        self._platform = platform
        self._process_of = {name: (env, plans) for env, plans in processes for name in plans}
        self._reports = Reports()

    def __getitem__(self, name: str) -> Served:
        if name not in self._reports:
            environ, plans = self._process_of[name]
            self._reports.update(serve(self._folders, plans, environ, self._platform))
        return self._reports[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._process_of)

    def __len__(self) -> int:
        return len(self._process_of)


def serve(
    folders: pytest.TempPathFactory,
    plans: Mapping[str, Plan],
    environ: Mapping[str, str],
    platform: Platform = CPU,
    working_folder: Path | None = None,
) -> Reports:
    """Serve plans in one process, one after the other. Return their reports by name."""
    folder = folders.mktemp("plans")
    report_path = folder / "report.json"
    plans_path = folder / "plans.json"
    plans_path.write_text(json.dumps({name: plan.on(platform) for name, plan in plans.items()}))
    devices = str(max(plan.num_devices for plan in plans.values()))
    ended = run(
        Path(__file__).with_name("serve.py"),
        [str(report_path), str(plans_path)],
        {"EMULATED_NPU_DEVICES": devices, **environ},
        platform,
        working_folder,
    )
    if ended.exit_code:
        error = f"exit code {ended.exit_code} with {environ}:\n{ended.log[-6000:]}"
        reports = {name: {"error": error} for name in plans}
    else:
        reports = json.loads(report_path.read_text())
    return Reports({name: Served(report, ended.log) for name, report in reports.items()})


class Ended(NamedTuple):
    """The exit code of a process, and its output."""

    exit_code: int
    log: str


def run(
    script: Path,
    arguments: Sequence[str],
    environ: Mapping[str, str],
    platform: Platform = CPU,
    working_folder: Path | None = None,
) -> Ended:
    """Run a script to its end.

    Of the variables of this package, it gets only those in ``environ``.
    """
    inherited = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("VLLM_ASCEND_KVEXT_", "VLLM_PREFIX_CACHE_"))
    }
    environ = {**inherited, **platform.environ, **environ}
    # With the V2 runner, Triton is imported otherwise.
    is_preloaded = environ.get("VLLM_USE_V2_MODEL_RUNNER") != "1"
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        program = preloaded.Program(
            [str(script), *arguments],
            environ,
            str(working_folder or Path.cwd()),
            log.name,
        )
        interpreter = (sys.executable, *platform.flags)
        socket = os.environ.get(preloaded.VARIABLE) if is_preloaded else None
        exit_code = preloaded.run_either_way(program, _MAX_S, interpreter, socket)
        return Ended(exit_code, log.read())
