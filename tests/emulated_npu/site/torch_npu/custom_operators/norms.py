# SPDX-License-Identifier: Apache-2.0
"""Root mean square norms of vllm-ascend's own library."""

from __future__ import annotations

import torch

from torch_npu.operators.norms import normalize
from torch_npu.operators.refusals import refuse_given


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
    """The norm of ``x1 + x2``, ``1 / rms`` in float32, and ``x1 + x2``."""
    refuse_given("npu_add_rms_norm_bias", {"beta": beta})
    total = x1 + x2
    return *normalize(total, gamma.float(), epsilon), total


OPERATORS = {
    "npu_gemma_rms_norm": npu_gemma_rms_norm,
    "npu_add_rms_norm_bias": npu_add_rms_norm_bias,
}
