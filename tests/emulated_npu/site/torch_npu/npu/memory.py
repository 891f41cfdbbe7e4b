# SPDX-License-Identifier: Apache-2.0
"""Statistics of memory: what tensors on npu have, without an allocator's caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torch_npu import _emulator
from torch_npu.npu.devices import MEMORY_BYTES


def memory_allocated(device: Any = None) -> int:
    return _emulator.allocated_bytes()


def max_memory_allocated(device: Any = None) -> int:
    return _emulator.peak_bytes()


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def mem_get_info(device: Any = None) -> tuple[int, int]:
    """Free bytes, and all of them."""
    return MEMORY_BYTES - memory_allocated(), MEMORY_BYTES


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.current": memory_allocated(),
        "allocated_bytes.all.peak": max_memory_allocated(),
        "reserved_bytes.all.current": memory_reserved(),
        "reserved_bytes.all.peak": max_memory_reserved(),
        "num_alloc_retries": 0,
    }


def reset_peak_memory_stats(device: Any = None) -> None:
    _emulator.reset_peak_bytes()


def empty_cache() -> None:
    """There is no cache."""


torch.accelerator.empty_host_cache = empty_cache
"""torch asks its own allocator of pinned memory, and there is none."""


class NPUPluggableAllocator:
    """The allocator of vLLM-Ascend's library; see ``stand_ins.compiled_modules``.

    Args:
        path: Of the library, which is not loaded.
        allocate, free: Names of its functions.
    """

    def __init__(self, path: str | None, allocate: str, free: str) -> None:
        self._allocator = self


class MemPool:
    """Memory that is not given back when its tensors are gone."""

    def __init__(self, allocator: NPUPluggableAllocator | None = None) -> None:
        if allocator is None:
            raise NotImplementedError("MemPool: the emulated NPU has pools of an allocator only")


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """What is allocated in here belongs to a pool, and can be unmapped."""
    from torch_npu.stand_ins import compiled_modules

    _emulator.begin_pool(compiled_modules.note_allocated)
    try:
        yield
    finally:
        _emulator.end_pool()
