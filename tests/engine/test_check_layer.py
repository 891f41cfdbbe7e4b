# SPDX-License-Identifier: Apache-2.0
"""``python -m vllm_ascend_kvext check-layer`` on the real engine, with models that were trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import served
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.append(str(BENCHMARKS))

from blending.tiny.model import write_folder  # noqa: E402

ENGINE = {"dtype": "float32", "num_gpu_blocks_override": 64, "block_size": 16}


def check_layer(folder: Path) -> tuple[int, dict[str, object]]:
    """The exit status, and what is printed."""
    command = [sys.executable, "-I", "-m", "vllm_ascend_kvext", "check-layer", str(folder)]
    command += ["--prompts", "4", "--tokens", "120", "--engine", json.dumps(ENGINE), "--json"]
    environ = {**os.environ, **served.ENGINE_ENVIRON}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environ)
    assert "INFO" in finished.stderr, "vLLM writes its log"
    assert finished.stdout.startswith("{"), finished.stdout + finished.stderr
    return finished.returncode, json.loads(finished.stdout)


@pytest.mark.parametrize(("variant", "seed", "expected"), [("full", 2, 2), ("window", 1, 3)])
def test_the_layer_that_retrieves_is_found(
    variant: str, seed: int, expected: int, tmp_path: Path
) -> None:
    """The layer at which questions have been seen to work; the default would take 1 of windows."""
    write_folder(variant, seed, tmp_path)
    exit_status, found = check_layer(tmp_path)
    assert (exit_status, found["blend_check_layer"]) == (0, expected), found
    layers = {"full": ["0", "1", "2", "3"], "window": ["1", "3"]}
    assert list(found["shares"]) == layers[variant]  # type: ignore[call-overload]


def test_no_layer_of_an_untrained_model_is_found(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    write_folder("full", 2, tmp_path)
    (path,) = tmp_path.glob("*.safetensors")
    torch.manual_seed(0)
    save_file({name: torch.randn_like(each) * 0.05 for name, each in load_file(path).items()}, path)
    exit_status, found = check_layer(tmp_path)
    assert (exit_status, found["blend_check_layer"]) == (1, None), found
