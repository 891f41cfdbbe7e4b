# SPDX-License-Identifier: Apache-2.0
"""The storages that hold pages: looked at once, named by every transfer.

    of(tensors) --> registered --retire()--> retired --renew(tensors)--> registered

A pool is one registered storage. Sleep mode and a reset of the KV caches take the memory away and
give it back, perhaps at other addresses: retire before, renew after. In between, and where memory
has moved without a word, transfers are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.errors import DescriptorError
from vllm_ascend_kvext.transfer.schema import DTYPE, PoolColumn, Table

if TYPE_CHECKING:
    import torch


class Pools:
    """Registered storages; made by `of`.

    Attributes:
        tensors: One over each whole storage, which stays alive with it; none while retired.
        table: Shape ``[num_pools, 2]``, see `PoolColumn`.
        device_types: Where they are, such as ``cpu``, without repetition.
        is_retired: Whether `retire` was called, and `renew` was not.
    """

    __slots__ = ("_first_address", "device_types", "is_retired", "table", "tensors")

    tensors: tuple[torch.Tensor, ...]
    table: Table
    device_types: tuple[str, ...]
    is_retired: bool
    _first_address: int | None

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Pools:
        """Register tensors of dtype uint8, shape ``[num_bytes]``, contiguous.

        Raises:
            DescriptorError: A tensor is something else.
            BackendError: The compiled module cannot be had.
        """
        # Here, so that no first transfer imports it: a process that is forked meanwhile could not.
        native()
        pools = cls()
        pools._register(tensors)
        return pools

    def retire(self) -> None:
        """Forget the memory: it is about to be taken away.

        The caller has waited for every transfer that uses it.
        """
        self.tensors = ()
        self.is_retired = True

    def renew(self, tensors: Sequence[torch.Tensor]) -> None:
        """Register the same storages where they are after a wake-up or a reset.

        Raises:
            DescriptorError: They differ in number, sizes or device from those registered first:
                planes that were laid out for those do not fit. Nothing has changed.
        """
        renewed = Pools.of(tensors)
        expected, found = (
            (pools.device_types, pools.table[:, PoolColumn.NUM_BYTES].tolist())
            for pools in (self, renewed)
        )
        if expected != found:
            raise DescriptorError(
                f"pools: expected to renew storages on {expected[0]} of {expected[1]} bytes, found "
                f"some on {found[0]} of {found[1]} bytes. Lay out the new KV caches and register "
                "them with Pools.of."
            )
        self._register(tensors)

    def require_current(self) -> None:
        """Refuse memory that is gone or has moved.

        Raises:
            DescriptorError: The pools are retired, or not where they were registered.
        """
        if self.is_retired:
            raise DescriptorError(
                "pools: expected registered storages, found retired ones. Call renew with the "
                "tensors that hold the pages since."
            )
        # One stands for all: the memory of KV caches comes and goes together.
        if self.tensors and self.tensors[0].data_ptr() != self._first_address:
            raise DescriptorError(
                "pools: expected storages where they were registered, found some elsewhere. Call "
                "retire before their memory is taken away and renew after."
            )

    def _register(self, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            require_bytes(f"pools[{index}]", tensor)
        self.tensors = tuple(tensors)
        self._first_address = tensors[0].data_ptr() if len(tensors) else None
        rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        self.table = np.array(rows, DTYPE).reshape(-1, len(PoolColumn))
        self.device_types = tuple(sorted({tensor.device.type for tensor in tensors}))
        self.is_retired = False


def require_bytes(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not the plain bytes of a region.

    Raises:
        DescriptorError: It is not uint8, one-dimensional and contiguous.
    """
    import torch

    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        found = str(tensor.dtype).removeprefix("torch.")
        is_contiguous = "" if tensor.is_contiguous() else ", not contiguous"
        raise DescriptorError(
            f"{name}: expected uint8, one dimension, contiguous, found {found}, shape "
            f"{list(tensor.shape)}{is_contiguous}. Pass a view of the storage's bytes."
        )
