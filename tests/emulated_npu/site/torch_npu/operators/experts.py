# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Mixture of experts: choosing experts, sorting tokens by expert, and multiplying matrices."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from torch_npu.kernels import kernel_operator, operator, require
from torch_npu.operators.matrices import npu_dynamic_quant

COUNTS = 1  # value of group_list_type and of expert_tokens_num_type
BY_TOKEN = 1  # value of quant_mode
SUM_OF_TWO = 1  # value of group_select_mode
# Values of ``norm_type``.
SOFTMAX = 0
SIGMOID = 1
ROOT_OF_SOFTPLUS = 2
SCORES: dict[int, Callable[[Tensor], Tensor]] = {
    SOFTMAX: lambda x: x.softmax(-1),
    SIGMOID: torch.sigmoid,
    ROOT_OF_SOFTPLUS: lambda x: functional.softplus(x).sqrt(),
}

Choice = tuple[Tensor, Tensor, Tensor]
"""Weights in the type of ``x``, experts in int32, and the scores of all experts in float32.

Weights and experts are ``[num_tokens, k]``, with the best expert first. On the device the scores
are undefined without ``out_flag``.
"""


@operator("_C_ascend.moe_gating_top_k")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    k_group: int,
    group_count: int,
    group_select_mode: int,
    renorm: int,
    norm_type: int,
    out_flag: bool,
    routed_scaling_factor: float,
    eps: float,
    bias_opt: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses ``k`` experts for each token, out of its best ``k_group`` groups of experts.

    Args:
        x: ``[num_tokens, num_experts]``.
        group_select_mode: 1: the score of a group is the sum of its best two experts.
        renorm: whether the chosen weights are divided by their sum. With sigmoid they always are.
        bias_opt: ``[num_experts]``, is added for the choice and not for the weight.
    """
    require("moe_gating_top_k", norm_type in (SOFTMAX, SIGMOID), f"norm_type {norm_type}")
    scores = SCORES[norm_type](x.float())
    ranks = scores if bias_opt is None else scores + bias_opt.float()
    if group_count > 1:
        is_sum = group_select_mode == SUM_OF_TWO
        require("moe_gating_top_k", is_sum, f"group_select_mode {group_select_mode}")
        groups = ranks.unflatten(-1, (group_count, -1))
        worth = groups.topk(2, dim=-1).values.sum(-1)
        chosen_groups = worth.topk(k_group, dim=-1).indices
        is_left_out = torch.ones_like(worth).scatter(-1, chosen_groups, 0.0).bool()
        ranks = groups.masked_fill(is_left_out.unsqueeze(-1), float("-inf")).flatten(-2)
    experts = ranks.topk(k, dim=-1).indices
    is_mean = bool(renorm) or norm_type == SIGMOID
    return _weigh(x, scores, experts, routed_scaling_factor, eps if is_mean else None)


@operator("_C_ascend.moe_gating_top_k_hash")
def moe_gating_top_k_hash(
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    bias_vl: Tensor | None = None,
    image_sentinel_lo: int = 129257,
    image_sentinel_count: int = 5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Chooses ``k`` experts of each token; their scores are divided by their sum and scaled.

    Args:
        bias: is added to the scores for the choice, and only for it; shape ``[experts]``.
        input_ids: shape ``[tokens]``.
        tid2eid: experts by token id, shape ``[vocabulary, k]``. Without it the experts with the
            best scores are chosen.
        bias_vl: bias for tokens of images. These tokens have ids from ``image_sentinel_lo`` on.
    """
    if norm_type != ROOT_OF_SOFTPLUS or renorm or out_flag or group_count != 1 or k_group != 1:
        raise RuntimeError(
            "moe_gating_top_k_hash: only norm_type 2 without renorm, groups and out_flag is"
            f" emulated, found {norm_type=} {renorm=} {group_count=} {k_group=} {out_flag=}"
        )
    require("moe_gating_top_k_hash", bias_vl is None, "bias_vl is not emulated")
    if bias is not None and bias.dtype != x.dtype:
        raise RuntimeError(f"moe_gating_top_k_hash: x is {x.dtype}, bias {bias.dtype}")
    scores = SCORES[norm_type](x.float())
    if tid2eid is None:
        experts = (scores if bias is None else scores + bias.float()).topk(k, -1).indices
    elif input_ids is None or input_ids.numel() != x.shape[0]:
        raise RuntimeError(f"moe_gating_top_k_hash: not one of input_ids per row of x {x.shape}")
    else:
        experts = tid2eid[input_ids.flatten().long()].long()
    return _weigh(x, scores, experts, routed_scaling_factor, eps)


def _weigh(x: Tensor, scores: Tensor, experts: Tensor, scale: float, eps: float | None) -> Choice:
    """The weights of chosen experts; with ``eps`` they are divided by their sum."""
    weights = scores.gather(-1, experts)
    if eps is not None:
        weights = weights / (weights.sum(-1, keepdim=True) + eps)
    return (weights * scale).to(x.dtype), experts.int(), scores


