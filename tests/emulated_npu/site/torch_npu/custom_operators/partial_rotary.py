# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of a part of each head, in place."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from torch_npu.operators.rotary import npu_rotary_mul


def inplace_partial_rotary_mul(
    x: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str, partial_slice: Sequence[int]
) -> None:
    """Turns a slice of each head.

    Args:
        x: shape ``[tokens, 1, heads, head_size]``.
        r1: cosines, shape ``[tokens, 1, 1, end - first]``.
        r2: sines, as ``r1``.
        partial_slice: first and end element.
    """
    if rotary_mode != "interleave" or x.dim() != 4:
        raise RuntimeError(f"inplace_partial_rotary_mul: {rotary_mode=}, x {x.shape}: not emulated")
    part = x[..., slice(*partial_slice)]
    part.copy_(npu_rotary_mul(part, r1.float(), r2.float(), rotary_mode))


OPERATORS = {"inplace_partial_rotary_mul": inplace_partial_rotary_mul}
