# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The interface of a backend, and the backend for pools in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.schema import Direction, Table

if TYPE_CHECKING:
    import torch

STREAMING_WHERE_IT_PAYS = -1
"""Lets the compiled module decide whether its stores bypass the caches."""


class Transfer(NamedTuple):
    """The copies of one request.

    It is a named tuple, because a small transfer takes only microseconds.

    Attributes:
        pools: See `PoolColumn`. shape: ``[num_pools, 2]``.
        planes: See `PlaneColumn`. shape: ``[num_planes, 9]``.
        runs: See `RunColumn`. shape: ``[num_runs, 5]``.
        placement: The CPUs and the number of threads of backends that copy on host threads.
        pool_tensors: The tensors of the pools. They name the device, and keep the memory alive.
        host_tensor: The tensor of the host buffer. It also names a device and keeps memory alive.
    """

    pools: Table
    host_address: int
    host_bytes: int
    planes: Table
    runs: Table
    direction: Direction
    placement: CopyPlacement
    pool_tensors: tuple[torch.Tensor, ...]
    host_tensor: torch.Tensor

    @property
    def descriptors(self) -> tuple[Table, int, int, Table, Table, Direction]:
        """The first arguments of the compiled module's functions."""
        return self[:6]


class Backend(Protocol):
    """Moves the bytes of a `Transfer`. It keeps no reference to it when the bytes have arrived."""

    @property
    def name(self) -> str: ...

    def run(self, transfer: Transfer) -> None:
        """Move every byte, or enqueue the move on the device's current stream.

        Raises:
            DescriptorError: A table is wrong; nothing has been written.
            BackendError: The backend cannot run here, or its device refused.
        """


class CpuBackend:
    """Copies between pools and host buffer that are both in host memory."""

    name = "cpu"

    def run(self, transfer: Transfer) -> None:
        native().page_transfer(
            *transfer.descriptors,
            transfer.placement.num_threads,
            STREAMING_WHERE_IT_PAYS,
            transfer.placement.cpus,
            transfer.placement.niceness,
        )
