# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the choice of each token's experts, and the tokens sorted by expert."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_npu.operators.refusals import refuse_given, require

SOFTMAX, SIGMOID = 0, 1  # values of norm_type
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
        group_select_mode: a group is as good as its best expert (0), or as its best two (1).
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
        groups = ranks.unflatten(-1, (group_count, -1))
        num_summed = 2 if group_select_mode == SUM_OF_TWO else 1
        worth = groups.topk(num_summed, dim=-1).values.sum(-1)
        chosen_groups = worth.topk(k_group, dim=-1).indices
        is_left_out = torch.ones_like(worth).scatter(-1, chosen_groups, 0.0).bool()
        ranks = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = ranks.topk(k, dim=-1).indices
    chosen = weights.gather(-1, experts)
    if renorm or norm_type != SOFTMAX:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + eps)
    return (chosen * routed_scaling_factor).to(x.dtype), experts.int(), weights


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
    active_expert_range: Sequence[int] = (),
    row_idx_type: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies each token once for each of its experts, sorted by expert.

    Args:
        x: ``[num_tokens, hidden]``; ``expert_idx``: int32, ``[num_tokens, k]``.
        active_expert_range: first expert of this device, and the first that is not.
        expert_tokens_num_type: only 1, counts.

    Returns:
        ``[num_tokens * k, hidden]``, of which only the rows of this device's experts have a
        meaning; the row of each token and choice in it, int32, ``[num_tokens * k]``, -1 for other
        experts; the tokens of each expert, int64; and nothing (scales of a quantization).
    """
    name = "npu_moe_init_routing_custom"
    options = {"scale": scale, "offset": offset, "drop_pad_mode": drop_pad_mode}
    refuse_given(name, options | {"row_idx_type": row_idx_type})
    require(name, quant_mode == -1, f"quant_mode {quant_mode} is not emulated")
    is_emulated = expert_tokens_num_flag and expert_tokens_num_type == COUNTS
    require(name, is_emulated, "only counts of the experts' tokens are emulated")
    require(
        name, active_num in (-1, 0, expert_idx.numel()), f"active_num {active_num} is not emulated"
    )
    first, end = active_expert_range or (0, expert_num)
    experts = expert_idx.flatten().long()
    is_here = (experts >= first) & (experts < end)
    order = torch.where(is_here, experts, expert_num).argsort(stable=True)
    rows = torch.empty_like(order)
    rows[order] = torch.arange(len(order), device=order.device)
    rows = torch.where(is_here, rows, -1)
    counts = (experts.unsqueeze(1) == torch.arange(first, end, device=x.device)).sum(0)
    return x[order // expert_idx.shape[1]], rows.int(), counts, x.new_empty(0)


OPERATORS = {
    "moe_gating_top_k(Tensor x, int k, int k_group, int group_count, int group_select_mode,"
    " int renorm, int norm_type, bool out_flag, float routed_scaling_factor, float eps,"
    " Tensor? bias_opt=None) -> (Tensor y, Tensor expert_idx, Tensor out)": moe_gating_top_k,
    "npu_moe_init_routing_custom(Tensor x, Tensor expert_idx, *, Tensor? scale=None,"
    " Tensor? offset=None, int active_num=-1, int expert_capacity=-1, int expert_num=-1,"
    " int drop_pad_mode=0, int expert_tokens_num_type=0, bool expert_tokens_num_flag=False,"
    " int quant_mode=0, int[2] active_expert_range=[], int row_idx_type=0)"
    " -> (Tensor, Tensor, Tensor, Tensor)": npu_moe_init_routing_custom,
}
