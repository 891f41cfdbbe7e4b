# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``check-model`` on the real engine: sound models, faults, and too little room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.processes import CPU, Plan, Reports

FULL, WINDOWS = "full", "one window"
ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", str(CPU.block_tokens)),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "1000"),
    *("--no-disable-hybrid-kv-cache-manager", "--distributed-executor-backend", "uni"),
)
EAGER = ("--enforce-eager",)
NOT_COMPILED = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}')
MAY, MAY_NOT = "Segments may be reused: ", "Segments are not to be reused"
IN_PLACE = "expected reuse in place to change them by at most 0.001"


def connector(**options: Any) -> tuple[str, str]:
    """The argument that hands options to the connector."""
    config = processes.connector()["kv_transfer_config"]
    return "--kv-transfer-config", json.dumps(config | {"kv_connector_extra_config": options})


class Run(NamedTuple):
    """A run of the command, and texts that it prints."""

    texts: tuple[str, ...]
    arguments: tuple[str, ...] = EAGER
    model: str = FULL
    fault: str = "nothing"


RUNS = {
    "full attention": Run((MAY,)),
    "windows": Run((MAY, "moved, by "), model=WINDOWS),
    "made-up weights": Run((MAY, "says nothing"), ("--load-format", "dummy", *EAGER)),
    "not eager": Run((MAY,), NOT_COMPILED),
    "options": Run(
        (MAY,),
        (
            *EAGER,
            *connector(
                chunk_tokens=CPU.block_tokens,
                segments={"head_tokens": 32, "selector": "question"},
            ),
        ),
    ),
    "wrong rows": Run((MAY_NOT, IN_PLACE), fault="loads_other_rows"),
    "holes": Run((MAY_NOT, IN_PLACE), fault="leaves_holes"),
    "wrong keys": Run((MAY_NOT, "keys of the first layer"), fault="turns_keys_further"),
    "failing loads": Run((MAY_NOT, "found one without"), fault="fails_loads"),
    "small context": Run((MAY_NOT, "room for 99"), (*EAGER, "--max-model-len", "100")),
    "small host memory": Run(
        (MAY_NOT, "found no room for it"), (*EAGER, *connector(host_memory_gib=0.0001))
    ),
    "no holes": Run(
        (MAY_NOT, "an engine that reuses segments, found one that does not"),
        (*EAGER, *connector(state_policy="skip")),
    ),
}
ON_OTHER_VERSIONS = ("full attention", "windows", "wrong rows")
main_only = pytest.mark.main_version
NAMES = [pytest.param(name, marks=() if name in ON_OTHER_VERSIONS else main_only) for name in RUNS]


@pytest.fixture(scope="module")
def reports(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    plans = {
        name: Plan(
            model_folder(run.model),
            [run.fault],
            "check_model",
            options={"arguments": [*ARGUMENTS, *run.arguments]},
        )
        for name, run in RUNS.items()
        if name in ON_OTHER_VERSIONS or not IS_SAMPLE
    }
    return processes.serve(tmp_path_factory, plans, {})


@pytest.mark.parametrize("name", NAMES)
def test_the_verdict_is_printed(reports: Reports, name: str) -> None:
    report, texts = reports[name].report, RUNS[name].texts
    assert report["exit_status"] == (texts[0] == MAY_NOT), report["printed"]
    assert report["printed"].startswith(texts[0])
    for text in texts:
        assert text in report["printed"]


@main_only
def test_the_verdict_alone_is_on_standard_output(model_folder: Callable[[str], Path]) -> None:
    """vLLM's log is on standard error."""
    command = [sys.executable, "-I", "-m", "vllm_ascend_kvext", "check-model"]
    finished = subprocess.run(
        [*command, str(model_folder(FULL)), *ARGUMENTS, *EAGER],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **processes.CPU.environ},
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    assert finished.stdout.startswith(MAY)
    assert "INFO" in finished.stderr and "INFO" not in finished.stdout
