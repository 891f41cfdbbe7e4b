# SPDX-License-Identifier: Apache-2.0
"""Which backend moves a transfer, and with how many threads."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence

import numpy as np

from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.cpu import CpuBackend
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.native import native
from vllm_ascend_kvext.transfer.schema import PlaneColumn, RunColumn

# Below this a descriptor of the DMA engine costs more than the bytes it moves. An estimate: it has
# not been measured on an NPU.
LEAST_MEAN_RUN_BYTES_FOR_DMA = 16 * 1024

# Two threads come close to what one socket's memory gives to copies; the rest is for the engine.
_MOST_DEFAULT_THREADS = 4


@functools.cache
def default_num_threads() -> int:
    """Threads for a copy in host memory, where the caller does not say."""
    return min(_MOST_DEFAULT_THREADS, len(os.sched_getaffinity(0)))


def mean_run_bytes(transfer: Transfer) -> float:
    """Mean size of what one run moves in one plane; 0 where nothing moves.

    The transfer must have been found valid.
    """
    num_copies, num_bytes = 0, 0
    groups, rows = transfer.runs[:, RunColumn.GROUP], transfer.runs[:, RunColumn.NUM_ROWS]
    for group in np.unique(groups):
        of_group = transfer.planes[:, PlaneColumn.GROUP] == group
        row_bytes = transfer.planes[of_group, PlaneColumn.ROW_BYTES]
        is_run = groups == group
        num_copies += int(is_run.sum()) * len(row_bytes)
        num_bytes += int(rows[is_run].sum()) * int(row_bytes.sum())
    return num_bytes / num_copies if num_copies else 0.0


def choose_backend(transfer: Transfer, device_types: Sequence[str]) -> Backend:
    """The backend for where the pools are and how large the runs are.

    Args:
        transfer: What is to move.
        device_types: Where its pools are, without repetition.

    Raises:
        DescriptorError: A table is wrong.
        BackendError: The pools are on a device that no backend serves, or on several.
    """
    if tuple(device_types) in ((), ("cpu",)):
        return CpuBackend()
    if tuple(device_types) == ("npu",):
        return _ascend_backend(transfer)
    raise BackendError(
        f"pools: expected all of them on cpu or all on npu, found {', '.join(device_types)}. "
        "Pass the backend that serves them."
    )


def _ascend_backend(transfer: Transfer) -> Backend:
    from vllm_ascend_kvext.transfer.ascend_dma import AscendDmaBackend
    from vllm_ascend_kvext.transfer.ascend_kernel import AscendKernelBackend

    native().validate(*transfer.descriptors)
    is_small = mean_run_bytes(transfer) < LEAST_MEAN_RUN_BYTES_FOR_DMA
    if is_small and AscendKernelBackend.is_available():
        kernel = AscendKernelBackend()
        if kernel.can_reach(transfer):
            return kernel
    return AscendDmaBackend()
