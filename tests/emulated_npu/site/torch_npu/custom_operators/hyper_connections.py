"""Hyper connections: a residual of several streams, collapsed before a block and mixed after it.

On the device ``npu_hc_pre_v2`` takes bfloat16 with a hidden size of 4,096 or 7,168, and four streams. The arithmetic
depends on none of that, so any hidden size and floating type is taken here: results come in the type of ``x``.
"""

import torch


def hc_pre(x, hc_fn, hc_scale, hc_base, hc_mult, hc_sinkhorn_iters, norm_eps, hc_eps):
    """Collapses the streams of ``x`` [..., streams, hidden]; also returns the weights that ``hc_post`` needs, in float32.

    One projection of all streams together, divided by their root mean square, gives for each token: a weight per stream
    to collapse with, a weight per stream to write back with, and a matrix that mixes the streams. The matrix is brought
    close to a doubly stochastic one by dividing rows and columns by their sums in turn (Sinkhorn-Knopp).
    """
    if x.shape[-2] != hc_mult or hc_fn.shape != ((2 + hc_mult) * hc_mult, x.shape[-2] * x.shape[-1]):
        raise RuntimeError(f"npu_hc_pre_v2: {hc_mult} streams, but x {tuple(x.shape)} and hc_fn {tuple(hc_fn.shape)}")
    flat = x.flatten(-2).float()
    mixes = torch.nn.functional.linear(flat, hc_fn) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    pre, post, comb = mixes.split([hc_mult, hc_mult, hc_mult * hc_mult], dim=-1)
    pre_base, post_base, comb_base = hc_base.split([hc_mult, hc_mult, hc_mult * hc_mult])
    pre = torch.sigmoid(pre * hc_scale[0] + pre_base) + hc_eps
    post = 2 * torch.sigmoid(post * hc_scale[1] + post_base)
    comb = (comb * hc_scale[2] + comb_base).unflatten(-1, (hc_mult, hc_mult)).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(hc_sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return (pre.unsqueeze(-1) * x.float()).sum(-2).to(x.dtype), post, comb


def hc_post(x, residual, post, comb):
    """Writes ``x`` [..., hidden] back into every stream, beside the mixed streams of ``residual`` [..., streams, hidden]."""
    if residual.dtype != x.dtype or comb.dtype != post.dtype:
        raise RuntimeError("npu_hc_post: x and residual, and post and comb, have to have one type each")
    mixed = torch.matmul(comb.float().transpose(-1, -2), residual.float())
    return (post.float().unsqueeze(-1) * x.float().unsqueeze(-2) + mixed).to(residual.dtype)
