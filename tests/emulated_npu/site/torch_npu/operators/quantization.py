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


OPERATORS = {"npu_dynamic_quant": npu_dynamic_quant}
