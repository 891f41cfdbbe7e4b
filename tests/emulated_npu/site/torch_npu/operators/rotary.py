# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Rotary embeddings.

An angle rotates a pair of numbers. The two numbers of a pair are in the two halves of a head
("half", called neox style in vLLM) or side by side ("interleave").
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_npu.kernels import operator, require

ROPE_SIZE = 64  # the only size of npu_interleave_rope and npu_kv_rmsnorm_rope_cache


@operator("_npu_rotary_embedding")
def _npu_rotary_embedding(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    head_size: int,
    cos_sin_cache: Tensor,
    is_neox_style: bool = True,
) -> None:
    """Rotates whole heads of ``query`` and ``key`` in place, with pairs in halves.

    Args:
        positions: int64, shape ``[num_tokens]``.
        query: shape ``[num_tokens, num_heads * head_size]``; ``key`` with its own number of heads.
        cos_sin_cache: shape ``[max_positions, head_size]``. The first half of a row has cosines,
            the second half sines.
    """
    is_emulated = is_neox_style and cos_sin_cache.shape[-1] == head_size
    require("_npu_rotary_embedding", is_emulated, "only whole heads in neox style are emulated")
    turned = npu_mrope(positions, query, key, cos_sin_cache, head_size)
    for tensor, result in zip((query, key), turned, strict=True):
        tensor.copy_(result)


@operator("npu_mrope")
def npu_mrope(
    positions: Tensor,
    query: Tensor,
    key: Tensor,
    cos_sin_cache: Tensor,
    head_size: int,
    *,
    mrope_section: Sequence[int] | None = None,
    rotary_mode: str = "half",
    cache_mode: str = "default",
) -> tuple[Tensor, Tensor]:
    """The same as ``_npu_rotary_embedding``, with new tensors as the results.

    If the cache has fewer numbers than a head, only the first numbers of a head are rotated.

    Args:
        mrope_section: sections of positions in several dimensions. They must be zeros.
    """
    given = (rotary_mode, cache_mode, any(mrope_section or ()))
    require("npu_mrope", given == ("half", "default", False), f"{given} is not emulated")
    cos, sin = cos_sin_cache[positions.flatten()].unsqueeze(1).chunk(2, dim=-1)
    cos = torch.cat((cos, cos), -1)
    sin = torch.cat((sin, sin), -1)
    size = cos.shape[-1]

    def turned(tensor: Tensor) -> Tensor:
        heads = tensor.view(tensor.shape[0], -1, head_size)
        part = npu_rotary_mul(heads[..., :size], cos, sin)
        return torch.cat((part, heads[..., size:]), -1).view(tensor.shape)

    return turned(query), turned(key)


@operator("npu_rotary_mul")
def npu_rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half") -> Tensor:
    """``input * r1 + rotated(input) * r2``.

    Args:
        input: shape ``[..., head_size]``; ``r1`` (cosines) and ``r2`` (sines) broadcast to it.
        rotary_mode: says which numbers make a pair ``(a, b)``. A pair is rotated to ``(-b, a)``.
    """
    require("npu_rotary_mul", rotary_mode in ("half", "interleave"), f"rotary_mode {rotary_mode!r}")
    exact = input.float()
    if rotary_mode == "half":
        first, second = exact.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    else:
        turned = torch.stack((-exact[..., 1::2], exact[..., ::2]), dim=-1).flatten(-2)
    return (exact * r1 + turned * r2).to(input.dtype)


@operator("npu_interleave_rope")
def npu_interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Sorts the interleaved pairs of ``x`` into halves, then rotates them as halves.

    Args:
        x: shape ``[batch, num_heads, tokens, 64]``.
        cos: shape ``[batch, 1, tokens or 1, 64]``, as ``sin``.
    """
    is_met = x.dim() == cos.dim() == 4 and x.shape[-1] == ROPE_SIZE and cos.shape[1] == 1
    require("npu_interleave_rope", is_met, "x is [batch, heads, tokens, 64], cos for all heads")
    return npu_rotary_mul(torch.cat((x[..., ::2], x[..., 1::2]), dim=-1), cos, sin)


@operator("_C_ascend.inplace_partial_rotary_mul")
def inplace_partial_rotary_mul(
    x: Tensor,
    r1: Tensor,
    r2: Tensor,
    rotary_mode: str,
    partial_slice: Sequence[int],
    negate_sin: bool = False,
) -> None:
    """Rotates a slice of each head.

    Args:
        x: shape ``[tokens, 1, heads, head_size]``.
        r1: cosines, shape ``[tokens, 1, 1, end - first]``.
        r2: sines, as ``r1``.
        partial_slice: first and end element.
        negate_sin: whether to rotate backwards.
    """
    if rotary_mode != "interleave" or x.dim() != 4:
        raise RuntimeError(f"inplace_partial_rotary_mul: {rotary_mode=}, x {x.shape}: not emulated")
    part = x[..., slice(*partial_slice)]
    sin = -r2.float() if negate_sin else r2.float()
    part.copy_(npu_rotary_mul(part, r1.float(), sin, rotary_mode))
