# SPDX-License-Identifier: Apache-2.0
"""Norms and activations. They are computed in float32, and returned in the type of their input."""

from __future__ import annotations

import torch
from torch.nn import functional


def npu_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Root mean square norm over the dimensions of ``gamma``.

    Args:
        x: shape ``[..., *gamma.shape]``.
        gamma: the weight, shape of the last dimensions of ``x``.

    Returns:
        ``x / rms(x) * gamma`` in the type of ``x``, and ``1 / rms(x)`` in float32, of the shape of
        ``x`` with ones in the place of the dimensions of ``gamma``.
    """
    return normalize(x, gamma.float(), epsilon)


def normalize(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """``npu_rms_norm`` with a weight in float32."""
    exact = x.float()
    dimensions = tuple(range(x.dim() - weight.dim(), x.dim()))
    inverse_rms = torch.rsqrt(exact.square().mean(dimensions, keepdim=True) + epsilon)
    return (exact * inverse_rms * weight).to(x.dtype), inverse_rms


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(a) * b``, where ``a`` and ``b`` are the halves of ``input`` along ``dim``."""
    gate, up = input.float().chunk(2, dim=dim)
    return (functional.silu(gate) * up).to(input.dtype)


OPERATORS = {"npu_rms_norm": npu_rms_norm, "npu_swiglu": npu_swiglu}
