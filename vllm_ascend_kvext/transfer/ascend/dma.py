# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""vLLM-Ascend's batched copy, ``torch.ops._C_ascend.swap_blocks_batch``.

Its last argument is the direction of all copies. It enqueues them on the current stream of the
current NPU (vLLM-Ascend ``csrc/torch_binding.cpp``), and checks neither contiguity nor sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_ascend_kvext.transfer.accelerator.dma import BatchedCopy, BatchedDmaBackend
from vllm_ascend_kvext.transfer.ascend.host_registration import is_registered
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.schema import Direction

if TYPE_CHECKING:
    import torch

_DIRECTIONS = {Direction.HOST_TO_PAGES: 0, Direction.PAGES_TO_HOST: 1}


class AscendDmaBackend(BatchedDmaBackend):
    """Copies between pools on one NPU and a pinned host buffer."""

    name = "ascend-dma"
    device_type = "npu"

    def is_pinned(self, host: torch.Tensor) -> bool:
        # torch_npu may know only what it has allocated itself.
        return super().is_pinned(host) or is_registered(host)

    def operator(self) -> BatchedCopy:
        import torch

        try:
            copy_batch = torch.ops._C_ascend.swap_blocks_batch
        except AttributeError as error:
            raise BackendError(
                "ascend-dma: expected the operator _C_ascend::swap_blocks_batch, found none. "
                "Import vllm_ascend.vllm_ascend_C first (vLLM-Ascend built with its custom "
                "kernels)."
            ) from error

        def copy(
            sources: torch.Tensor,
            destinations: torch.Tensor,
            sizes: torch.Tensor,
            direction: Direction,
        ) -> None:
            copy_batch(sources, destinations, sizes, _DIRECTIONS[direction])

        return copy
