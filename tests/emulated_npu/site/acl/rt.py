# SPDX-License-Identifier: Apache-2.0
"""The one call of the device's runtime that vLLM-Ascend makes by itself."""

from __future__ import annotations

from torch_npu import _emulator

_TO_DEVICE = 1
_TO_HOST = 2


def memcpy(to: int, to_bytes: int, source: int, num_bytes: int, kind: int) -> int:
    """Copy between the device and pinned memory, now: streams are not waited for.

    Args:
        to, source: Addresses.
        to_bytes: How much may be written.
        num_bytes: How much is.
        kind: 1 to the device, 2 to the host.

    Returns:
        0: done.
    """
    if kind not in (_TO_DEVICE, _TO_HOST) or num_bytes > to_bytes:
        raise ValueError(f"acl.rt.memcpy: {num_bytes} bytes of kind {kind} to {to_bytes}")
    _emulator.copy_memory(to, source, num_bytes, kind == _TO_HOST)
    return 0
