# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads registered tensors as numbers: storage, offset, shape, strides.

The module calls the methods of tensors. It imports torch only to make new ones, and knows nothing
of pages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.layout.model import KVLayout, RegisteredStorage


@dataclass(frozen=True, slots=True)
class TensorView:
    """One tensor as numbers.

    Attributes:
        storage: The number of its storage in the `StorageTable`.
        offset_bytes: Where its first element lies in the storage.
        is_private_format: Whether the NPU keeps the elements in its own order, which the logical
            strides do not describe.
    """

    storage: int
    offset_bytes: int
    shape: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    item_bytes: int
    dtype: str
    is_private_format: bool = False


_PLAIN_ACL_FORMATS = (-1, 0, 2)
"""The ACL formats whose elements lie as shape and strides say: undefined, NCHW and ND."""


class StorageTable:
    """Numbers the storages of the tensors that it reads."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[int, RegisteredStorage]] = {}

    @property
    def storages(self) -> tuple[RegisteredStorage, ...]:
        return tuple(storage for _, storage in self._storages.values())

    def read(self, tensor: Any, where: str) -> TensorView:
        """Read one tensor.

        Raises:
            LayoutError: If the tensor has a private format, and its storage is larger than its
                elements. Then only the device knows where the elements are.
        """
        storage = tensor.untyped_storage()
        address = int(storage.data_ptr())
        num_bytes = int(storage.nbytes())
        index, _ = self._storages.setdefault(
            address, (len(self._storages), RegisteredStorage(address, num_bytes))
        )
        item_bytes = int(tensor.element_size())
        acl_format = _acl_format_of(tensor)
        is_private_format = acl_format not in _PLAIN_ACL_FORMATS
        tensor_bytes = math.prod(map(int, tensor.shape)) * item_bytes
        if is_private_format and num_bytes != tensor_bytes:
            raise LayoutError(
                f"{where}: its tensor has ACL format {acl_format}, and a storage of {num_bytes} "
                f"bytes for {tensor_bytes} bytes of elements; expected one without padding: this "
                "layout is not supported"
            )
        return TensorView(
            storage=index,
            offset_bytes=int(tensor.storage_offset()) * item_bytes,
            shape=tuple(map(int, tensor.shape)),
            strides_bytes=tuple(int(stride) * item_bytes for stride in tensor.stride()),
            item_bytes=item_bytes,
            dtype=str(tensor.dtype).removeprefix("torch."),
            is_private_format=is_private_format,
        )


def _acl_format_of(tensor: Any) -> int:
    """The ACL format of a tensor; ND for tensors that are not on an NPU.

    A worker with tensors on an NPU has imported ``torch_npu``.
    """
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None or not str(tensor.device).startswith("npu"):
        return _PLAIN_ACL_FORMATS[-1]
    return int(torch_npu.get_npu_format(tensor))


def tensors_of(entry: Any) -> Iterator[Any]:
    """The tensors of one entry of ``kv_caches``: a tensor, or a list or tuple of entries."""
    if isinstance(entry, (list, tuple)):
        for item in entry:
            yield from tensors_of(item)
    elif entry is not None:
        yield entry


def device_type_of(kv_caches: Mapping[str, Any]) -> str:
    """The device type of all tensors, such as ``npu`` or ``cpu``.

    Raises:
        LayoutError: If there are no tensors, or if they are on several device types.
    """
    tensors = tensors_of([*kv_caches.values()])
    types = {str(tensor.device).partition(":")[0] for tensor in tensors}
    if len(types) != 1:
        raise LayoutError(
            f"kv_caches: expected tensors of one device type, found {sorted(types) or 'none'}; "
            "register the tensors of one worker"
        )
    return types.pop()


def storage_tensors(layout: KVLayout, kv_caches: Mapping[str, Any]) -> tuple[Any, ...]:
    """The storages of a layout, each as a one-dimensional ``torch.uint8`` tensor.

    Args:
        layout: A layout that was built from these ``kv_caches``.
    """
    import torch

    tensors = tensors_of([*kv_caches.values()])
    by_address = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    return tuple(
        torch.empty(0, dtype=torch.uint8, device=by_address[one.address].device).set_(
            by_address[one.address].untyped_storage()
        )
        for one in layout.storages
    )
