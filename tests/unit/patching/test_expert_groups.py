# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The repair changes these calls of vLLM-Ascend's choice of experts."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
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
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """vLLM-Ascend's function, wrapped by the repair."""
    module = ModuleType("experts_selector_of_a_test")
    module._native_select_experts = lambda **call: ("native", call)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(experts_selector, "_MODULE", module.__name__)
    return partial(experts_selector.choose_by_the_best, lambda *args, **call: "fused", None)


def test_the_best_expert_of_a_group_counts_where_experts_have_no_bias(
    choose: Callable[..., Any],
) -> None:
    name, call = choose(**CALL)
    assert name == "native"
    assert call == {key: CALL[key] for key in call} and call["topk_group"] == 2


@pytest.mark.parametrize(
    "other",
    [
        {"e_score_correction_bias": "bias"},
        {"use_grouped_topk": False},
        {"topk_group": 4},
        {"topk_group": None, "num_expert_group": None},
    ],
)
def test_other_choices_are_left_to_the_kernel(
    choose: Callable[..., Any], other: dict[str, Any]
) -> None:
    assert choose(**CALL | other) == "fused"
    assert choose("states", **CALL | other) == "fused"


GROUPED = {
    "use_grouped_topk": True,
    "e_score_correction_bias": None,
    "topk_group": 2,
    "num_expert_group": 4,
}


@pytest.mark.parametrize(
    ("other", "is_fused"),
    [
        ({}, False),
        ({"e_score_correction_bias": "bias"}, True),
        ({"use_grouped_topk": False}, True),
        ({"topk_group": 4}, True),
        ({"topk_group": None}, True),
        ({"topk_group": None, "num_expert_group": None}, True),
    ],
)
def test_a_router_leaves_the_best_expert_of_a_group_to_torch(
    other: dict[str, Any], is_fused: bool
) -> None:
    """Routers of vLLM-Ascend 0.30 say whether the kernel can make their choice."""
    router = SimpleNamespace(**GROUPED | other)
    choose = experts_selector.leave_the_best_to_torch
    assert choose(lambda states: True, router, "states") is is_fused
    assert not choose(lambda states: False, router, "states")
