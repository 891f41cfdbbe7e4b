# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The types of devices whose pages can be moved, and the classes that move them.

The class of a device other than the CPU is registered by the names of its module and class, as in
vLLM's factories. The module is imported when pages are on such a device. So transfers can be read
and changed without it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from vllm_ascend_kvext.transfer.backend import Backend, CpuBackend, Transfer
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch


class DeviceTransfers(Protocol):
    """Chooses what moves pages of one type of device. Made without arguments, once per process."""

    def choose_backend(self, transfer: Transfer, *, uses_kernel: bool) -> Backend:
        """Choose the backend for a transfer whose pools are all on devices of this type.

        Args:
            uses_kernel: Whether a kernel of the device may do the transfer, if there is one.

        Raises:
            DescriptorError: A table is wrong.
        """

    def make_fence(self, device: torch.device) -> ComputeFence:
        """Make the fence between the model on ``device`` and copies of its pages."""

    def pin_host(self, host: torch.Tensor) -> Callable[[], None]:
        """Let copies of the device read and write memory that torch has not allocated.

        Args:
            host: The memory. dtype: uint8, shape: ``[num_bytes]``, from the start of a page on.

        Returns:
            A function that ends the access. Call it once, when every transfer has ended.

        Raises:
            BackendError: The device cannot, or it refuses.
        """

    def map_host(self, host: torch.Tensor) -> Callable[[], None]:
        """Let a kernel of the device reach a host buffer.

        Returns:
            A function that ends the access. Call it once, when every transfer has ended.

        Raises:
            BackendError: The device has no kernel, or it refuses.
        """


class CpuTransfers:
    """Transfers of pages in host memory."""

    def __init__(self) -> None:
        self._backend = CpuBackend()

    def choose_backend(self, transfer: Transfer, *, uses_kernel: bool) -> Backend:
        return self._backend

    def make_fence(self, device: torch.device) -> ComputeFence:
        return ComputeFence()

    def pin_host(self, host: torch.Tensor) -> Callable[[], None]:
        return lambda: None

    def map_host(self, host: torch.Tensor) -> Callable[[], None]:
        raise BackendError("cpu: expected a device with a kernel of its own, found none.")


_CPU = CpuTransfers()

CUDA = "cuda"
"""The type of NVIDIA GPUs. GPUs of AMD have it, too; `CudaTransfers` refuses them."""

_PLACES: dict[str, tuple[str, str]] = {
    "npu": ("vllm_ascend_kvext.transfer.ascend.npu_transfers", "NpuTransfers"),
    CUDA: ("vllm_ascend_kvext.transfer.cuda_transfers", "CudaTransfers"),
}
"""Maps a type of device to the module and the class of its transfers."""

DEVICE_TYPES = ("cpu", *_PLACES)
"""The types of devices whose pages can be moved."""


@functools.cache
def transfers_on(device_type: str) -> DeviceTransfers:
    """The transfers of a type of device; raises `BackendError` if no backend serves it."""
    if device_type == "cpu":
        return _CPU
    if device_type not in _PLACES:
        raise BackendError(
            f"kv_caches: expected pages on {' or '.join(DEVICE_TYPES)}, found some on "
            f"{device_type}: no backend moves them. Leave the connector out."
        )
    module, name = _PLACES[device_type]
    made: DeviceTransfers = getattr(import_module(module), name)()
    return made
