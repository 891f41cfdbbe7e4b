# SPDX-License-Identifier: Apache-2.0
"""Modules that a build for the device makes, that need its toolkit, or that do nothing here."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch_npu import _emulator

Handle = tuple[int, int, int, int]
"""Of memory: device, bytes, address, and what the runtime calls it."""

_NO_RUNTIME = 0

_when_allocated: list[Callable[[Handle], None]] = []


def init_module(allocated: Callable[[Handle], None], freed: Callable[[int], Handle]) -> None:
    """What is to be called when a pool gets memory. It never gives any back."""
    _when_allocated[:] = [allocated]


def note_allocated(address: int, num_bytes: int) -> None:
    """A pool has got memory."""
    for allocated in _when_allocated:
        allocated((_emulator.current_device(), num_bytes, address, _NO_RUNTIME))


def python_create_and_map(device: int, num_bytes: int, address: int, runtime: int) -> None:
    """Bring memory back. It holds anything."""
    _emulator.map(address)


def python_unmap_and_release(device: int, num_bytes: int, address: int, runtime: int) -> None:
    """Take memory away; its address stays."""
    _emulator.unmap(address)


WHOLE_MODULES: dict[str, dict[str, Any]] = {
    # setup.py writes it, so a source archive has none.
    "vllm_ascend._build_info": {"__device_type__": "A2"},
    # `operators` has those that it defines.
    "vllm_ascend.vllm_ascend_C": {
        "init_module": init_module,
        "python_create_and_map": python_create_and_map,
        "python_unmap_and_release": python_unmap_and_release,
    },
    # Its kernels without data serve graphs only, and want every operator to be defined.
    "vllm_ascend.meta_registration": {},
    # Of operators in a library that a torch for CPUs cannot load; models of text need none.
    "torchvision._meta_registrations": {},
    "torch_npu.op_plugin.atb._atb_ops": {"_register_atb_extensions": lambda: None},
    "torch_npu.profiler": {"dynamic_profile": SimpleNamespace(step=lambda: None)},
}
