# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts: the experts' matrices, and the sum of what they make of a token."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torch_npu.operators.refusals import refuse_given, require

COUNTS = 1  # group_list_type


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
        group_list: int64, ``[groups]``: how many rows each group has (type 1).

    Returns:
        One tensor, ``[rows, n]``. Rows behind the last group are undefined; here they are not a
        number, so that it is seen if they are used.
    """
    name = "npu_grouped_matmul"
    refuse_given(name, {"scale": scale, "per_token_scale": per_token_scale})
    is_emulated = group_type == 0 and split_item in (2, 3) and len(x) == len(weight) == 1
    require(name, is_emulated, "only groups of rows in one tensor, and one weight, are emulated")
    if group_list is None or group_list_type != COUNTS:
        raise RuntimeError(f"{name}: group_list has to have counts")
    rows, matrices = x[0], weight[0]
    output = torch.full((len(rows), matrices.shape[-1]), float("nan"))
    first = 0
    for group, end in enumerate(group_list.cumsum(0).tolist()):
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


OPERATORS = {"npu_moe_token_unpermute": npu_moe_token_unpermute}
KERNELS = {
    "npu_grouped_matmul": (
        npu_grouped_matmul,
        grouped_matmul_outputs,
        lambda made, *args, **kwargs: made,  # a list of one
    )
}
