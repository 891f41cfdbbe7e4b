# SPDX-License-Identifier: Apache-2.0
"""Rotary embedding of a part of each head, in place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns neighbouring elements of ``x`` as pairs; ``cos`` and ``sin`` have each angle twice."""
    pairs = x.unflatten(-1, (-1, 2))
    turned = torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2)
    return x * cos + turned * sin


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
    part.copy_(rotate_interleaved(part.float(), r1.float(), r2.float()))


OPERATORS = {
    "inplace_partial_rotary_mul(Tensor(a!) x, Tensor r1, Tensor r2, str rotary_mode,"
    " int[] partial_slice) -> ()": inplace_partial_rotary_mul,
}
