# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the choice of each token's experts, and the tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from torch_npu.operators.refusals import refuse_given, require

SOFTMAX, SIGMOID, ROOT_OF_SOFTPLUS = 0, 1, 2  # values of norm_type
SUM_OF_TWO = 1  # of group_select_mode
COUNTS = 1  # of expert_tokens_num_type


def moe_gating_top_k(
    x: torch.Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses ``k`` experts for each token, out of its best ``k_group`` groups of experts.

    Args:
        x: scores, ``[num_tokens, num_experts]``.
        group_select_mode: a group is as good as its best two experts (1).
        renorm: whether the chosen weights are divided by their sum; with sigmoid they always are.
        bias_opt: ``[num_experts]``, counts for the choice, not for the weight.

    Returns:
        Weights in the type of ``x``, experts in int32, both ``[num_tokens, k]`` with the best
        expert first, and the weights of all experts in float32 (undefined without ``out_flag``).
    """
    scores = x.float()
    if norm_type == SOFTMAX:
        weights = scores.softmax(-1)
    else:
        require("moe_gating_top_k", norm_type == SIGMOID, f"norm_type {norm_type}")
        weights = scores.sigmoid()
    ranks = weights if bias_opt is None else weights + bias_opt.float()
    if group_count > 1:
        is_sum = group_select_mode == SUM_OF_TWO
        require("moe_gating_top_k", is_sum, f"group_select_mode {group_select_mode}")
        groups = ranks.unflatten(-1, (group_count, -1))
        worth = groups.topk(2, dim=-1).values.sum(-1)
        chosen_groups = worth.topk(k_group, dim=-1).indices
        is_left_out = torch.ones_like(worth).scatter(-1, chosen_groups, 0.0).bool()
        ranks = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = ranks.topk(k, dim=-1).indices
    chosen = weights.gather(-1, experts)
    if renorm or norm_type != SOFTMAX:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps)
    return (chosen * routed_scaling_factor).to(x.dtype), experts.int(), weights


def moe_gating_top_k_hash(
    x: torch.Tensor,
    k: int,
    bias: torch.Tensor | None = None,
    input_ids: torch.Tensor | None = None,
    tid2eid: torch.Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Chooses ``k`` experts of each token; their scores are divided by their sum and scaled.

    Args:
        x: shape ``[tokens, experts]``.
        bias: is added to the scores for the choice, and only for it; shape ``[experts]``.
        input_ids: shape ``[tokens]``.
        tid2eid: experts by token id, shape ``[vocabulary, k]``; without it the best are chosen.

    Returns:
        Weights ``[tokens, k]``, experts ``[tokens, k]`` in int32, and all scores in float32.
    """
    if norm_type != ROOT_OF_SOFTPLUS or renorm or out_flag or group_count != 1 or k_group != 1:
        raise RuntimeError(
            "moe_gating_top_k_hash: only norm_type 2 without renorm, groups and out_flag is"
            f" emulated, found {norm_type=} {renorm=} {group_count=} {k_group=} {out_flag=}"
        )
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"moe_gating_top_k_hash: x is {x.dtype}, bias {bias.dtype}")
    scores = functional.softplus(x.float()).sqrt()
    if tid2eid is None:
        experts = (scores if bias is None else scores + bias.float()).topk(k, -1).indices
    elif input_ids is None or input_ids.numel() != x.shape[0]:
        raise RuntimeError(f"moe_gating_top_k_hash: not one of input_ids per row of x {x.shape}")
    else:
        experts = tid2eid[input_ids.flatten().long()].long()
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), experts.to(torch.int32), scores


def npu_moe_init_routing_custom(
    x: torch.Tensor,
    expert_idx: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    active_num: int = -1,
    expert_capacity: int = -1,
    expert_num: int = -1,
    drop_pad_mode: int = 0,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] | None = None,
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies each token once for each of its experts, sorted by expert.

    Args:
        x: ``[num_tokens, hidden]``; ``expert_idx``: int32, ``[num_tokens, k]``.
        active_expert_range: of this device: all experts.
        expert_tokens_num_type: only 1, counts.

    Returns:
        ``[num_tokens * k, hidden]``; the row of each token and choice in it, int32,
        ``[num_tokens * k]``; the tokens of each expert, int64; and nothing (scales of a
        quantization).
    """
    name = "npu_moe_init_routing_custom"
    options = {"scale": scale, "offset": offset, "drop_pad_mode": drop_pad_mode}
    refuse_given(name, options | {"row_idx_type": row_idx_type})
    require(name, quant_mode == -1, f"quant_mode {quant_mode} is not emulated")
    is_emulated = expert_tokens_num_flag and expert_tokens_num_type == COUNTS
    require(name, is_emulated, "only counts of the experts' tokens are emulated")
    is_emulated = active_num in (-1, 0, expert_idx.numel())
    require(name, is_emulated, f"active_num {active_num} is not emulated")
    here = list(active_expert_range or (0, expert_num))
    require(name, here == [0, expert_num], f"experts {here} of {expert_num}: only all are emulated")
    experts = expert_idx.flatten().long()
    order = experts.argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    counts = (experts.unsqueeze(1) == torch.arange(expert_num, device=x.device)).sum(0)
    return x[order // expert_idx.shape[1]], rows.int(), counts, x.new_empty(0)


OPERATORS = {
    "moe_gating_top_k": moe_gating_top_k,
    "moe_gating_top_k_hash": moe_gating_top_k_hash,
    "npu_moe_init_routing_custom": npu_moe_init_routing_custom,
}
