# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The functions of the device's runtime that are called directly.

vLLM-Ascend calls `memcpy`, and KvextConnector pins memory that several processes have mapped.
"""

from __future__ import annotations

from torch_npu import _emulator

_MAPPED_AND_PINNED = 0x10000002
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


def host_register_v2(address: int, num_bytes: int, flags: int) -> int:
    """Pin memory that the process has mapped itself.

    Args:
        address: The first byte, at the start of a page.
        num_bytes: The size.
        flags: What the memory is registered for. Only "mapped and pinned" is emulated.

    Returns:
        An error code, 0 for success.
    """
    if flags != _MAPPED_AND_PINNED:
        raise ValueError(f"acl.rt.host_register_v2: flags {flags:#x} are not emulated")
    return int(_emulator.register_host(address, num_bytes))


def host_unregister(address: int) -> int:
    """End `host_register_v2`, when all copies have ended. Returns an error code."""
    return int(_emulator.unregister_host(address))
