# SPDX-License-Identifier: Apache-2.0
"""What a backend is given and what it promises."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

from vllm_ascend_kvext.transfer.schema import Direction, Table

if TYPE_CHECKING:
    import torch

    from vllm_ascend_kvext.transfer.placement import CopyPlacement


class Transfer(NamedTuple):
    """One request's copy. A named tuple, because a small transfer takes microseconds.

    Attributes:
        pools: Shape ``[num_pools, 2]``, see `PoolColumn`.
        planes: Shape ``[num_planes, 9]``, see `PlaneColumn`.
        runs: Shape ``[num_runs, 5]``, see `RunColumn`.
        host_address: Of the first byte of the host buffer.
        host_bytes: Its size.
        direction: Which way the bytes go.
        placement: For backends that copy on host threads; None for the default.
        pool_tensors: The tensors behind `pools`: their device, and what keeps them alive.
        host_tensor: The tensor behind the host buffer.
    """

    pools: Table
    planes: Table
    runs: Table
    host_address: int
    host_bytes: int
    direction: Direction
    placement: CopyPlacement | None
    pool_tensors: tuple[torch.Tensor, ...]
    host_tensor: torch.Tensor

    @property
    def descriptors(self) -> tuple[Table, int, int, Table, Table, Direction]:
        """The first arguments of the compiled module's functions."""
        return (
            self.pools,
            self.host_address,
            self.host_bytes,
            self.planes,
            self.runs,
            self.direction,
        )


class Backend(Protocol):
    """Moves the bytes of a `Transfer`.

    A backend keeps no reference to a transfer once its bytes have arrived.
    """

    @property
    def name(self) -> str:
        """As logged and printed."""
        ...

    def run(self, transfer: Transfer) -> None:
        """Move every byte, or enqueue the move on the device's current stream.

        Raises:
            DescriptorError: A table is wrong; nothing has been written.
            BackendError: The backend cannot run here, or its device refused.
        """
        ...
