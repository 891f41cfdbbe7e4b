# SPDX-License-Identifier: Apache-2.0
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
from support.scenarios.processes import Plan, Reports

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from blending.tiny.model import write_folder

FULL, RETRIEVES, RETRIEVES_IN_WINDOWS = "random weights", "tiny full", "tiny window"
ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "16"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "1000"),
    *("--no-disable-hybrid-kv-cache-manager", "--distributed-executor-backend", "uni"),
)
EAGER = ("--enforce-eager",)
NOT_COMPILED = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}')
SHORT_STEPS = ("--max-num-batched-tokens", "120", "--max-model-len", "256")
"""The tiny models were trained with so few tokens: prompts that look for a layer have as many."""
MAY, MAY_NOT = "Segments may be reused: ", "Segments are not to be reused"
IN_PLACE = "expected at most 0.001 of reuse in place"


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
    "full attention": Run((MAY, "No layer attends")),
    "not eager": Run((MAY, "With --enforce-eager, check-model also finds"), NOT_COMPILED),
    "options": Run(
        (MAY,),
        (*EAGER, *connector(chunk_tokens=16, blend_head_tokens=32, blend_selector="question")),
    ),
    "retrieves": Run(
        (MAY, '"blend_check_layer": 2.', *(f"\n  layer   {index}  0." for index in range(4))),
        (*EAGER, *SHORT_STEPS),
        RETRIEVES,
    ),
    "retrieves in windows": Run(
        (MAY, "moved, by ", '"blend_check_layer": 3.\n  layer   1  0.', "\n  layer   3  0."),
        (*EAGER, *SHORT_STEPS),
        RETRIEVES_IN_WINDOWS,
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
ON_OTHER_VERSIONS = ("full attention", "retrieves in windows", "wrong rows")
main_only = pytest.mark.main_version
NAMES = [pytest.param(name, marks=() if name in ON_OTHER_VERSIONS else main_only) for name in RUNS]


@pytest.fixture(scope="module")
def models(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    trained = {name: tmp_path_factory.mktemp("model") for name in (RETRIEVES, RETRIEVES_IN_WINDOWS)}
    write_folder("full", 2, trained[RETRIEVES])
    write_folder("window", 1, trained[RETRIEVES_IN_WINDOWS])
    return trained | {FULL: model_folder("full")}


@pytest.fixture(scope="module")
def reports(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Reports:
    plans = {
        name: Plan(
            models[run.model],
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
def test_the_verdict_alone_is_on_standard_output(models: dict[str, Path]) -> None:
    """vLLM's log is on standard error."""
    command = [sys.executable, "-I", "-m", "vllm_ascend_kvext", "check-model", str(models[FULL])]
    finished = subprocess.run(
        [*command, *ARGUMENTS, *EAGER],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **processes.CPU.environ},
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    assert finished.stdout.startswith(MAY)
    assert "INFO" in finished.stderr and "INFO" not in finished.stdout
