# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stands for modules that only a build for the device has, or that need its toolkit."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch_npu import _emulator

Handle = tuple[int, int, int, int]
"""The handle of memory: device, bytes, address, and the runtime's name for it."""

_NO_RUNTIME = 0

_when_allocated: list[Callable[[Handle], None]] = []


def init_module(allocated: Callable[[Handle], None], freed: Callable[[int], Handle]) -> None:
    """Set the function to call when a pool gets memory. A pool never frees memory."""
    _when_allocated[:] = [allocated]


def note_allocated(address: int, num_bytes: int) -> None:
    """Call the functions for memory that a pool has got."""
    for allocated in _when_allocated:
        allocated((_emulator.current_device(), num_bytes, address, _NO_RUNTIME))


def python_create_and_map(device: int, num_bytes: int, address: int, runtime: int) -> None:
    """Map memory again. Its contents are undefined."""
    _emulator.map(address)


def python_unmap_and_release(device: int, num_bytes: int, address: int, runtime: int) -> None:
    """Unmap memory. Its address stays reserved."""
    _emulator.unmap(address)


WHOLE_MODULES: dict[str, dict[str, Any]] = {
    # setup.py writes this module, so a source archive does not have it.
    "vllm_ascend._build_info": {"__device_type__": "A2"},
    # `operators` defines the operators of this module.
    "vllm_ascend.vllm_ascend_C": {
        "init_module": init_module,
        "python_create_and_map": python_create_and_map,
        "python_unmap_and_release": python_unmap_and_release,
    },
    # Kernels of this module have no data and serve graphs only. They require every operator.
    "vllm_ascend.meta_registration": {},
    # A torch for CPUs cannot load the library of these operators. Models of text do not need
    # them.
    "torchvision._meta_registrations": {},
    "torch_npu.op_plugin.atb._atb_ops": {"_register_atb_extensions": lambda: None},
    "torch_npu.profiler": {"dynamic_profile": SimpleNamespace(step=lambda: None)},
}
