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
    return _normalize(x, gamma.float(), epsilon)


def npu_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu_rms_norm`` with the weight ``1 + gamma``, added in float32."""
    return _normalize(x, 1.0 + gamma.float(), epsilon)


def npu_add_rms_norm_bias(
    x1: torch.Tensor,
    x2: torch.Tensor,
    gamma: torch.Tensor,
    beta: torch.Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Norm of ``x1 + x2``, plus ``beta``.

    Returns:
        The norm, ``1 / rms`` in float32, and ``x1 + x2`` in the type of ``x1``.
    """
    total = x1 + x2
    normalized, inverse_rms = _normalize(total, gamma.float(), epsilon)
    if beta is not None:
        normalized = normalized + beta
    return normalized, inverse_rms, total


def _normalize(
    x: torch.Tensor, weight: torch.Tensor, epsilon: float
) -> tuple[torch.Tensor, torch.Tensor]:
    exact = x.float()
    dimensions = tuple(range(x.dim() - weight.dim(), x.dim()))
    inverse_rms = torch.rsqrt(exact.square().mean(dimensions, keepdim=True) + epsilon)
    return (exact * inverse_rms * weight).to(x.dtype), inverse_rms


def npu_swiglu(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """``silu(a) * b``, where ``a`` and ``b`` are the halves of ``input`` along ``dim``."""
    gate, up = input.float().chunk(2, dim=dim)
    return (functional.silu(gate) * up).to(input.dtype)
