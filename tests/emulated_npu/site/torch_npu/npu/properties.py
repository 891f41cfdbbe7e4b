# SPDX-License-Identifier: Apache-2.0
"""What the device says of itself: an Atlas A2 (910B1)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from torch_npu.npu.memory_counts import TOTAL_BYTES

NAME = "Ascend910B1"
SOC_VERSION = 220


def get_soc_version() -> int:
    return SOC_VERSION


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_properties(device: Any = None) -> SimpleNamespace:
    return SimpleNamespace(
        name=NAME,
        total_memory=TOTAL_BYTES,
        cube_core_num=24,
        vector_core_num=48,
        uuid="emulated-0",
    )


def get_device_capability(device: Any = None) -> None:
    return None


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def can_device_access_peer(device: int, peer: int) -> bool:
    return False


def utilization(device: Any = None) -> int:
    return 0