@operator("_C_ascend.npu_moe_init_routing_custom")
@operator("npu_moe_init_routing_v2")
def npu_moe_init_routing(
    x: Tensor,
    expert_idx: Tensor,
    *,
    scale: Tensor | None = None,
    active_num: int = -1,
    expert_num: int = -1,
    expert_tokens_num_type: int = 0,
    expert_tokens_num_flag: bool = False,
    quant_mode: int = 0,
    active_expert_range: Sequence[int] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Copies each token once for each of its experts, sorted by expert.

    Args:
        x: ``[num_tokens, hidden]``. ``expert_idx`` is int32, ``[num_tokens, k]``.
        active_expert_range: the experts of this device: all experts.
        expert_tokens_num_type: 1, which stands for counts. Other types are not emulated.
        quant_mode: -1; or 1: the sorted tokens are quantized to int8, each by its own scale.

    Returns:
        The sorted tokens, ``[num_tokens * k, hidden]``; the row of each token and choice in them,
        int32, ``[num_tokens * k]``; the number of tokens of each expert, int64; and the scales of
        the sorted tokens, or an empty tensor.
    """
    name = "npu_moe_init_routing"
    require(name, scale is None, "scale is not emulated")
    require(name, quant_mode in (-1, BY_TOKEN), f"quant_mode {quant_mode} is not emulated")
    is_emulated = expert_tokens_num_flag and expert_tokens_num_type == COUNTS
    require(name, is_emulated, "only counts of the experts' tokens are emulated")
    is_emulated = active_num in (-1, 0, expert_idx.numel())
    require(name, is_emulated, f"active_num {active_num} is not emulated")
    here = list(active_expert_range or (0, expert_num))
    require(name, here == [0, expert_num], f"experts {here} of {expert_num}: only all are emulated")
    experts = expert_idx.flatten().long()
    order = experts.argsort(stable=True)
    counts = (experts.unsqueeze(1) == torch.arange(expert_num, device=x.device)).sum(0)
    rows, scales = x[order // expert_idx.shape[1]], x.new_empty(0)
    if quant_mode == BY_TOKEN:
        rows, scales = npu_dynamic_quant(rows)
    return rows, order.argsort().int(), counts, scales


@kernel_operator(
    "npu_grouped_matmul",
    lambda call: [
        ((len(call.x[0]), call.weight[0].shape[-1]), call.output_dtype or call.x[0].dtype)
    ],
    lambda made, call: made,  # a list of one
)
def npu_grouped_matmul(
    x: Sequence[Tensor],
    weight: Sequence[Tensor],
    *,
    bias: Sequence[Tensor] | None = None,
    scale: Sequence[Tensor] | None = None,
    per_token_scale: Sequence[Tensor] | None = None,
    group_list: Tensor | None = None,
    split_item: int = 0,
    group_type: int | None = None,
    group_list_type: int = 0,
    output_dtype: torch.dtype | None = None,
) -> list[Tensor]:
    """Multiplies each group of rows with its own matrix.

    Args:
        x: one tensor, ``[rows, k]``. The rows of a group follow each other.
        weight: one tensor, ``[groups, k, n]``. ``bias`` is one tensor, ``[groups, n]``.
        scale: of weights of int8, one tensor, ``[groups, n]``. ``per_token_scale``, ``[rows]``, is
            of tokens of int8.
        group_list: int64, ``[groups]``, the number of rows of each group (type 1).

    Returns:
        One tensor, ``[rows, n]``. Rows behind the last group are undefined. Here they are NaN, so
        that tests detect a use of them.
    """
    name = "npu_grouped_matmul"
    is_emulated = group_type == 0 and split_item in (2, 3) and len(x) == len(weight) == 1
    require(name, is_emulated, "only groups of rows in one tensor, and one weight, are emulated")
    if group_list is None or group_list_type != COUNTS:
        raise RuntimeError(f"{name}: group_list has to have counts")
    rows = x[0]
    is_restored = scale is not None or output_dtype == torch.int32
    require(name, (rows.dtype == torch.int8) == is_restored, "int8 needs a scale, or int32")
    is_both = (scale is None) == (per_token_scale is None)
    require(name, is_both, "scale and per_token_scale belong together")
    output = _products(rows, weight[0], group_list.cumsum(0))
    if scale is not None and per_token_scale is not None:
        output *= _by_row(scale[0], group_list, len(rows)) * per_token_scale[0].float().unsqueeze(
            -1
        )
    if bias is not None:
        output += _by_row(bias[0], group_list, len(rows))
    return [output.to(output_dtype or rows.dtype)]


def _by_row(of_groups: Tensor, counts: Tensor, num_rows: int) -> Tensor:
    """What each row has of its group, in float32. Rows behind the last group have zeros."""
    of_rows = of_groups.float().repeat_interleave(counts.long(), dim=0)
    return functional.pad(of_rows, (0, 0, 0, num_rows - len(of_rows)))


def _activated(product: Tensor) -> tuple[Tensor, Tensor]:
    """Gates times values, quantized to int8, and the scales of its rows."""
    gates, values = product.chunk(2, dim=-1)
    return npu_dynamic_quant(functional.silu(gates) * values)


def _products(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times its own matrix, in float32. Rows behind the last group are NaN."""
    output = torch.full((len(rows), matrices.shape[-1]), float("nan"))
    first = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        output[first:end] = rows[first:end].float() @ matrix.float()
        first = end
    return output


@kernel_operator(
    "_C_ascend.grouped_matmul_swiglu_quant_weight_nz",
    lambda call: [
        ((len(call.x), call.weight.shape[-1] // 2), torch.int8),
        ((len(call.x),), torch.float32),
        ((0,), torch.float32),
    ],
)
def grouped_matmul_swiglu_quant_weight_nz(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    x_scale: Tensor,
    group_list: Tensor,
    bias: Tensor | None = None,
    swiglu_limit: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The first matrices of experts, their activation, and its quantization to int8.

    Args:
        x: int8, ``[rows, k]``, with the scales ``x_scale``, ``[rows]``.
        weight: int8, ``[experts, k, 2 * n]``, gates before the values. ``weight_scale`` is
            ``[experts, 2 * n]``.
        group_list: int64, ``[experts]``, where the rows of each expert end.

    Returns:
        int8, ``[rows, n]``, and a scale for each row. The third result is not emulated.
    """
    name = "grouped_matmul_swiglu_quant_weight_nz"
    require(name, bias is None and not swiglu_limit, "bias and swiglu_limit are not emulated")
    counts = group_list.diff(prepend=group_list.new_zeros(1))
    product = _products(x, weight, group_list) * x_scale.float().unsqueeze(-1)
    product *= _by_row(weight_scale, counts, len(x))
    quantized, scales = _activated(product.nan_to_num())
    return quantized, scales, torch.empty(0)


@kernel_operator(
    "_C_ascend.npu_dequant_swiglu_quant",
    lambda call: [
        ((len(call.x), call.x.shape[-1] // 2), torch.int8),
        ((len(call.x),), torch.float32),
    ],
)
def npu_dequant_swiglu_quant(
    x: Tensor,
    weight_scale: Tensor | None = None,
    activation_scale: Tensor | None = None,
    bias: Tensor | None = None,
    quant_scale: Tensor | None = None,
    quant_offset: Tensor | None = None,
    group_index: Tensor | None = None,
    activate_left: bool = False,
    quant_mode: int = 0,
    swiglu_mode: int = 0,
    clamp_limit: float | None = None,
    glu_alpha: float = 1.0,
    glu_bias: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Restores a product of matrices of int8, activates it, and quantizes it to int8 again.

    Args:
        x: int32, ``[rows, 2 * n]``, with gates before the values (``activate_left``).
        weight_scale: ``[2 * n]``, or one row for each group. ``activation_scale`` is ``[rows]``.
        group_index: int64, ``[groups]``, the rows of each group. Rows behind them are undefined.
        quant_mode: 1: each row gets its own scale.
        clamp_limit: 0 or None for no limit. Limits, ``glu_alpha`` and ``glu_bias`` of other models
            are not emulated.

    Returns:
        int8, ``[rows, n]``, and the scales of its rows.
    """
    name = "npu_dequant_swiglu_quant"
    others = (bias, quant_scale, quant_offset)
    require(name, others == (None,) * 3, "bias and other scales are not emulated")
    is_plain = not clamp_limit and (glu_alpha, glu_bias) == (1.0, 0.0)
    require(name, activate_left and quant_mode == BY_TOKEN and is_plain, "is not emulated")
    if weight_scale is None or activation_scale is None:
        raise RuntimeError(f"{name}: the scales are needed")
    scales = weight_scale.float().view(-1, x.shape[-1])
    if group_index is not None:
        scales = _by_row(scales, group_index, len(x))
    return _activated(x.float() * scales * activation_scale.float().unsqueeze(-1))


@operator("npu_moe_token_unpermute")
def npu_moe_token_unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None = None
) -> Tensor:
    """Adds up the experts' results of each token, multiplied by the experts' weights.

    Args:
        permuted_tokens: ``[num_tokens * k, hidden]``, sorted by expert.
        sorted_indices: int32, ``[num_tokens * k]``, the row of each token and choice in
            ``permuted_tokens``.
        probs: ``[num_tokens, k]``; without it k is 1.
    """
    rows = permuted_tokens[sorted_indices.long()]
    if probs is None:
        return rows
    weighted = rows.unflatten(0, probs.shape).float() * probs.float().unsqueeze(-1)
    return weighted.sum(1).to(permuted_tokens.dtype)
