# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What an NPU has for transfers: the DMA engines, an experimental kernel, and their fence."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.accelerator.fence import StreamFence
from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
from vllm_ascend_kvext.transfer.ascend.host_registration import pin_host
from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.compute_fence import ComputeFence
from vllm_ascend_kvext.transfer.errors import BackendError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger("vllm.ascend_kvext.transfer")

MIN_MEAN_RUN_BYTES_FOR_DMA = 16 * 1024
"""For smaller runs, a descriptor of the DMA engine costs more than the bytes that it moves. The
value is an estimate; it has not been measured on an NPU."""


class NpuTransfers:
    """See `devices.DeviceTransfers`."""

    def choose_backend(self, transfer: Transfer, *, uses_kernel: bool) -> Backend:
        """Choose the DMA engines, or the kernel for small runs if it is asked for.

        If the kernel is asked for and cannot be used, the DMA engines are used, and one WARNING
        says why.
        """
        run_bytes = mean_run_bytes(transfer)
        if not uses_kernel or run_bytes >= MIN_MEAN_RUN_BYTES_FOR_DMA:
            return AscendDmaBackend()
        try:
            kernel = AscendKernelBackend()
        except BackendError as error:
            _warn_once(f"it cannot be had: {error}")
            return AscendDmaBackend()
        if not kernel.can_reach(transfer):
            _warn_once("the host buffer is not mapped for the device. Call map_host on it, once.")
            return AscendDmaBackend()
        return kernel

    def make_fence(self, device: torch.device) -> ComputeFence:
        return StreamFence(device)

    def pin_host(self, host: torch.Tensor) -> Callable[[], None]:
        return pin_host(host)

    def map_host(self, host: torch.Tensor) -> Callable[[], None]:
        kernel = AscendKernelBackend()
        kernel.map_host(host)
        return partial(kernel.unmap_host, host)


def mean_run_bytes(transfer: Transfer) -> float:
    """The mean bytes of a run in one plane; 0 if nothing moves.

    Raises:
        DescriptorError: A table is wrong.
    """
    num_bytes, num_plane_runs = native().validate(*transfer.descriptors)
    return num_bytes / num_plane_runs if num_plane_runs else 0.0


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "The AscendC kernel is asked for, and the DMA engines are used instead: %s", reason
    )
