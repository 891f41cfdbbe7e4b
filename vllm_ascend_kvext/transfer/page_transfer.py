# SPDX-License-Identifier: Apache-2.0
"""The transfer op: every group, plane and run of a request in one call.

Several chunks of a request go in one call, each wherever it lies in the host buffer: the planes are
named once per chunk, with that chunk's ``HOST_OFFSET_BYTES`` and a group number of its own.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.settings import parse_is_bundled
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.choice import choose_backend
from vllm_ascend_kvext.transfer.explode import explode
from vllm_ascend_kvext.transfer.placement import CopyPlacement, default_placement
from vllm_ascend_kvext.transfer.pools import Pools, require_bytes
from vllm_ascend_kvext.transfer.schema import Direction, Table

if TYPE_CHECKING:
    import torch


def page_transfer(
    pools: Pools | Sequence[torch.Tensor],
    host: torch.Tensor,
    planes: Table,
    runs: Table,
    direction: Direction,
    *,
    backend: Backend | None = None,
    num_threads: int | None = None,
    placement: CopyPlacement | None = None,
    is_bundled: bool | None = None,
) -> None:
    """Move every run of every group through every plane, between pages and one host buffer.

    Args:
        pools: What `Pools.of` has registered, or the tensors, at a microsecond each.
        host: The host buffer. dtype: uint8, shape: [num_bytes], contiguous.
        planes: See `PlaneColumn`. shape: [num_planes, 9].
        runs: See `RunColumn`; sorted by group. None of them moves nothing. shape: [num_runs, 5].
        direction: Which way.
        backend: None chooses by the pools' device and the mean run size.
        num_threads: Of a copy on the host; None takes those of the placement.
        placement: The CPUs of a copy on the host; None is what `default_placement` says.
        is_bundled: False makes one call of the backend per plane, with the same result. None is
            what ``VLLM_ASCEND_KVEXT_BUNDLE`` said when this process first asked.

    Raises:
        DescriptorError: A tensor or table is wrong, or the pools are not where they were
            registered; nothing has been written.
        BackendError: The backend cannot run here, or its device refused.
        SettingsError: ``VLLM_ASCEND_KVEXT_BUNDLE`` has a wrong value.
    """
    if not isinstance(pools, Pools):
        pools = Pools.of(pools)
    pools.require_current()
    require_bytes("host", host)
    if num_threads is not None:
        placement = (placement or default_placement())._replace(num_threads=num_threads)
    transfer = Transfer(
        pools.table,
        planes,
        runs,
        host.data_ptr(),
        host.numel(),
        direction,
        placement,
        pools.tensors,
        host,
    )
    if is_bundled is None:
        is_bundled = _is_bundled_by_default()
    if not is_bundled or not len(runs):
        native().validate(*transfer.descriptors)
        if not len(runs):
            return
    backend = backend or choose_backend(transfer, pools.device_types)
    if is_bundled:
        backend.run(transfer)
    else:
        for part in explode(transfer):
            backend.run(part)


@functools.cache
def _is_bundled_by_default() -> bool:
    return parse_is_bundled(os.environ)
