# SPDX-License-Identifier: Apache-2.0
"""The storages that hold pages: looked at once, named by every transfer."""

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
    """Registered storages.

    Sleep mode and a reset of the KV caches take their memory away and give it back, perhaps at
    other addresses. In between transfers are refused, until `register` says where it is.
    ``table`` has the shape ``[num_pools, 2]``, see `PoolColumn`.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # Here, so that no first transfer imports it: a process that is forked meanwhile could not.
        native()
        self.register(tensors)

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take tensors of dtype uint8, shape ``[num_bytes]``, contiguous.

        Raises `DescriptorError` if a tensor is something else; then nothing has changed.
        """
        for index, tensor in enumerate(tensors):
            require_bytes(f"pools[{index}]", tensor)
        self.tensors: tuple[torch.Tensor, ...] = tuple(tensors)
        self._first_address = tensors[0].data_ptr() if len(tensors) else None
        rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        self.table: Table = np.array(rows, DTYPE).reshape(-1, len(PoolColumn))
        self.device_types = tuple(sorted({tensor.device.type for tensor in tensors}))

    def require_current(self) -> None:
        """Raise `DescriptorError` if memory is gone or has moved."""
        # One stands for all: the memory of KV caches comes and goes together.
        if self.tensors and self.tensors[0].data_ptr() != self._first_address:
            raise DescriptorError(
                "pools: expected storages where they were registered, found some elsewhere. "
                "Register them where they are now."
            )


def require_bytes(name: str, tensor: torch.Tensor) -> None:
    """Raise `DescriptorError` if a tensor is not uint8, one-dimensional and contiguous."""
    import torch

    if tensor.dtype is not torch.uint8 or tensor.dim() != 1 or not tensor.is_contiguous():
        found = str(tensor.dtype).removeprefix("torch.")
        is_contiguous = "" if tensor.is_contiguous() else ", not contiguous"
        raise DescriptorError(
            f"{name}: expected uint8, one dimension, contiguous, found {found}, shape "
            f"{list(tensor.shape)}{is_contiguous}. Pass a view of the storage's bytes."
        )
