# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Norms and activations. They are computed in float32, and returned in the type of their input."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from torch_npu.kernels import operator, require


@operator("npu_rms_norm")
def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """Root mean square norm over the last dimensions of ``x``, which ``gamma`` has.

    Returns:
        ``x / rms(x) * gamma`` in the type of ``x``, and ``1 / rms(x)`` in float32. The second has
        the shape of ``x``, with ones in the place of the dimensions of ``gamma``.
    """
    exact = x.float()
    dimensions = tuple(range(x.dim() - gamma.dim(), x.dim()))
    inverse_rms = (exact.square().mean(dimensions, keepdim=True) + epsilon).rsqrt()
    return (exact * inverse_rms * gamma.float()).to(x.dtype), inverse_rms


@operator("_C_ascend.npu_gemma_rms_norm")
def npu_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """``npu_rms_norm`` with the weight ``1 + gamma``, added in float32."""
    return npu_rms_norm(x, 1.0 + gamma.float(), epsilon)


@operator("_C_ascend.npu_add_rms_norm_bias")
def npu_add_rms_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    """The norm of ``x1 + x2``, ``1 / rms`` in float32, and ``x1 + x2``."""
    require("npu_add_rms_norm_bias", beta is None, "beta is not emulated")
    total = x1 + x2
    return *npu_rms_norm(total, gamma, epsilon), total


@operator("_C_ascend.npu_rms_norm_cast")
def npu_rms_norm_cast(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The norm in the type of ``x``, and the same numbers in float32."""
    normed, _ = npu_rms_norm(x, gamma, epsilon)
    return normed, normed.float()


@operator("npu_swiglu")
def npu_swiglu(input: Tensor, dim: int = -1) -> Tensor:
    """``silu(a) * b``, where ``a`` and ``b`` are the halves of ``input`` along ``dim``."""
    gate, up = input.float().chunk(2, dim=dim)
    return (functional.silu(gate) * up).to(input.dtype)
