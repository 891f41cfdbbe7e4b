# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What an NVIDIA GPU has for transfers: vLLM's batched copy, and the fence of its streams.

``torch.ops._C_cache_ops.swap_blocks_batch(sources, destinations, sizes, is_src_access_order_any)``
enqueues copies of any direction on the current stream (vLLM
``csrc/libtorch_stable/cache_kernels.cu``). With a driver for CUDA 12.8 or later, one call of
``cuMemcpyBatchAsync`` makes them, which refuses the legacy default stream. Nothing here has run on
a GPU; tests use a stand-in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.transfer.accelerator.dma import BatchedCopy, BatchedDmaBackend
from vllm_ascend_kvext.transfer.accelerator.fence import StreamFence
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction

if TYPE_CHECKING:
    import torch

# The sources may be read only when the stream has come to the copies. This is right for both
# directions, and vLLM's default.
_IS_SRC_ACCESS_ORDER_ANY = False


class CudaDmaBackend(BatchedDmaBackend):
    """Copies between pools on one NVIDIA GPU and a pinned host buffer."""

    name = "cuda-dma"
    device_type = "cuda"

    def operator(self) -> BatchedCopy:
        import torch

        try:
            copy_batch = torch.ops._C_cache_ops.swap_blocks_batch
        except AttributeError as error:
            raise BackendError(
                "cuda-dma: expected the operator _C_cache_ops::swap_blocks_batch, found none. "
                "Install vLLM's wheel for CUDA, and let the platform import its kernels."
            ) from error

        def copy(
            sources: torch.Tensor,
            destinations: torch.Tensor,
            sizes: torch.Tensor,
            direction: Direction,
        ) -> None:
            copy_batch(sources, destinations, sizes, _IS_SRC_ACCESS_ORDER_ANY)

        return _beside_the_default_stream(copy)


def _beside_the_default_stream(copy_batch: BatchedCopy) -> BatchedCopy:
    """Let copies that are enqueued on the legacy default stream run on another one, in order."""

    def copy(
        sources: torch.Tensor,
        destinations: torch.Tensor,
        sizes: torch.Tensor,
        direction: Direction,
    ) -> None:
        import torch

        current = torch.cuda.current_stream()
        if current.cuda_stream:
            copy_batch(sources, destinations, sizes, direction)
            return
        beside = torch.cuda.Stream()
        beside.wait_stream(current)
        try:
            with torch.cuda.stream(beside):
                copy_batch(sources, destinations, sizes, direction)
        finally:
            # This is needed after an error, too: some copies may have been enqueued.
            current.wait_stream(beside)

    return copy


class CudaTransfers:
    """See `devices.DeviceTransfers`."""

    def __init__(self) -> None:
        """Raise `BackendError` on ROCm, whose devices have the type ``cuda``, too."""
        import torch

        if torch.version.hip is not None:
            raise BackendError(
                f"kv_caches: expected pages on an NVIDIA GPU, found ROCm {torch.version.hip}: "
                "copies and page formats of vLLM on ROCm differ, and were not examined. Leave the "
                "connector out."
            )

    def choose_backend(self, transfer: Transfer, *, uses_kernel: bool) -> Backend:
        return CudaDmaBackend()

    def make_fence(self, device: torch.device) -> ComputeFence:
        return StreamFence(device)

    def pin_host(self, host: torch.Tensor) -> Callable[[], None]:
        raise BackendError("cuda: expected memory that torch has pinned, found other memory.")

    def map_host(self, host: torch.Tensor) -> Callable[[], None]:
        raise BackendError("cuda: expected a device with a kernel of its own, found none.")
