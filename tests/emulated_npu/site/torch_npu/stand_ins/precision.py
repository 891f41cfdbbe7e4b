# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Removes casts to bfloat16 that modules of vLLM-Ascend make for every type of a model.

The device has no better type there. Here these casts would hide differences. So such a module sees
float32 in the place of bfloat16.
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
"""Specs of DeepSeek-V4's keys. vLLM-Ascend keeps these keys in the model's type.

In float32 their pages would have a size that they never have on a device.
"""
