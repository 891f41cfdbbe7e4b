# SPDX-License-Identifier: Apache-2.0
"""Casts to bfloat16 that modules of vLLM-Ascend make whatever the model's type is.

The device has nothing better there. Here they would hide differences: such a module sees float32 in
the place of bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch

MODULES = ("vllm_ascend.attention.dsa_v1", "vllm_ascend.attention.mla_v1")


class _TorchWithoutBfloat16:
    bfloat16 = torch.float32

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


STAND_INS = {(module, "torch"): _TorchWithoutBfloat16() for module in MODULES}

for _module in ("layer.attention.layer", "deepseek_v4.model"):
    STAND_INS[f"vllm_ascend.models.{_module}", "kv_cache_dtype_str_to_dtype"] = (
        lambda name, model_config: torch.bfloat16
    )
"""Keys of DeepSeek-V4, which vLLM-Ascend keeps in the model's type: in float32, pages would have
a size that no device sees."""
