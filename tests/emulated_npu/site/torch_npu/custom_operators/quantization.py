# SPDX-License-Identifier: Apache-2.0
"""A norm whose result is quantized."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_npu.operators.quantization import npu_dynamic_quant


def rms_norm_dynamic_quant(
    x: Tensor,
    gamma: Tensor,
    smooth_scale: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Returns int8 and scales by tokens, as ``npu_dynamic_quant``."""
    if smooth_scale is not None:
        raise NotImplementedError("npu_rms_norm_dynamic_quant: smooth_scale is not emulated")
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    return npu_dynamic_quant(wide if beta is None else wide + beta.float())


OPERATORS = {
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None,"
    " Tensor? beta=None, float epsilon=1e-6) -> (Tensor, Tensor)": rms_norm_dynamic_quant,
}
