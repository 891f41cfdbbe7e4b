# SPDX-License-Identifier: Apache-2.0
"""Environment variables of the emulated NPU."""

from __future__ import annotations

import os


def num_devices() -> int:
    return int(os.environ.get("EMULATED_NPU_DEVICES", "1"))


def memory_bytes() -> int:
    """Of each device; a tensor that does not fit raises as on a device."""
    return int(os.environ.get("EMULATED_NPU_MEMORY_BYTES", str(8 << 30)))


def seed() -> int | None:
    """Of the schedule; without one, operators run at the call."""
    value = os.environ.get("EMULATED_NPU_SEED", "")
    return int(value) if value else None


def failing_loads() -> frozenset[int]:
    """Which batched copies to the device fail, counted from 1."""
    return frozenset(
        map(int, filter(None, os.environ.get("EMULATED_NPU_FAILING_LOADS", "").split(",")))
    )


def skips_loads() -> bool:
    """Whether batched copies to the device copy nothing: to see that a test can fail."""
    return os.environ.get("EMULATED_NPU_SKIPPED_LOADS") == "1"
