# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The loader of scales of 8-bit keys and values, for a device that torch knows by extension only.

vLLM-Ascend gives a parameter of the device a tensor of the host as its data. torch refuses this for
the emulated NPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_scale(param: torch.nn.Parameter, loaded_weight: Tensor) -> None:
    """Set a parameter to a checkpoint's scales or offsets, one for each channel."""
    param.data = loaded_weight.flatten().to(param.device, param.dtype)


STAND_INS = {
    (f"vllm_ascend.quantization.methods.{module}", "_c8_kv_scale_weight_loader"): load_scale
    for module in ("kv_cache.kv_c8", "kv_c8")  # Releases differ.
}
