# SPDX-License-Identifier: Apache-2.0
"""Allocates the host memory of one worker, once, as one buffer. It does not know the content."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, parse_uses_ascend_kernel
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.ascend_kvext.connector")


_MAX_ROUNDING = 1.125
"""Pinned memory may exceed the requested size by this factor without a warning."""


class HostMemoryError(ConnectorError, MemoryError):
    """The host memory of a worker cannot be allocated."""


class HostBuffer:
    """Host memory that transfers read and write; made by `allocate`.

    Attributes:
        tensor: dtype: uint8, shape: [num_bytes], contiguous. Its content is undefined at first.
    """

    def __init__(self, tensor: torch.Tensor, unmap: Callable[[], None] | None = None) -> None:
        self.tensor = tensor
        self._unmap = unmap

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device) -> HostBuffer:
        """Allocate memory for the pages of a device. It is pinned unless the device is a CPU.

        Each page of memory is written to once. Otherwise the kernel would hand out pages at the
        first write to them; stores have been seen to take five times as long then.

        If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` asks for the AscendC kernel, pinned memory is also
        mapped. If it cannot be mapped, one WARNING says so, and the DMA engines serve it. Another
        WARNING says so if much of the pinned memory is lost.

        Args:
            num_bytes: The size. It is rounded down to a multiple of 64.
            device: The device of the pages.

        Raises:
            HostMemoryError: If the size is less than 64, or if there is too little memory.
            SettingsError: If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` has a wrong value.
        """
        import torch

        num_bytes -= num_bytes % HOST_ALIGNMENT_BYTES
        if num_bytes < HOST_ALIGNMENT_BYTES:
            raise HostMemoryError(
                f"host memory: expected at least {HOST_ALIGNMENT_BYTES} bytes per worker, found "
                f"{num_bytes}; give the connector more memory or leave it out"
            )
        is_pinned = device.type != "cpu"
        if is_pinned:
            _warn_of_rounding(num_bytes)
        try:
            if is_pinned:
                tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                tensor = _taken_memory(num_bytes)
        except (RuntimeError, MemoryError, OSError) as error:
            what = "bytes that can be pinned" if is_pinned else "bytes"
            raise HostMemoryError(
                f"host memory: expected {num_bytes} {what} for "
                f"this worker, found less ({error}); give the connector less memory, and mind "
                "that every worker of a node takes as much"
            ) from error
        return cls(tensor, _map(tensor, device.type) if is_pinned else None)

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.numel())

    def unmap(self) -> None:
        """Undo the mapping of `allocate`. The caller has waited for every transfer. Idempotent."""
        unmap = self._unmap
        self._unmap = None
        if unmap is not None:
            unmap()


def _taken_memory(num_bytes: int) -> torch.Tensor:
    """Allocate plain memory, and write to each page once. It uses huge pages if there are any.

    Raises:
        MemoryError: If less memory is available. Without this check, the kernel would kill some
            process.
        OSError: If the process may not have so much memory.
    """
    import torch

    available_bytes = _available_bytes()
    if available_bytes is not None and num_bytes > available_bytes:
        raise MemoryError(f"{available_bytes} bytes are available")
    memory = mmap.mmap(-1, num_bytes)
    with contextlib.suppress(OSError):  # The kernel has no huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def _available_bytes() -> int | None:
    """The bytes that are available without swapping; None if the machine does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _warn_of_rounding(num_bytes: int) -> None:
    """Warn if much pinned memory is lost by rounding.

    torch's ``CachingHostAllocator``, also with torch_npu, allocates powers of two.
    """
    rounded_bytes = 1 << (num_bytes - 1).bit_length()
    if rounded_bytes > num_bytes * _MAX_ROUNDING:
        logger.warning(
            "Host memory: torch may pin %d bytes for the %d of this worker, because it rounds up "
            "to a power of two. Choose host memory per worker that is a little under one.",
            rounded_bytes,
            num_bytes,
        )


def _map(tensor: torch.Tensor, device_type: str) -> Callable[[], None] | None:
    """Map memory for a kernel. Returns a function that unmaps it; None if it is not mapped."""
    if not parse_uses_ascend_kernel(os.environ):
        return None
    try:
        return transfers_on(device_type).map_host(tensor)
    except BackendError as error:
        logger.warning(
            "%s=1: host memory is not mapped, the DMA engines serve it: %s",
            ASCEND_KERNEL_VARIABLE,
            error,
        )
        return None
