# SPDX-License-Identifier: Apache-2.0
"""Many copies between host and device in one call."""

from __future__ import annotations

from collections import Counter

import torch

from torch_npu import _emulator, settings

TO_DEVICE = 0

counts: Counter[str] = Counter()
"""Calls, copies and bytes so far, for tests."""
failing_loads: set[int] = set(settings.failing_loads())
"""Numbers of the calls to the device, from 1 on, that are to fail."""
is_skipping_loads = settings.skips_loads()
"""Whether copies to the device copy nothing: with it, comparisons have to fail."""


def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, direction: int
) -> None:
    """Enqueue copies on the current stream. All arguments are read when the stream comes to them.

    Args:
        src_ptrs: addresses, int64 on the CPU, shape ``[copies]``.
        dst_ptrs: addresses, as ``src_ptrs``.
        sizes: bytes, as ``src_ptrs``.
        direction: 0 to the device, 1 from it, 2 within it.

    Raises:
        RuntimeError: As vLLM-Ascend's operator (``csrc/torch_binding.cpp``) refuses it.
    """
    counts["calls"] += 1
    if direction == TO_DEVICE:
        counts["loads"] += 1
        if counts["loads"] in failing_loads:
            counts["failed"] += 1
            raise RuntimeError("aclrtMemcpyBatchAsync failed: 507899 (emulated)")
        if is_skipping_loads:
            return
    counts["copies"] += len(sizes)
    counts["bytes"] += int(sizes.sum())
    _emulator.enqueue_copies(src_ptrs, dst_ptrs, sizes, direction)


HOST_FUNCTIONS = {"swap_blocks_batch": swap_blocks_batch}
