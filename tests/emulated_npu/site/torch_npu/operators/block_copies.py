# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Many copies between host and device in one call."""

from __future__ import annotations

from collections import Counter

import torch

from torch_npu import _emulator
from torch_npu.kernels import operator

TO_DEVICE = 0

counts: Counter[str] = Counter()
"""Number of calls so far, for tests."""
is_skipping_loads = False
"""Whether copies to the device copy nothing. Comparisons of answers must fail then."""


@operator("_C_ascend.swap_blocks_batch", "CPU")
def swap_blocks_batch(
    src_ptrs: torch.Tensor, dst_ptrs: torch.Tensor, sizes: torch.Tensor, direction: int
) -> None:
    """Enqueue copies on the current stream. Arguments are read when the stream reaches the copies.

    Args:
        src_ptrs: addresses, int64 on the CPU, shape ``[copies]``.
        dst_ptrs: addresses, as ``src_ptrs``.
        sizes: bytes, as ``src_ptrs``.
        direction: 0 to the device, 1 from the device, 2 within the device.

    Raises:
        RuntimeError: vLLM-Ascend's operator (``csrc/torch_binding.cpp``) refuses the arguments.
    """
    counts["calls"] += 1
    if direction == TO_DEVICE and is_skipping_loads:
        return
    _emulator.enqueue_copies(src_ptrs, dst_ptrs, sizes, direction)
