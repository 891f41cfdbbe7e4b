# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Allocates the host memory of one worker, or of all workers of a host, once, as one buffer.

The module does not know the content.
"""

from __future__ import annotations

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
    require_left,
    taken_bytes,
)
from vllm_ascend_kvext.connector.worker.mapped_memory import (
    REMEDY,
    map_memory,
    require_memory,
    take_memory,
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
    def allocate(
        cls,
        num_bytes: int,
        device: torch.device,
        node: int | None = None,
        why_torch: str | None = None,
    ) -> HostBuffer:
        """Allocate memory for the pages of a device. It is pinned unless the device is a CPU.

        The memory is a mapping of this process, which the device pins by registering it. So no
        more is taken than was asked for. Where it cannot be pinned, torch allocates the memory, and
        a line in the log says why, and how much torch takes. It is a WARNING if that is much more.

        If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` asks for the AscendC kernel, torch allocates the
        memory, and it is also mapped for the kernel. If it cannot be mapped, one WARNING says so,
        and the DMA engines serve it.

        Args:
            num_bytes: The size. It is rounded down to a multiple of 64.
            device: The device of the pages.
            node: The memory node from which memory is taken while it has some; None leaves the
                choice to the kernel. If the kernel refuses, one WARNING says so.
            why_torch: Why torch has to allocate the memory if it is to be pinned; None if it need
                not.

        Raises:
            HostMemoryError: If the size is less than 64, or if the machine, or a control group of
                this process, has too little memory left. Nothing stays taken then.
            SettingsError: If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` has a wrong value.
        """
        num_bytes -= num_bytes % HOST_ALIGNMENT_BYTES
        if num_bytes < HOST_ALIGNMENT_BYTES:
            raise HostMemoryError(
                f"host memory: expected at least {HOST_ALIGNMENT_BYTES} bytes per worker, found "
                f"{num_bytes}; give the connector more memory or leave it out"
            )
        why_torch = why_torch or why_torch_pins(device.type)
        if device.type == "cpu" or why_torch is None:
            found = cls._map(num_bytes, device, node)
            if isinstance(found, HostBuffer):
                return found
            why_torch = found
        return cls._allocate_by_torch(num_bytes, device, node, why_torch)

    @classmethod
    def _map(cls, num_bytes: int, device: torch.device, node: int | None) -> HostBuffer | str:
        """Allocate a mapping, and pin it; or say why it cannot be pinned. Nothing is kept then."""
        require_memory(MemoryNeed(num_bytes, 1, is_pinned=False))
        try:
            tensor = map_memory(num_bytes, node)
        except (RuntimeError, MemoryError, OSError) as error:
            raise _too_little(num_bytes, "bytes", error) from error
        take_memory(tensor)
        if device.type == "cpu":
            return cls(tensor)
        try:
            return cls(tensor, transfers_on(device.type).pin_host(tensor))
        except BackendError as error:
            return str(error)

    @classmethod
    def _allocate_by_torch(
        cls, num_bytes: int, device: torch.device, node: int | None, reason: str
    ) -> HostBuffer:
        import torch

        need = MemoryNeed(num_bytes, 1, is_pinned=True)
        require_memory(need, f"{REMEDY} Torch allocates it: {reason}")
        _log_rounding(num_bytes, reason)
        try:
            with memory_of(node):
                tensor = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        except (RuntimeError, MemoryError, OSError) as error:
            raise _too_little(num_bytes, "bytes that can be pinned", error) from error
        return cls(tensor, _map_for_kernel(tensor, device.type))

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
            _raise_together(peers, partial(take_memory, tensor[first:end]))
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
        """Undo the pinning of `allocate` or `share`, or the mapping for a kernel. Idempotent.

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
    is_pinned_by_all = False
    try:
        errors = peers.agree(error)
        is_pinned_by_all = not errors
    finally:  # This is needed after an error, too: another worker may have left.
        if unpin is not None and not is_pinned_by_all:
            unpin()
    return errors[0] if unpin is None or errors else unpin


def _require_left_for_all(num_bytes: int, num_maps: int) -> None:
    need = MemoryNeed(num_bytes, 1, is_pinned=False, num_maps=num_maps)
    require_memory(need, _REMEDY_FOR_ALL)
    require_left(need, commit_bound(), _REMEDY_FOR_ALL)


def why_torch_pins(device_type: str) -> str | None:
    """Why torch has to allocate memory that a device can use, which rounds it to a power of two.

    One page is pinned to find it out, on the device of the calling thread.

    Returns:
        The reason; None if mappings of this process can be pinned, or need not be.

    Raises:
        SettingsError: If ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` has a wrong value.
    """
    if device_type == "cpu":
        return None
    try:
        transfers_on(device_type).pin_host(map_memory(mmap.PAGESIZE))()
    except BackendError as error:
        return str(error)
    if parse_uses_ascend_kernel(os.environ):
        return f"{ASCEND_KERNEL_VARIABLE}=1: the kernel reads memory of torch."
    return None


def _too_little(num_bytes: int, what: str, error: Exception) -> HostMemoryError:
    return HostMemoryError(
        f"host memory: expected {num_bytes} {what} for this worker, found less ({error}). {REMEDY}"
    )


def _log_rounding(num_bytes: int, reason: str) -> None:
    """Say what torch pins, and warn if much of it is lost."""
    rounded_bytes = taken_bytes(num_bytes, is_pinned=True)
    is_much = rounded_bytes > num_bytes * _MAX_ROUNDING
    logger.log(
        logging.WARNING if is_much else logging.INFO,
        "Host memory: torch may pin %d bytes for the %d of this worker, because it rounds up to a "
        "power of two. %sTorch allocates it: %s",
        rounded_bytes,
        num_bytes,
        "Choose host memory per worker that is a little under one. " if is_much else "",
        reason,
    )


def _map_for_kernel(tensor: torch.Tensor, device_type: str) -> Callable[[], None] | None:
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
