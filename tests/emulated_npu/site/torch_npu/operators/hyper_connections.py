# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Hyper connections: a residual of several streams, collapsed before a block and mixed after it.

On the device ``npu_hc_pre_v2`` takes bfloat16, four streams and a hidden size of 4,096 or 7,168.
The arithmetic does not depend on these limits, so other sizes and types are taken as well. Results
that the device returns in bfloat16 have the type of ``x`` here.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.kernels import operator


@operator("_C_ascend.npu_hc_pre_v2")
def hc_pre(
    x: Tensor,
    hc_fn: Tensor,
    hc_scale: Tensor,
    hc_base: Tensor,
    hc_mult: int,
    hc_sinkhorn_iters: int,
    norm_eps: float,
    hc_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Collapses the streams of ``x``, and returns the weights with which ``hc_post`` mixes them.

    One projection of all streams together is divided by their root mean square. It gives each token
    one weight per stream to collapse with, one weight per stream to write back with, and a matrix
    that mixes the streams. The rows and the columns of the matrix are divided by their sums in
    turn, until all sums are nearly one (Sinkhorn-Knopp).

    Args:
        x: shape ``[..., streams, hidden]``.
        hc_fn: float32, shape ``[(2 + streams) * streams, streams * hidden]``.
        hc_scale: float32, shape ``[3]``.
        hc_base: float32, shape ``[(2 + streams) * streams]``.

    Returns:
        The collapsed streams, ``[..., hidden]``; in float32 the weights to write back with,
        ``[..., streams]``, and the matrix, ``[..., streams, streams]``.
    """
    if x.shape[-2] != hc_mult or hc_fn.shape[1] != x.shape[-2] * x.shape[-1]:
        raise RuntimeError(f"npu_hc_pre_v2: {hc_mult=}, x {x.shape} and hc_fn {hc_fn.shape}")
    sizes = [hc_mult, hc_mult, hc_mult * hc_mult]
    flat = x.flatten(-2).float()
    mixes = torch.nn.functional.linear(flat, hc_fn)
    mixes = mixes * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = (
        weights * hc_scale[number] + base
        for number, (weights, base) in enumerate(
            zip(mixes.split(sizes, -1), hc_base.split(sizes), strict=True)
        )
    )
    comb = comb.unflatten(-1, (hc_mult, hc_mult)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    collapsed = ((pre.sigmoid() + hc_eps).unsqueeze(-1) * x.float()).sum(-2)
    return collapsed.to(x.dtype), 2 * post.sigmoid(), comb


@operator("_C_ascend.npu_hc_post")
def hc_post(x: Tensor, residual: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Adds ``x`` to every stream of the mixed residual.

    Args:
        x: shape ``[..., hidden]``.
        residual: shape ``[..., streams, hidden]``, of the type of ``x``.
        post: shape ``[..., streams]``.
        comb: shape ``[..., streams, streams]``, of the type of ``post``.
    """
    if residual.dtype != x.dtype or comb.dtype != post.dtype:
        raise RuntimeError("npu_hc_post: x and residual, post and comb have to be of one type")
    mixed = torch.matmul(comb.float().transpose(-1, -2), residual.float())
    return (post.float().unsqueeze(-1) * x.float().unsqueeze(-2) + mixed).to(residual.dtype)
