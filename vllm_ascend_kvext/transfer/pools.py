# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The storages that hold pages. They are examined once, and used by every transfer."""

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

    Sleep mode and a reset of the KV caches release the memory and allocate it again, perhaps at
    other addresses. Until `register` is called with the new tensors, transfers are refused.

    Attributes:
        table: See `PoolColumn`. shape: ``[num_pools, 2]``.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        # The compiled module is imported here and not in the first transfer: a process that is
        # forked during the import could not import it any more.
        native()
        self.register(tensors)

    def register(self, tensors: Sequence[torch.Tensor]) -> None:
        """Use these tensors from now on.

        Args:
            tensors: The storages. dtype: uint8, shape: ``[num_bytes]``, contiguous.

        Raises:
            DescriptorError: A tensor has another form; nothing has changed.
        """
        for index, tensor in enumerate(tensors):
            require_bytes(f"pools[{index}]", tensor)
        self.tensors: tuple[torch.Tensor, ...] = tuple(tensors)
        self._first_address = tensors[0].data_ptr() if len(tensors) else None
        rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        self.table: Table = np.array(rows, DTYPE).reshape(-1, len(PoolColumn))
        self.device_types = tuple(sorted({tensor.device.type for tensor in tensors}))

    def require_current(self) -> None:
        """Raise `DescriptorError` if the memory was released or has moved."""
        # One check is enough, because the memory of all KV caches is released and moved together.
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
