# SPDX-License-Identifier: Apache-2.0
"""The storages that hold pages: looked at once, named by every transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_kvext.transfer.errors import DescriptorError
from vllm_ascend_kvext.transfer.schema import DTYPE, Table

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, eq=False)
class Pools:
    """Registered storages.

    Attributes:
        tensors: One over each whole storage, which stays alive with it.
        table: Shape ``[num_pools, 2]``, see `PoolColumn`.
        device_types: Where they are, such as ``cpu``, without repetition.
    """

    tensors: tuple[torch.Tensor, ...]
    table: Table
    device_types: tuple[str, ...]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> Pools:
        """Register tensors of dtype uint8, shape ``[num_bytes]``, contiguous.

        Raises:
            DescriptorError: A tensor is something else.
        """
        for index, tensor in enumerate(tensors):
            require_bytes(f"pools[{index}]", tensor)
        rows = [(tensor.data_ptr(), tensor.numel()) for tensor in tensors]
        return cls(
            tensors=tuple(tensors),
            table=np.array(rows, DTYPE).reshape(-1, 2),
            device_types=tuple(sorted({tensor.device.type for tensor in tensors})),
        )


def require_bytes(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is not the plain bytes of a region.

    Raises:
        DescriptorError: It is not uint8, one-dimensional and contiguous.
    """
    # Compared by name, so that torch need not be imported.
    found = str(tensor.dtype).removeprefix("torch.")
    if found != "uint8" or tensor.dim() != 1 or not tensor.is_contiguous():
        is_contiguous = "" if tensor.is_contiguous() else ", not contiguous"
        raise DescriptorError(
            f"{name}: expected uint8, one dimension, contiguous, found {found}, shape "
            f"{list(tensor.shape)}{is_contiguous}. Pass a view of the storage's bytes."
        )
