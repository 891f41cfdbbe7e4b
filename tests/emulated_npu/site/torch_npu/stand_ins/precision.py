# SPDX-License-Identifier: Apache-2.0
"""Casts to bfloat16 that modules of vLLM-Ascend make whatever the model's type is.

The device has nothing better there. Here they would hide differences: such a module sees float32 in
the place of bfloat16, unless ``EMULATED_NPU_EXACT`` is 0.
"""

from __future__ import annotations

import os
from typing import Any

import torch

MODULES = ("vllm_ascend.attention.dsa_v1", "vllm_ascend.attention.mla_v1")


class _TorchWithoutBfloat16:
    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


IS_EXACT = os.environ.get("EMULATED_NPU_EXACT", "1") == "1"
STAND_INS = {(module, "torch"): _TorchWithoutBfloat16() for module in MODULES if IS_EXACT}

STAND_INS["vllm_ascend.models.layer.attention.layer", "kv_cache_dtype_str_to_dtype"] = (
    lambda name, model_config: torch.bfloat16
)
"""Compressed keys of DeepSeek-V4, which vLLM-Ascend keeps in the model's type, and those of windows
in bfloat16. So a model in float32 would have pages of a size that no device sees."""
