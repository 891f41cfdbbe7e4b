# SPDX-License-Identifier: Apache-2.0
"""The transfer op: every group, plane and run of a request in one call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.settings import parse_is_bundled
from vllm_ascend_kvext.transfer.backend import Backend, Transfer
from vllm_ascend_kvext.transfer.choice import choose_backend, default_num_threads
from vllm_ascend_kvext.transfer.explode import explode
from vllm_ascend_kvext.transfer.native import native
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
    is_bundled: bool | None = None,
) -> None:
    """Move every run of every group through every plane, between pages and one host buffer.

    Args:
        pools: What `Pools.of` has registered, or the tensors, at a microsecond each.
        host: The host buffer. dtype: uint8, shape: [num_bytes], contiguous.
        planes: See `PlaneColumn`. shape: [num_planes, 9].
        runs: See `RunColumn`; sorted by group. shape: [num_runs, 5].
        direction: Which way.
        backend: None chooses by the pools' device and the mean run size.
        num_threads: Of a copy on the host, the caller's included; None takes a few.
        is_bundled: False makes one call of the backend per plane, with the same result. None is
            what ``VLLM_ASCEND_KVEXT_BUNDLE`` says.

    Raises:
        DescriptorError: A tensor or table is wrong; nothing has been written.
        BackendError: The backend cannot run here, or its device refused.
        SettingsError: ``VLLM_ASCEND_KVEXT_BUNDLE`` has a wrong value.
    """
    if not isinstance(pools, Pools):
        pools = Pools.of(pools)
    require_bytes("host", host)
    transfer = Transfer(
        pools=pools.table,
        planes=planes,
        runs=runs,
        host_address=host.data_ptr(),
        host_bytes=host.numel(),
        direction=direction,
        num_threads=default_num_threads() if num_threads is None else num_threads,
        pool_tensors=pools.tensors,
        host_tensor=host,
    )
    if is_bundled is None:
        is_bundled = parse_is_bundled(os.environ)
    if not is_bundled:
        native().validate(*transfer.descriptors)
    backend = backend or choose_backend(transfer, pools.device_types)
    for part in [transfer] if is_bundled else explode(transfer):
        backend.run(part)
