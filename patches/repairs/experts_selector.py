# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/ops/fused_moe``: which groups of experts are the best.

If experts have a bias (``noaux_tc``: DeepSeek-V3), the two best experts of a group count. If they
have none (``group_limited_greedy``: DeepSeek-V2), only the best expert counts, see ``grouped_topk``
in vLLM's ``grouped_topk_router.py``. vLLM-Ascend lets its kernel count two experts in both cases.
vLLM-Ascend's function for the case without a kernel counts one expert. This module does not import
vLLM-Ascend's modules, because that would import its operators too early.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Kind, Patch

_MODULE = "vllm_ascend.ops.fused_moe.experts_selector"
_FUSED = "_select_experts_with_fusion_ops"
_NATIVE = "_native_select_experts"
_HANDED_ON = (
    "hidden_states",
    "router_logits",
    "top_k",
    "use_grouped_topk",
    "renormalize",
    "topk_group",
    "num_expert_group",
    "scoring_func",
    "routed_scaling_factor",
)


def choose_by_the_best(
    wrapped: Callable[..., Any], _instance: None, *args: Any, **call: Any
) -> Any:
    """Choose without the kernel if only the best expert of a group counts."""
    if args or not counts_best_only(call):
        return wrapped(*args, **call)
    native = getattr(sys.modules[_MODULE], _NATIVE)
    return native(**{name: call[name] for name in _HANDED_ON})


def counts_best_only(call: Mapping[str, Any]) -> bool:
    """Whether only some groups are chosen, by the best expert of each. Experts have no bias."""
    num_groups = call.get("num_expert_group") or 1
    return (
        bool(call.get("use_grouped_topk"))
        and call.get("e_score_correction_bias") is None
        and (call.get("topk_group") or num_groups) < num_groups
        and all(name in call for name in _HANDED_ON)
    )


def leave_the_best_to_torch(
    wrapped: Callable[..., bool], router: Any, *args: Any, **kwargs: Any
) -> bool:
    """Report the kernel as not supported if only the best expert of a group counts."""
    num_groups = router.num_expert_group or 1
    return wrapped(*args, **kwargs) and not (
        router.use_grouped_topk
        and router.e_score_correction_bias is None
        and (router.topk_group or num_groups) < num_groups
    )


_ROUTER = "vllm_ascend.ops.fused_moe.router"
_WHY = (
    "vLLM-Ascend chooses groups of experts by the sum of their two best experts, also for models "
    "that choose groups by their best expert. These models then compute with the wrong experts and "
    "sample other tokens."
)
_RETIRE_WHEN = "vLLM-Ascend passes `group_select_mode=0` for experts without a bias"

PATCHES = (
    Patch(
        id="KVX-129",
        target=f"{_MODULE}:{_FUSED}",
        kind=Kind.REPLACE,
        feature="expert-groups",
        vllm=BEFORE_0_30,
        wrapper=choose_by_the_best,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
        relies_on=(f"{_MODULE}:{_NATIVE}", f"{_MODULE}:select_experts"),
        when_imported=True,
    ),
    Patch(
        id="KVX-132",
        target=f"{_ROUTER}.fused_topk_router:AscendFusedTopKRouter.is_fused_supported",
        feature="expert-groups",
        vllm=SINCE_0_30,
        wrapper=leave_the_best_to_torch,
        why=_WHY,
        retire_when=_RETIRE_WHEN,
        relies_on=(
            f"{_ROUTER}.fused_topk_router:AscendFusedTopKRouter._compute_routing",
            f"{_ROUTER}.grouped_topk_router:AscendGroupedTopKRouter._compute_routing",
            f"{_ROUTER}.grouped_topk_router:AscendGroupedTopKRouter._native_grouped_topk",
        ),
        when_imported=True,
    ),
)
