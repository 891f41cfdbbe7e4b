# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vllm-ascend's own worker on the emulated NPU answers as transformers does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import random_models
import torch
from emulated_plans import RUNNERS
from support.sample import IS_SAMPLE
from support.scenarios import answers
from support.scenarios.answers import NPU_TOLERANCE, Answer
from support.scenarios.processes import NPU, LazyReports, Plan
from transformers import AutoModelForCausalLM, PreTrainedModel

VISIBLE = 1e-2  # least change by a cache with wrong values
ENGINE = {
    "max_model_len": 4096,
    "max_num_batched_tokens": 512,  # less than a prompt, so that prefill has chunks beside decode
    "num_gpu_blocks_override": 200,
    "enable_prefix_caching": True,
}


MODULES = {
    "V1": "vllm_ascend.worker.model_runner_v1",
    "V2": "vllm_ascend.worker.v2.model_runner",
}
TOGETHER = ("full attention", "windows")
"""Models that share a process. vLLM-Ascend 0.23.0 prepares a process for its first model's
experts."""
_OF_V1 = ("windows",) if IS_SAMPLE else tuple(random_models.MODELS)
CASES = [(model, "V1") for model in _OF_V1]
CASES += [("full attention", runner) for runner in RUNNERS if runner != "V1"]
"""Models and runners. Other models were not tried with the second runner."""


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    plans = {
        f"{model}, {runner}": Plan(partial(folder_of, model), ["three_times"], "models", ENGINE)
        for model, runner in CASES
    }
    together = {name: plan for name, plan in plans.items() if name.removesuffix(", V1") in TOGETHER}
    processes = [(RUNNERS["V1"], together)]
    processes += [
        (RUNNERS[name[-2:]], {name: plan}) for name, plan in plans.items() if name not in together
    ]
    return LazyReports(tmp_path_factory, processes, NPU)


@pytest.mark.parametrize(("model", "runner"), CASES)
def test_a_model_is_served_as_transformers_computes_it(
    served: LazyReports,
    folder_of: Callable[[str], Path],
    record_property: Any,
    model: str,
    runner: str,
) -> None:
    found = served[f"{model}, {runner}"]
    reference = AutoModelForCausalLM.from_pretrained(folder_of(model), dtype=torch.float32).eval()
    first, cached, spoiled = (
        largest_difference(reference, found.answers(label)) for label in found.labels
    )
    record_property("largest error, control", (max(first, cached), spoiled))
    assert (
        found.report["is_async"] and found.report["runner"] == MODULES[runner] + ".NPUModelRunner"
    )
    assert found.hit_tokens("first") == [0] * 4
    assert found.hit_tokens("cached")[2] == 1024
    assert max(first, cached) < NPU_TOLERANCE
    assert spoiled > VISIBLE, "a layer without its values has to be seen"


@torch.no_grad()
def largest_difference(reference: PreTrainedModel, found: Sequence[Answer]) -> float:
    """Largest difference of a log-probability, over the five best tokens of every step.

    The reference gets the served tokens, so that all steps can be compared. If the token of a step
    is not the reference's best, the step's difference is how far the best is above it.
    """
    largest = 0.0
    for answer in found:
        tokens = torch.tensor([[*answer.prompt, *answer.reply]])
        logits = reference(tokens).logits[0, answer.prompt_tokens - 1 : -1]
        expected = logits.float().log_softmax(-1)
        missed = expected.amax(-1) - expected.gather(-1, torch.tensor([answer.reply]).T)[:, 0]
        largest = max(largest, missed.max().item(), answers.oracle_error(expected, answer))
    return largest
