# SPDX-License-Identifier: Apache-2.0
"""Which calls of vLLM-Ascend's choice of experts are the repair's, and that it is taken back."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from vllm_ascend_kvext.patches.repairs import experts_selector

CALL: dict[str, Any] = {
    "hidden_states": "states",
    "router_logits": "logits",
    "top_k": 2,
    "use_grouped_topk": True,
    "renormalize": False,
    "e_score_correction_bias": None,
    "topk_group": 2,
    "num_expert_group": 4,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "tid2eid": None,
}


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As the module of vLLM-Ascend, imported already."""
    module = ModuleType("experts_selector_of_a_test")
    module._select_experts_with_fusion_ops = lambda **call: "fused"
    module._native_select_experts = lambda **call: ("native", call)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(experts_selector, "_MODULE", module.__name__)
    return module


def test_the_best_expert_of_a_group_counts_where_experts_have_no_bias(module: ModuleType) -> None:
    fused = module._select_experts_with_fusion_ops
    undo = experts_selector.repair_when_imported()
    name, call = module._select_experts_with_fusion_ops(**CALL)
    assert name == "native"
    assert call == {key: CALL[key] for key in call} and call["topk_group"] == 2
    undo()
    assert module._select_experts_with_fusion_ops is fused


@pytest.mark.parametrize(
    "other",
    [
        {"e_score_correction_bias": "bias"},
        {"use_grouped_topk": False},
        {"topk_group": 4},
        {"topk_group": None, "num_expert_group": None},
    ],
)
def test_other_choices_are_left_to_the_kernel(module: ModuleType, other: dict[str, Any]) -> None:
    undo = experts_selector.repair_when_imported()
    assert module._select_experts_with_fusion_ops(**CALL | other) == "fused"
    undo()
