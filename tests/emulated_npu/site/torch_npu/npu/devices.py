# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The devices: as many A2 (Ascend 910B1) as ``EMULATED_NPU_DEVICES`` says."""

from __future__ import annotations

import types
from typing import Any

import torch

from torch_npu import _emulator

SOC_OF_A2 = 220
NAME = "Ascend910B1"
CUBE_CORES = 24
VECTOR_CORES = 48
MEMORY_BYTES = 8 << 30
"""Memory of each device. A tensor that does not fit raises, as on a device."""


def index_of(device: Any) -> int:
    """The number of a device. It can be given in any form; None is the current device."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def current_device() -> int:
    return _emulator.current_device()


def device_count() -> int:
    return _emulator.device_count()


def set_device(device: Any) -> None:
    _emulator.set_device(index_of(device))


class device:  # noqa: N801 (torch's name)
    """A context in which a device is the current one."""

    def __init__(self, device: Any) -> None:
        self._index = index_of(device)
        self._before = self._index

    def __enter__(self) -> None:
        self._before = current_device()
        _emulator.set_device(self._index)

    def __exit__(self, *error: object) -> None:
        _emulator.set_device(self._before)


def get_soc_version() -> int:
    return SOC_OF_A2


def get_device_name(device: Any = None) -> str:
    return NAME


def get_device_properties(device: Any = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        name=NAME,
        total_memory=MEMORY_BYTES,
        cube_core_num=CUBE_CORES,
        vector_core_num=VECTOR_CORES,
        uuid=f"emulated-{index_of(device)}",
    )
