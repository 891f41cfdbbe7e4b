"""Rotary embedding of a part of each head, in place."""

import torch


def rotate_interleaved(x, cos, sin):
    """Turns neighbouring elements of ``x`` as pairs; ``cos`` and ``sin`` have every angle twice."""
    pairs = x.unflatten(-1, (-1, 2))
    return x * cos + torch.stack((-pairs[..., 1], pairs[..., 0]), -1).flatten(-2) * sin


def inplace_partial_rotary_mul(x, r1, r2, rotary_mode, partial_slice):
    """``x`` [tokens, 1, heads, head size]; ``r1`` and ``r2`` are cosines and sines [tokens, 1, 1, width of the slice]."""
    if rotary_mode != "interleave" or x.dim() != 4:
        raise RuntimeError(f"inplace_partial_rotary_mul: {rotary_mode=} with {x.dim()} dimensions is not emulated")
    part = x[..., slice(*partial_slice)]
    part.copy_(rotate_interleaved(part.float(), r1.float(), r2.float()))
