# SPDX-License-Identifier: Apache-2.0
"""The Ascend DMA backend: vLLM-Ascend's batched copy, fed with our descriptors.

``torch.ops._C_ascend.swap_blocks_batch(sources, destinations, sizes, direction)`` takes three int64
tensors in host memory with one entry per copy. All copies have one direction. The operator enqueues
them on the current stream of the current NPU (vLLM-Ascend ``csrc/torch_binding.cpp``). It keeps no
reference to the tensors, and checks neither contiguity nor sizes.
"""

from __future__ import annotations

from typing import Any

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.ascend.device import InFlight, npu, npu_of
from vllm_ascend_kvext.transfer.backend import Transfer
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction

_HOST_TO_DEVICE = 0
_DEVICE_TO_HOST = 1

# Pointer arrays that the device may still read. They belong to the process, because a backend may
# be dropped earlier.
IN_FLIGHT = InFlight()


class AscendDmaBackend:
    """Copies between pools on one NPU and a pinned host buffer, with the DMA engines.

    The copies are asynchronous. The bytes have arrived once the stream that was current has done
    its work. Until then the caller keeps pools and host buffer alive.
    """

    name = "ascend-dma"

    def run(self, transfer: Transfer) -> None:
        import torch

        device = npu_of(transfer, self.name)
        host = transfer.host_tensor
        if host.device.type != "cpu" or not host.is_pinned():
            raise BackendError(
                f"{self.name}: expected a host buffer in pinned memory, found one on "
                f"{host.device.type}, not pinned. Allocate it with pin_memory=True: the device "
                "reads and writes it while the call has long returned."
            )
        arrays = native().expand(*transfer.descriptors)
        IN_FLIGHT.release_finished()
        if not len(arrays[0]):
            return
        copy_batch = _batched_copy()
        tensors = tuple(torch.from_numpy(array) for array in arrays)
        is_store = transfer.direction == Direction.PAGES_TO_HOST
        with npu().device(device):
            try:
                copy_batch(*tensors, _DEVICE_TO_HOST if is_store else _HOST_TO_DEVICE)
            except RuntimeError as error:
                raise BackendError(
                    f"{self.name}: swap_blocks_batch failed with {len(tensors[0])} copies on "
                    f"{device}: {error}. Treat the destination as not written."
                ) from error
            finally:
                # This is needed after an error, too: some copies may have been enqueued.
                IN_FLIGHT.hold(tensors)


def _batched_copy() -> Any:
    import torch

    try:
        return torch.ops._C_ascend.swap_blocks_batch
    except AttributeError as error:
        raise BackendError(
            "ascend-dma: expected the operator _C_ascend::swap_blocks_batch, found none. Import "
            "vllm_ascend.vllm_ascend_C first (vLLM-Ascend built with its custom kernels)."
        ) from error
