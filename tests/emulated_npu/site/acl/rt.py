# SPDX-License-Identifier: Apache-2.0
"""The only function of the device's runtime that vLLM-Ascend calls directly."""

from __future__ import annotations

from torch_npu import _emulator

_TO_DEVICE = 1
_TO_HOST = 2


def memcpy(to: int, to_bytes: int, source: int, num_bytes: int, kind: int) -> int:
    """Copy between the device and pinned memory at once, without waiting for streams.

    Args:
        to: Address of the target.
        source: Address of the source.
        to_bytes: Number of bytes that may be written.
        num_bytes: Number of bytes that are written.
        kind: 1 for copies to the device, 2 for copies to the host.

    Returns:
        0, the code for success.
    """
    if kind not in (_TO_DEVICE, _TO_HOST) or num_bytes > to_bytes:
        raise ValueError(f"acl.rt.memcpy: {num_bytes} bytes of kind {kind} to {to_bytes}")
    _emulator.copy_memory(to, source, num_bytes, kind == _TO_HOST)
    return 0
