# SPDX-License-Identifier: Apache-2.0
"""What a backend is given and what it promises; and the one for pools in host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.placement import CopyPlacement
from vllm_ascend_kvext.transfer.schema import Direction, Table

if TYPE_CHECKING:
    import torch

STREAMING_WHERE_IT_PAYS = -1
"""Stores that go past the caches, of the compiled module's functions."""


class Transfer(NamedTuple):
    """One request's copy. A named tuple, because a small transfer takes microseconds.

    Shapes: ``pools`` is ``[num_pools, 2]``, see `PoolColumn`; ``planes`` ``[num_planes, 9]``, see
    `PlaneColumn`; ``runs`` ``[num_runs, 5]``, see `RunColumn`. The tensors behind pools and host
    buffer say their devices, and keep them alive. The placement is for backends that copy on host
    threads.
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
    """Moves the bytes of a `Transfer`; keeps no reference to it once they have arrived."""

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
