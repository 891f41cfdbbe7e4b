# SPDX-License-Identifier: Apache-2.0
"""``check-model`` on the real engine: sound models, faults, and too little room."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import blending_models
import pytest
from support.sample import IS_SAMPLE
from support.scenarios import processes

FULL, WINDOWS = "llama", "gemma3"
ARGUMENTS = (
    *("--skip-tokenizer-init", "--dtype", "float32", "--block-size", "16"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", "1000"),
    *("--no-disable-hybrid-kv-cache-manager", "--distributed-executor-backend", "uni"),
)
EAGER = "--enforce-eager"
NOT_COMPILED = ("--compilation-config", '{"mode": 0, "cudagraph_mode": "NONE"}')
MAY, MAY_NOT = "Segments may be reused: ", "Segments are not to be reused"
IN_PLACE = "expected at most 0.001 of reuse in place"


def connector(**options: Any) -> tuple[str, str]:
    """The argument that hands options to the connector."""
    config = {
        "kv_connector": "KvextConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": options,
    }
    return "--kv-transfer-config", json.dumps(config)


# By name: model, fault, further arguments, texts that are printed.
RUNS: dict[str, tuple[str, str, tuple[str, ...], tuple[str, ...]]] = {
    "full attention": (FULL, "none", (EAGER,), (MAY,)),
    "windows": (WINDOWS, "none", (EAGER,), (MAY, "moved, by ")),
    "made-up weights": (FULL, "none", ("--load-format", "dummy", EAGER), (MAY, "says nothing")),
    "not eager": (FULL, "none", NOT_COMPILED, (MAY,)),
    "options": (
        FULL,
        "none",
        (EAGER, *connector(chunk_tokens=16, blend_head_tokens=32, blend_selector="question")),
        (MAY,),
    ),
    "wrong rows": (FULL, "loads_other_rows", (EAGER,), (MAY_NOT, IN_PLACE)),
    "holes": (FULL, "leaves_holes", (EAGER,), (MAY_NOT, IN_PLACE)),
    "wrong keys": (FULL, "turns_keys_further", (EAGER,), (MAY_NOT, "keys of the first layer")),
    "failing loads": (FULL, "fails_loads", (EAGER,), (MAY_NOT, "found one without")),
    "small context": (FULL, "none", (EAGER, "--max-model-len", "100"), (MAY_NOT, "room for 99")),
    "small host memory": (
        FULL,
        "none",
        (EAGER, *connector(host_memory_gib=0.0001)),
        (MAY_NOT, "found no room for it"),
    ),
    "no holes": (
        FULL,
        "none",
        (EAGER, *connector(state_policy="skip")),
        (MAY_NOT, "an engine that reuses segments, found one that does not"),
    ),
}
ON_OTHER_VERSIONS = ("full attention", "windows", "wrong rows")


def write_model(name: str, folder: Path) -> None:
    folder.mkdir()
    blending_models.WRITERS[name](folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check_model")


@pytest.fixture(scope="module")
def reports(folder: Path) -> dict[str, dict[str, Any]]:
    plans = {}
    for name, (model, fault, arguments, _) in RUNS.items():
        if IS_SAMPLE and name not in ON_OTHER_VERSIONS:
            continue
        if not (folder / model).exists():
            write_model(model, folder / model)
        plans[name] = {
            "fault": fault,
            "arguments": [str(folder / model), *ARGUMENTS, *arguments],
        }
    plans_path, report_path = folder / "plans.json", folder / "report.json"
    plans_path.write_text(json.dumps(plans))
    script = Path(__file__).with_name("check_model_workload.py")
    ended = processes.run(script, [str(report_path), str(plans_path)], {})
    assert not ended.exit_code, ended.log[-6000:]
    found: dict[str, dict[str, Any]] = json.loads(report_path.read_text())
    return found


@pytest.mark.parametrize("name", RUNS)
def test_the_verdict_is_printed(reports: dict[str, dict[str, Any]], name: str) -> None:
    if name not in reports:
        pytest.skip("on the main version only")
    report, texts = reports[name], RUNS[name][-1]
    assert "error" not in report, report["error"]
    assert report["exit_status"] == (texts[0] == MAY_NOT), report["printed"]
    assert report["printed"].startswith(texts[0])
    for text in texts:
        assert text in report["printed"]


@pytest.mark.skipif(IS_SAMPLE, reason="on the main version only")
def test_the_verdict_alone_is_on_standard_output(folder: Path) -> None:
    """vLLM's log is on standard error."""
    if not (folder / FULL).exists():
        write_model(FULL, folder / FULL)
    command = [sys.executable, "-I", "-m", "vllm_ascend_kvext", "check-model", str(folder / FULL)]
    finished = subprocess.run(
        [*command, *ARGUMENTS, EAGER],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **processes.CPU.environ},
    )
    assert finished.returncode == 0, finished.stderr[-6000:]
    assert finished.stdout.startswith(MAY)
    assert "INFO" in finished.stderr and "INFO" not in finished.stdout
