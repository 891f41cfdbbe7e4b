# SPDX-License-Identifier: Apache-2.0
"""8-bit integers with one scale per token."""

from __future__ import annotations

import torch
from torch import Tensor


def dynamic_quant(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ``x`` as int8, and by tokens the scale that turns it back.

    The largest value of a token becomes 127.
    """
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale == 0, 0, (x.float() / scale).round())
    return quantized.to(torch.int8), scale.squeeze(-1)


def rms_norm_dynamic_quant(
    x: Tensor,
    gamma: Tensor,
    smooth_scale: Tensor | None = None,
    beta: Tensor | None = None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """``dynamic_quant`` of what the norm returns."""
    if smooth_scale is not None:
        raise RuntimeError("npu_rms_norm_dynamic_quant: smooth_scale is not emulated")
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * gamma.float()
    return dynamic_quant(wide if beta is None else wide + beta.float())


def quant_matmul(
    x1: Tensor,
    x2: Tensor,
    scale: Tensor,
    *,
    pertoken_scale: Tensor | None = None,
    bias: Tensor | None = None,
    output_dtype: torch.dtype = torch.float16,
) -> Tensor:
    """``x1`` times ``x2``, both int8, as what they stand for.

    Args:
        x1: shape ``[tokens, in]``.
        x2: shape ``[in, out]``.
        scale: of ``x2``, shape ``[out]``.
        pertoken_scale: of ``x1``, shape ``[tokens]``.
    """
    if bias is not None:
        raise RuntimeError("npu_quant_matmul: bias is not emulated")
    wide = torch.matmul(x1.double(), x2.double()) * scale.double()  # exact, as int32 is
    if pertoken_scale is not None:
        wide = wide * pertoken_scale.double().unsqueeze(-1)
    return wide.to(output_dtype)


OPERATORS = {
    "npu_rms_norm_dynamic_quant(Tensor x, Tensor gamma, Tensor? smooth_scale=None,"
    " Tensor? beta=None, float epsilon=1e-6) -> (Tensor, Tensor)": rms_norm_dynamic_quant,
}
