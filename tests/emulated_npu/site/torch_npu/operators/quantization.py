# SPDX-License-Identifier: Apache-2.0
"""8-bit integers with one scale per token."""

from __future__ import annotations

import torch
from torch import Tensor


def npu_dynamic_quant(x: Tensor, *, dst_type: torch.dtype = torch.int8) -> tuple[Tensor, Tensor]:
    """Returns ``x`` as int8, and by tokens the scale that turns it back.

    The largest value of a token becomes 127.
    """
    if dst_type != torch.int8:
        raise NotImplementedError(f"npu_dynamic_quant: {dst_type} is not emulated")
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    quantized = torch.where(scale == 0, 0, (x.float() / scale).round())
    return quantized.to(torch.int8), scale.squeeze(-1)


def npu_quant_matmul(
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
        raise NotImplementedError("npu_quant_matmul: bias is not emulated")
    wide = torch.matmul(x1.double(), x2.double()) * scale.double()  # exact, as int32 is
    if pertoken_scale is not None:
        wide = wide * pertoken_scale.double().unsqueeze(-1)
    return wide.to(output_dtype)


OPERATORS = {"npu_dynamic_quant": npu_dynamic_quant, "npu_quant_matmul": npu_quant_matmul}
