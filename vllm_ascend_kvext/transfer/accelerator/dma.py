# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The batched DMA backend: an operator of the platform, fed with our descriptors.

vLLM and vLLM-Ascend each have an operator that takes three int64 tensors in host memory, with one
entry per copy: sources, destinations and sizes. It enqueues the copies on the current stream of the
current device. It keeps no reference to the tensors.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.accelerator.device import InFlight, device_module, device_of
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction

if TYPE_CHECKING:
    import torch

BatchedCopy = Callable[["torch.Tensor", "torch.Tensor", "torch.Tensor", Direction], Any]
"""Enqueues copies, which all have one direction, on the current stream. The arguments are sources,
destinations and sizes. dtype: int64, shape: [num_copies], in host memory. It raises
``RuntimeError`` if the device refuses; some copies may have been enqueued then."""

MAX_COPIES_PER_CALL = 4096
"""The maximum of ``aclrtMemcpyBatch`` on an NPU (Mooncake's PR 963). Calls with some 50,000 copies
have been seen to crash the driver of a GPU (vLLM's issue 49276)."""

# Pointer arrays that the device may still read. They belong to the process, because a backend may
# be dropped earlier.
IN_FLIGHT = InFlight()


class BatchedDmaBackend(ABC):
    """Copies between pools on one device and a pinned host buffer, with the DMA engines.

    The copies are asynchronous. The bytes have arrived once the stream that was current has done
    its work. Until then the caller keeps pools and host buffer alive.

    Attributes:
        name: The name of the backend in messages.
        device_type: The type of the device that holds the pools.
    """

    name: str
    device_type: str

    @abstractmethod
    def operator(self) -> BatchedCopy:
        """The operator of the platform.

        Raises:
            BackendError: The process does not have it.
        """

    def is_pinned(self, host: torch.Tensor) -> bool:
        """Whether the device may read and write a host buffer while the process goes on."""
        return bool(host.is_pinned())

    def run(self, transfer: Transfer) -> None:
        import torch

        device = device_of(transfer, self.device_type, self.name)
        host = transfer.host_tensor
        if host.device.type != "cpu" or not self.is_pinned(host):
            raise BackendError(
                f"{self.name}: expected a host buffer in pinned memory, found one on "
                f"{host.device.type}, not pinned. Allocate it with pin_memory=True: the device "
                "reads and writes it while the call has long returned."
            )
        arrays = native().expand(*transfer.descriptors)
        IN_FLIGHT.release_finished()
        if not len(arrays[0]):
            return
        copy_batch = self.operator()
        sources, destinations, sizes = (torch.from_numpy(array) for array in arrays)
        module = device_module(self.device_type)
        with module.device(device):
            try:
                for first in range(0, len(sizes), MAX_COPIES_PER_CALL):
                    part = slice(first, first + MAX_COPIES_PER_CALL)
                    copy_batch(sources[part], destinations[part], sizes[part], transfer.direction)
            except RuntimeError as error:
                raise BackendError(
                    f"{self.name}: swap_blocks_batch failed with {len(sizes)} copies on "
                    f"{device}: {error}. Treat the destination as not written."
                ) from error
            finally:
                # This is needed after an error, too: some copies may have been enqueued.
                IN_FLIGHT.hold(module, (sources, destinations, sizes))
