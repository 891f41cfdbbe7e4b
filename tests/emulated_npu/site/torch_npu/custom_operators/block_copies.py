# SPDX-License-Identifier: Apache-2.0
"""Many copies between host and device in one call."""

from __future__ import annotations

from collections import Counter

import torch

from torch_npu import _emulator

TO_DEVICE, FROM_DEVICE, WITHIN_DEVICE = range(3)

counts: Counter[str] = Counter()
"""Calls, copies and bytes so far, for tests."""
failing_loads: set[int] = set()
"""Numbers of the calls to the device, from 1 on, that are to fail."""
is_skipping_loads = False
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
    for name, array in (("src_ptrs", src_ptrs), ("dst_ptrs", dst_ptrs), ("sizes", sizes)):
        if array.dtype != torch.int64:
            raise RuntimeError(f"swap_blocks_batch: {name} must be int64")
        if len(array) != len(src_ptrs):
            raise RuntimeError(f"swap_blocks_batch: {name} length must match src_ptrs")
    if direction not in (TO_DEVICE, FROM_DEVICE, WITHIN_DEVICE):
        raise RuntimeError(f"swap_blocks_batch: invalid direction {direction}")
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
    _emulator.enqueue_copies(src_ptrs, dst_ptrs, sizes)


HOST_FUNCTIONS = {
    "swap_blocks_batch(Tensor x, Tensor y, Tensor z, int direction) -> ()": swap_blocks_batch
}
