# SPDX-License-Identifier: Apache-2.0
"""Which backend moves a transfer."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Sequence

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.settings import ASCEND_KERNEL_VARIABLE, parse_uses_ascend_kernel
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.cpu import CpuBackend
from vllm_ascend_kvext.transfer.errors import BackendError

logger = logging.getLogger("vllm.ascend_kvext.transfer")

# Below this a descriptor of the DMA engine costs more than the bytes it moves. An estimate: it has
# not been measured on an NPU.
LEAST_MEAN_RUN_BYTES_FOR_DMA = 16 * 1024

_CPU = CpuBackend()


def mean_run_bytes(transfer: Transfer) -> float:
    """Mean size of what one run moves in one plane; 0 where nothing moves.

    Raises:
        DescriptorError: A table is wrong.
    """
    num_bytes, num_plane_runs = native().validate(*transfer.descriptors)
    return num_bytes / num_plane_runs if num_plane_runs else 0.0


def choose_backend(transfer: Transfer, device_types: Sequence[str]) -> Backend:
    """The backend for where the pools are and how large the runs are.

    Args:
        transfer: What is to move.
        device_types: Where its pools are, without repetition.

    Raises:
        DescriptorError: A table is wrong.
        BackendError: The pools are on a device that no backend serves, or on several.
        SettingsError: ``VLLM_ASCEND_KVEXT_ASCEND_KERNEL`` has a wrong value.
    """
    if device_types in (("cpu",), ()):
        return _CPU
    if tuple(device_types) == ("npu",):
        return _ascend_backend(transfer)
    raise BackendError(
        f"pools: expected all of them on cpu or all on npu, found {', '.join(device_types)}. "
        "Pass the backend that serves them."
    )


def _ascend_backend(transfer: Transfer) -> Backend:
    from vllm_ascend_kvext.transfer.ascend.dma import AscendDmaBackend
    from vllm_ascend_kvext.transfer.ascend.kernel import AscendKernelBackend

    run_bytes = mean_run_bytes(transfer)
    if not _uses_kernel() or run_bytes >= LEAST_MEAN_RUN_BYTES_FOR_DMA:
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


@functools.cache
def _uses_kernel() -> bool:
    return parse_uses_ascend_kernel(os.environ)


@functools.cache
def _warn_once(reason: str) -> None:
    logger.warning(
        "%s=1 asks for the AscendC kernel, and the DMA engines are used instead: %s",
        ASCEND_KERNEL_VARIABLE,
        reason,
    )
