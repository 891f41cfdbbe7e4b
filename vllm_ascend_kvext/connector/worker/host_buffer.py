# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Allocates the host memory of one worker, or of all workers of a host, once, as one buffer.

The module does not know the content.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_kvext.connector.common.host_memory import (
    HostMemoryError,
    MemoryNeed,
    commit_bound,
    in_words,
    require_left,
    taken_bytes,
    tightest_bound,
)
from vllm_ascend_kvext.connector.worker.memory_node import memory_of, prefer_node
from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers, map_together, own_part
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, parse_uses_ascend_kernel
from vllm_ascend_kvext.transfer.devices import transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.ascend_kvext.connector")


_MAX_ROUNDING = 1.125
"""Pinned memory may exceed the requested size by this factor without a warning."""

_MIN_STEP_BYTES = 4 << 20
_STEPS_OF_WHAT_IS_LEFT = 64
"""Plain memory is taken in steps of a 64th of what is left. So 64 workers may take theirs at once,
and each of them still notices in time that too little is left."""

_REMEDY = "Give the connector less memory, and mind that every worker of a host takes as much."
_REMEDY_FOR_ALL = "Set host_memory_gib to less: the workers of a host take all of it together."


class HostBuffer:
    """Host memory that transfers read and write; made by `allocate`.

    Attributes:
        tensor: dtype: uint8, shape: [num_bytes], contiguous. Its content is undefined at first.
    """

    def __init__(self, tensor: torch.Tensor, unmap: Callable[[], None] | None = None) -> None:
        self.tensor = tensor
        self._unmap = unmap

    @classmethod
    def allocate(cls, num_bytes: int, device: torch.device, node: int | None = None) -> HostBuffer:
        """Allocate memory for the pages of a device. It is pinned unless the device is a CPU.

        Each page of memory is written to once. Otherwise the kernel would hand out pages at the
        first write to them. Stores have then been measured to take five times as long.

        If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` asks for the AscendC kernel, pinned memory is also
        mapped. If it cannot be mapped, one WARNING says so, and the DMA engines serve it. Another
        WARNING says so if much of the pinned memory is lost.

        Args:
            num_bytes: The size. It is rounded down to a multiple of 64.
            device: The device of the pages.
            node: The memory node from which memory is taken while it has some; None leaves the
                choice to the kernel. If the kernel refuses, one WARNING says so.

        Raises:
            HostMemoryError: If the size is less than 64, or if the machine, or a control group of
                this process, has too little memory left. Nothing stays taken then.
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
        require_left(MemoryNeed(num_bytes, 1, is_pinned), tightest_bound(), _REMEDY)
        try:
            if is_pinned:
                with memory_of(node):
                    tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
            else:
                tensor = _taken_memory(num_bytes, node)
        except HostMemoryError:
            raise
        except (RuntimeError, MemoryError, OSError) as error:
            what = "bytes that can be pinned" if is_pinned else "bytes"
            raise HostMemoryError(
                f"host memory: expected {num_bytes} {what} for "
                f"this worker, found less ({error}). {_REMEDY}"
            ) from error
        return cls(tensor, _map(tensor, device.type) if is_pinned else None)

    @classmethod
    def share(
        cls, num_bytes: int, device: torch.device, peers: HostPeers, node: int | None = None
    ) -> HostBuffer | str:
        """Allocate memory that all workers of a host have. All workers of the engine call it.

        Each worker writes to a part of the memory once, as `allocate` does to all of it. Each
        worker pins all of it for its own device, unless the device is a CPU. Nothing is rounded up
        to a power of two.

        Args:
            num_bytes: The size on each host. It is rounded down to a multiple of 64.
            device: The device of the pages.
            node: The memory node from which this worker's part is taken, see `allocate`.

        Returns:
            The memory; or why workers cannot have each other's memory. Nothing stays taken then.

        Raises:
            HostMemoryError: If a host has too little memory left for all its workers. No worker of
                the engine keeps anything then.
        """
        import torch

        num_bytes -= num_bytes % HOST_ALIGNMENT_BYTES
        is_first = peers.rank == peers.ranks_of_host[0]
        if not is_first:
            _raise_together(peers, lambda: None)
        else:
            num_maps = len(peers.ranks_of_host)
            _raise_together(peers, partial(_require_left_for_all, num_bytes, num_maps))
        memory = map_together(peers, num_bytes)
        if isinstance(memory, str):
            return memory
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        del memory
        # One page shows whether the device can pin such memory, before all of it is taken.
        unpin = _pin_together(peers, device, tensor[: mmap.PAGESIZE])
        if not isinstance(unpin, str):
            unpin()
            first, end = own_part(peers, num_bytes)
            prefer_node(tensor.data_ptr() + first, end - first, node)
            _raise_together(peers, partial(_take, tensor[first:end]))
            unpin = _pin_together(peers, device, tensor)
        if not isinstance(unpin, str):
            return cls(tensor, unpin)
        del tensor
        peers.wait()  # Each worker takes its own memory next, and counts what is left.
        return unpin

    @property
    def num_bytes(self) -> int:
        return int(self.tensor.numel())

    def unmap(self) -> None:
        """Undo the mapping of `allocate`, or the pinning of `share`. Idempotent.

        The caller has waited for every transfer.
        """
        unmap = self._unmap
        self._unmap = None
        if unmap is not None:
            unmap()


def _raise_together(peers: HostPeers, take: Callable[[], None]) -> None:
    """Let all workers of the engine do something, and raise on all of them if one fails.

    Raises:
        HostMemoryError: The worker's own error; or the error of another worker.
    """
    own_error: HostMemoryError | None = None
    try:
        take()
    except HostMemoryError as error:
        own_error = error
    errors = peers.agree(None if own_error is None else str(own_error))
    if own_error is not None:
        raise own_error
    if errors:
        raise HostMemoryError(f"host memory: another worker of the engine failed: {errors[0]}")


def _pin_together(
    peers: HostPeers, device: torch.device, tensor: torch.Tensor
) -> Callable[[], None] | str:
    """Pin memory on all workers of the engine, or on none. A step of `HostPeers`.

    Returns:
        A function that ends it; or why a worker cannot.
    """
    unpin: Callable[[], None] | None = None
    error = None
    try:
        unpin = transfers_on(device.type).pin_host(tensor)
    except BackendError as failure:
        error = f"rank {peers.rank} cannot pin the memory of its host ({failure})"
    errors = peers.agree(error)
    if unpin is not None and not errors:
        return unpin
    if unpin is not None:
        unpin()
    return errors[0]


def _require_left_for_all(num_bytes: int, num_maps: int) -> None:
    need = MemoryNeed(num_bytes, 1, is_pinned=False, num_maps=num_maps)
    for bound in (tightest_bound(), commit_bound()):
        require_left(need, bound, _REMEDY_FOR_ALL)


def _taken_memory(num_bytes: int, node: int | None) -> torch.Tensor:
    """Allocate plain memory, and write to each page once. It uses huge pages if there are any.

    The mapping is private, because the kernel has other rules for huge pages of shared memory, and
    by default gives none. A forked process does not get the mapping: otherwise the kernel would
    copy what this process writes while the other one lives.

    Raises:
        HostMemoryError: See `_take`.
        OSError: If the process may not have so much memory.
    """
    import torch

    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # The kernel may have no huge pages.
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.madvise(mmap.MADV_DONTFORK)
    tensor = torch.frombuffer(memory, dtype=torch.uint8)
    prefer_node(tensor.data_ptr(), num_bytes, node)
    _take(tensor)
    return tensor


def _take(tensor: torch.Tensor) -> None:
    """Write to each page of memory once.

    Other processes may take memory at the same time. So what is left is read again and again.

    Raises:
        HostMemoryError: If less memory is left. Without this check, the kernel would kill some
            process.
    """
    num_bytes = int(tensor.numel())
    first = 0
    while first < num_bytes:
        bound = tightest_bound()
        rest = MemoryNeed(num_bytes - first, 1, is_pinned=False)
        taken = f"{in_words(first)} of {in_words(num_bytes)} were taken meanwhile."
        require_left(rest, bound, f"{taken} {_REMEDY}")
        step_bytes = num_bytes
        if bound is not None:
            step_bytes = max(_MIN_STEP_BYTES, bound.left_bytes // _STEPS_OF_WHAT_IS_LEFT)
        tensor[first : first + step_bytes].zero_()
        first += step_bytes


def _warn_of_rounding(num_bytes: int) -> None:
    """Warn if much pinned memory is lost by rounding."""
    rounded_bytes = taken_bytes(num_bytes, is_pinned=True)
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
