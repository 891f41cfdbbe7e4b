# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The transfer op: one call moves every group, plane and run of a request with a suitable backend.

One call can move several chunks of a request, which lie anywhere in the host buffer. The planes are
listed once per chunk, with the chunk's ``HOST_OFFSET_BYTES`` and a group number of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.devices import DEVICE_TYPES, transfers_on
from vllm_ascend_kvext.transfer.errors import BackendError
from vllm_ascend_kvext.transfer.placement import CALLING_THREAD, CopyPlacement
from vllm_ascend_kvext.transfer.pools import Pools, require_bytes
from vllm_ascend_kvext.transfer.schema import Direction, PlaneColumn, RunColumn, Table

if TYPE_CHECKING:
    import torch


def page_transfer(
    pools: Pools,
    host: torch.Tensor,
    planes: Table,
    runs: Table,
    direction: Direction,
    *,
    backend: Backend | None = None,
    placement: CopyPlacement | None = None,
    is_bundled: bool = True,
    uses_kernel: bool = False,
) -> None:
    """Move every run of every group through every plane, between pages and one host buffer.

    Args:
        host: The host buffer. dtype: uint8, shape: [num_bytes], contiguous.
        planes: See `PlaneColumn`. shape: [num_planes, 9].
        runs: See `RunColumn`; sorted by group. An empty table moves nothing. shape: [num_runs, 5].
        direction: Which way the bytes go.
        backend: The backend; None chooses it by the pools' device and the mean run size.
        placement: The CPUs of a copy on the host; None copies on the calling thread.
        is_bundled: False calls the backend once per plane, with the same result.
        uses_kernel: Whether the AscendC kernel may serve an NPU, see `NpuTransfers`.

    Raises:
        DescriptorError: A tensor or table is wrong, or the pools are not where they were
            registered; nothing has been written.
        BackendError: The backend cannot run here, or its device refused.
    """
    pools.require_current()
    require_bytes("host", host)
    transfer = Transfer(
        pools.table,
        host.data_ptr(),
        host.numel(),
        planes,
        runs,
        direction,
        placement or CALLING_THREAD,
        pools.tensors,
        host,
    )
    if not is_bundled or not len(runs):
        native().validate(*transfer.descriptors)
        if not len(runs):
            return
    backend = backend or choose_backend(transfer, pools.device_types, uses_kernel=uses_kernel)
    if is_bundled:
        backend.run(transfer)
        return
    for part in _by_plane(transfer):
        backend.run(part)


def _by_plane(transfer: Transfer) -> Iterator[Transfer]:
    """Split a transfer into transfers of one plane each, which helps to find a faulty plane.

    The transfer must have been validated before, because its parts do not show whether planes
    overlap.
    """
    groups = transfer.runs[:, RunColumn.GROUP]
    for index, group in enumerate(transfer.planes[:, PlaneColumn.GROUP]):
        first, last = np.searchsorted(groups, (group, group + 1))
        if first < last:
            yield transfer._replace(
                planes=transfer.planes[index : index + 1], runs=transfer.runs[first:last]
            )


def choose_backend(
    transfer: Transfer, device_types: Sequence[str], *, uses_kernel: bool = False
) -> Backend:
    """Choose a backend by the device of the pools and by the size of the runs.

    Args:
        transfer: The transfer that the backend is to run.
        device_types: The device types of its pools, without repetition.
        uses_kernel: Whether a kernel of the device may do it, see `DeviceTransfers`.

    Raises:
        DescriptorError: A table is wrong.
        BackendError: The pools are on a device that no backend serves, or on several.
    """
    device_type = device_types[0] if device_types else "cpu"
    if len(device_types) > 1 or device_type not in DEVICE_TYPES:
        raise BackendError(
            f"pools: expected all of them on {' or all on '.join(DEVICE_TYPES)}, found "
            f"{', '.join(device_types)}. Pass the backend that serves them."
        )
    return transfers_on(device_type).choose_backend(transfer, uses_kernel=uses_kernel)
