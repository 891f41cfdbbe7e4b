# SPDX-License-Identifier: Apache-2.0
"""Root mean square norms of vllm-ascend's own library."""

from __future__ import annotations

import torch

from torch_npu.operators.norms import normalize


def npu_gemma_rms_norm(
    x: torch.Tensor, gamma: torch.Tensor, epsilon: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``npu_rms_norm`` with the weight ``1 + gamma``, added in float32."""
    return normalize(x, 1.0 + gamma.float(), epsilon)


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
    normalized, inverse_rms = normalize(total, gamma.float(), epsilon)
    if beta is not None:
        normalized = normalized + beta
    return normalized, inverse_rms, total


OPERATORS = {
    "npu_gemma_rms_norm(Tensor x, Tensor gamma, float epsilon=1e-6)"
    " -> (Tensor y, Tensor rstd)": npu_gemma_rms_norm,
    "npu_add_rms_norm_bias(Tensor x1, Tensor x2, Tensor gamma, Tensor? beta=None,"
    " float epsilon=1e-6) -> (Tensor y, Tensor rstd, Tensor x)": npu_add_rms_norm_bias,
}
