# SPDX-License-Identifier: Apache-2.0
"""How much memory of the device is used. There is no cache between allocation and system."""

from __future__ import annotations

from typing import Any

from torch_npu import _emulator

TOTAL_BYTES = 8 << 30


def empty_cache() -> None:
    pass


def mem_get_info(device: Any = None) -> tuple[int, int]:
    return TOTAL_BYTES - memory_allocated(), TOTAL_BYTES


def memory_allocated(device: Any = None) -> int:
    return int(_emulator.allocated_bytes())


def max_memory_allocated(device: Any = None) -> int:
    return int(_emulator.peak_bytes())


memory_reserved = memory_allocated
max_memory_reserved = max_memory_allocated


def reset_peak_memory_stats(device: Any = None) -> None:
    _emulator.reset_peak_bytes()


def memory_stats(device: Any = None) -> dict[str, int]:
    return {
        "allocated_bytes.all.peak": max_memory_allocated(),
        "allocated_bytes.all.current": memory_allocated(),
        "reserved_bytes.all.current": memory_allocated(),
        "num_alloc_retries": 0,
    }
