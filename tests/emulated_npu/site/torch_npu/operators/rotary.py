# SPDX-License-Identifier: Apache-2.0
"""Rotary embeddings.

A pair of numbers that is turned by an angle lies either in the two halves of a head ("half", called
neox style in vLLM) or side by side ("interleave").
"""

from __future__ import annotations

import torch

from torch_npu.operators.refusals import refuse_given, require

ROPE_SIZE = 64  # the only size of npu_interleave_rope and npu_kv_rmsnorm_rope_cache


def _npu_rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox_style: bool = True,
) -> None:
    """Turns ``query`` and ``key`` in place.

    Args:
        positions: int64, shape ``[num_tokens]``.
        query: shape ``[num_tokens, num_heads * head_size]``; ``key`` with its own number of heads.
        cos_sin_cache: shape ``[max_positions, rotary_size]``, cosines in the first half of a row,
            sines in the second; the first ``rotary_size`` numbers of each head are turned.
    """
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    rotary_size = cos_sin_cache.shape[-1]
    for tensor in (query, key):
        turned = tensor.view(tensor.shape[0], -1, head_size)[..., :rotary_size]
        first, second = _pairs(turned.float(), is_neox_style)
        pairs = (first * cos - second * sin, second * cos + first * sin)
        turned.copy_(_join(pairs, is_neox_style))


def npu_rotary_mul(
    input: torch.Tensor,
    r1: torch.Tensor,
    r2: torch.Tensor,
    rotary_mode: str = "half",
    rotate: torch.Tensor | None = None,
) -> torch.Tensor:
    """``input * r1 + rotated(input) * r2``.

    Args:
        input: shape ``[..., head_size]``; ``r1`` (cosines) and ``r2`` (sines) broadcast to it.
        rotary_mode: which numbers make a pair ``(a, b)``, rotated to ``(-b, a)``.
    """
    refuse_given("npu_rotary_mul", {"rotate": rotate})
    require("npu_rotary_mul", rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    is_half = rotary_mode == "half"
    exact = input.float()
    first, second = _pairs(exact, is_half)
    return (exact * r1 + _join((-second, first), is_half) * r2).to(input.dtype)


def npu_interleave_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Sorts the interleaved pairs of ``x`` into halves, then turns them as halves.

    Args:
        x: shape ``[batch, num_heads, tokens, 64]``.
        cos: shape ``[batch, 1, tokens or 1, 64]``, as ``sin``.
    """
    require(
        "npu_interleave_rope",
        x.dim() == 4 and x.shape[-1] == ROPE_SIZE,
        "x has 4 dimensions, the last of 64",
    )
    require(
        "npu_interleave_rope", cos.dim() == 4 and cos.shape[1] == 1, "cos is [batch, 1, tokens, 64]"
    )
    return npu_rotary_mul(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin)


def _pairs(x: torch.Tensor, is_half: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if is_half:
        first, second = x.chunk(2, dim=-1)
        return first, second
    return x[..., ::2], x[..., 1::2]


def _join(pairs: tuple[torch.Tensor, torch.Tensor], is_half: bool) -> torch.Tensor:
    return torch.cat(pairs, dim=-1) if is_half else torch.stack(pairs, dim=-1).flatten(-2)


OPERATORS = {
    "_npu_rotary_embedding": _npu_rotary_embedding,
    "npu_rotary_mul": npu_rotary_mul,
    "npu_interleave_rope": npu_interleave_rope,
}
