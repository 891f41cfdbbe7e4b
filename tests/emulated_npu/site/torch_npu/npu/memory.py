# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Statistics of memory. They count the memory of npu tensors; the allocator has no cache."""

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
    """Number of free bytes, and of all bytes."""
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
    """Do nothing, because there is no cache."""


torch.accelerator.empty_host_cache = empty_cache
"""torch's function asks the allocator of pinned memory, which does not exist here."""


class NPUPluggableAllocator:
    """The allocator of vLLM-Ascend's library; see ``stand_ins.compiled_modules``.

    Args:
        path: Path of the library, which is not loaded.
        allocate: Name of its function that allocates.
        free: Name of its function that frees.
    """

    def __init__(self, path: str | None, allocate: str, free: str) -> None:
        self._allocator = self


class MemPool:
    """A pool. Its memory is not freed with its tensors."""

    def __init__(self, allocator: NPUPluggableAllocator | None = None) -> None:
        if allocator is None:
            raise NotImplementedError("MemPool: the emulated NPU has pools of an allocator only")


@contextmanager
def use_mem_pool(pool: MemPool, device: Any = None) -> Iterator[None]:
    """A context in which allocated memory belongs to a pool, so that it can be unmapped."""
    from torch_npu.stand_ins import compiled_modules

    _emulator.begin_pool(compiled_modules.note_allocated)
    try:
        yield
    finally:
        _emulator.end_pool()
