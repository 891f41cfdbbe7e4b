# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The operator that prints from the device. vLLM-Ascend starts only if it exists."""

from __future__ import annotations

from torch import Tensor

from torch_npu.kernels import operator


@operator("_C_ascend.device_print(str value) -> ()")
def device_print(value: str) -> None:
    raise NotImplementedError("device_print is not emulated")


@operator("_C_ascend.device_print_tensor(Tensor value) -> ()")
def device_print_tensor(value: Tensor) -> None:
    raise NotImplementedError("device_print_tensor is not emulated")
