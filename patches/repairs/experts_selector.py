# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/ops/fused_moe/experts_selector.py``: which groups of experts are the best.

Models with groups of experts choose groups first. Where experts have a bias (``noaux_tc``:
DeepSeek-V3), the two best of a group count. Where they have none (``group_limited_greedy``:
DeepSeek-V2), the best one counts: see ``grouped_topk`` in vLLM's ``grouped_topk_router.py``.
vLLM-Ascend's kernel is told to count two in both cases. Its own choice without a kernel counts one.

The module cannot be imported when patches are planned: that would import vLLM-Ascend's operators
before its worker does. So it is wrapped when it is imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import wrapt

from vllm_ascend_kvext.patching.declaration import Kind, Patch

_MODULE = "vllm_ascend.ops.fused_moe.experts_selector"
_FUSED, _NATIVE = "_select_experts_with_fusion_ops", "_native_select_experts"
_HANDED_ON = (
    *("hidden_states", "router_logits", "top_k", "use_grouped_topk", "renormalize"),
    *("topk_group", "num_expert_group", "scoring_func", "routed_scaling_factor"),
)


def repair_when_imported() -> Callable[[], None]:
    """Wrap the function of the module now or later; the result takes that back."""
    wrappers: list[tuple[Any, Any]] = []
    is_undone = False

    def repair(module: Any) -> None:
        if is_undone:
            return
        native = getattr(module, _NATIVE)

        def choose(
            wrapped: Callable[..., Any],
            _instance: None,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:
            if args or not counts_best_only(kwargs):
                return wrapped(*args, **kwargs)
            return native(**{name: kwargs[name] for name in _HANDED_ON})

        wrapper = wrapt.FunctionWrapper(getattr(module, _FUSED), choose)
        wrappers.append((module, wrapper))
        setattr(module, _FUSED, wrapper)

    def undo() -> None:
        nonlocal is_undone
        is_undone = True
        for module, wrapper in wrappers:
            if getattr(module, _FUSED) is wrapper:
                setattr(module, _FUSED, wrapper.__wrapped__)

    wrapt.register_post_import_hook(repair, _MODULE)
    return undo


def counts_best_only(call: Mapping[str, Any]) -> bool:
    """Whether some groups are chosen out of several, by experts that have no bias."""
    num_groups = call.get("num_expert_group") or 1
    return (
        bool(call.get("use_grouped_topk"))
        and call.get("e_score_correction_bias") is None
        and (call.get("topk_group") or num_groups) < num_groups
        and all(name in call for name in _HANDED_ON)
    )


PATCHES = (
    Patch(
        id="KVX-129",
        target="vllm_ascend.platform:NPUPlatform",
        kind=Kind.HOOK,
        feature="expert-groups",
        vllm=("==0.23.0.*",),
        install=repair_when_imported,
        why="vLLM-Ascend chooses groups of experts by the sum of their two best, also for models "
        "that choose them by the best one: other experts compute, and other tokens are sampled.",
        retire_when="vLLM-Ascend gives `group_select_mode=0` where experts have no bias",
        ascend=(f"{_MODULE}:{_FUSED}", f"{_MODULE}:{_NATIVE}", f"{_MODULE}:select_experts"),
    ),
)
