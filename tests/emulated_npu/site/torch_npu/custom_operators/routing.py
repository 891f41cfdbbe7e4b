# SPDX-License-Identifier: Apache-2.0
"""The experts of a token: by its id, or by its scores."""

from __future__ import annotations

import torch
from torch import Tensor

ROOT_OF_SOFTPLUS = 2  # norm_type


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
) -> tuple[Tensor, Tensor, Tensor]:
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
    scores = torch.nn.functional.softplus(x.float()).sqrt()
    if tid2eid is None:
        experts = (scores if bias is None else scores + bias.float()).topk(k, -1).indices
    elif input_ids is None or input_ids.numel() != x.shape[0]:
        raise RuntimeError(f"moe_gating_top_k_hash: not one of input_ids per row of x {x.shape}")
    else:
        experts = tid2eid[input_ids.flatten().long()].long()
    weights = scores.gather(1, experts)
    weights = weights / (weights.sum(-1, keepdim=True) + eps) * routed_scaling_factor
    return weights.to(x.dtype), experts.to(torch.int32), scores


OPERATORS = {
    "moe_gating_top_k_hash(Tensor x, int k, Tensor? bias=None, Tensor? input_ids=None,"
    " Tensor? tid2eid=None, int k_group=1, int group_count=1, float routed_scaling_factor=1.0,"
    " float eps=1e-20, int group_select_mode=0, int renorm=0, int norm_type=0,"
    " bool out_flag=False) -> (Tensor, Tensor, Tensor)": moe_gating_top_k_hash,
}
