# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: choice of experts, sorting of tokens by expert, their matrices, the way back."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .refusals import refuse_given, require

SOFTMAX, SIGMOID = 0, 1  # values of norm_type
MAXIMUM, SUM_OF_TWO = 0, 1  # values of group_select_mode
CUMULATED, COUNTS = 0, 1  # values of group_list_type


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
        Weights in the type of ``x``, experts in int32, both ``[num_tokens, k]`` with the best expert
        first, and the weights of all experts in float32 (undefined without ``out_flag``).
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
        ``[num_tokens * k, hidden]``, of which only the rows of this device's experts have a meaning;
        the row of each token and choice in it, int32, ``[num_tokens * k]``, -1 for other experts; the
        tokens of each expert, int64; and nothing (scales of a quantization).
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


def npu_grouped_matmul(
    x: Sequence[torch.Tensor],
    weight: Sequence[torch.Tensor],
    *,
    bias: Sequence[torch.Tensor] | None = None,
    scale: Sequence[torch.Tensor] | None = None,
    per_token_scale: Sequence[torch.Tensor] | None = None,
    group_list: torch.Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[torch.Tensor]:
    """Multiplies each group of rows with its own matrix.

    Args:
        x: one tensor, ``[rows, k]``, the rows of a group together.
        weight: one tensor, ``[groups, k, n]``; ``bias`` one tensor, ``[groups, n]``.
        group_list: int64, ``[groups]``: where each group ends (type 0), or its rows (type 1).

    Returns:
        One tensor, ``[rows, n]``. Rows behind the last group are undefined; here they are not a
        number, so that it is seen if they are used.
    """
    name = "npu_grouped_matmul"
    refuse_given(name, {"scale": scale, "per_token_scale": per_token_scale})
    require(
        name,
        group_type == 0 and split_item in (2, 3),
        "only groups of rows in one tensor are emulated",
    )
    require(name, len(x) == 1 and len(weight) == 1, "one x and one weight are emulated")
    require(
        name,
        group_list is not None and group_list_type in (CUMULATED, COUNTS),
        "group_list is needed",
    )
    rows, matrices = x[0], weight[0]
    ends = group_list if group_list_type == CUMULATED else group_list.cumsum(0)
    output = torch.full((len(rows), matrices.shape[-1]), float("nan"))
    first = 0
    for group, end in enumerate(ends.tolist()):
        product = rows[first:end].float() @ matrices[group].float()
        output[first:end] = product if bias is None else product + bias[0][group]
        first = end
    return [output.to(output_dtype or rows.dtype)]


def grouped_matmul_outputs(
    x: Sequence[torch.Tensor], weight: Sequence[torch.Tensor], **options: object
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    dtype = options.get("output_dtype") or x[0].dtype
    assert isinstance(dtype, torch.dtype)
    return [((x[0].shape[0], weight[0].shape[-1]), dtype)]


def npu_moe_token_unpermute(
    permuted_tokens: torch.Tensor,
    sorted_indices: torch.Tensor,
    probs: torch.Tensor | None = None,
    padded_mode: bool = False,
    restore_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Adds up what the experts made of each token, times the experts' weights.

    Args:
        permuted_tokens: ``[num_tokens * k, hidden]``, sorted by expert.
        sorted_indices: int32, ``[num_tokens * k]``, the row of each token and choice in it.
        probs: ``[num_tokens, k]``; without it k is 1.
    """
    refuse_given("npu_moe_token_unpermute", {"padded_mode": padded_mode})
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    weighted = rows.unflatten(0, probs.shape).float() * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)
