# SPDX-License-Identifier: Apache-2.0
"""vllm-ascend's own worker serves models on the emulated NPU as transformers computes them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from transformers import PreTrainedModel

HERE = Path(__file__).parent
PROMPT_TOKENS = (37, 300, 1100, 700)  # below a block, over some, over a step, beside another
REPLY_TOKENS = 24
TOLERANCE = 1e-3  # of a log-probability; float32 differs by less than a tenth of it
VISIBLE = 1e-2  # what a cache with wrong values has to change at least


@pytest.mark.parametrize("name", random_models.MODELS)
def test_a_model_is_served_as_transformers_computes_it(
    name: str, tmp_path: Path, report_model: Any
) -> None:
    reference = random_models.write(tmp_path / "model", random_models.MODELS[name]())
    rng = random.Random(0)
    prompts = [
        rng.choices(range(random_models.VOCABULARY_TOKENS), k=tokens) for tokens in PROMPT_TOKENS
    ]
    served = serve(
        tmp_path, {"rounds": [prompts] * 3, "spoil_before": 2, "reply_tokens": REPLY_TOKENS}
    )
    first, cached, spoiled = (
        largest_difference(reference, prompts, replies) for replies in served["rounds"]
    )
    report_model(name, max(first, cached), spoiled, served["operators"])
    assert served["is_async"] and served["runner"] == "NPUModelRunner"
    assert all(reply["cached"] == 0 for reply in served["rounds"][0])
    assert served["rounds"][1][2]["cached"] == 1024
    assert max(first, cached) < TOLERANCE
    assert spoiled > VISIBLE, "a layer without its values has to be seen"


def serve(folder: Path, request: dict[str, Any]) -> dict[str, Any]:
    """Runs ``serve.py`` with the model in ``folder / "model"``."""
    (folder / "request.json").write_text(json.dumps(request))
    files = [folder / "model", folder / "request.json", folder / "result.json"]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, HERE / "serve.py", *map(str, files)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    result: dict[str, Any] = json.loads(files[-1].read_text())
    return result


@torch.no_grad()
def largest_difference(
    reference: PreTrainedModel, prompts: list[list[int]], replies: list[dict[str, Any]]
) -> float:
    """Largest difference of a log-probability, over the five best tokens of every step.

    The reference gets the tokens that were served, so that all steps can be compared. A step whose
    token is not the reference's best counts with what the best has more.
    """
    largest = 0.0
    for prompt, reply in zip(prompts, replies, strict=True):
        logits = reference(torch.tensor([prompt + reply["tokens"]])).logits[0, len(prompt) - 1 : -1]
        expected = logits.float().log_softmax(-1)
        for step, token, found in zip(
            expected, reply["tokens"], reply["log_probabilities"], strict=True
        ):
            differences = [abs(step[int(one)].item() - value) for one, value in found.items()]
            largest = max([largest, (step.max() - step[token]).item(), *differences])
    return largest
