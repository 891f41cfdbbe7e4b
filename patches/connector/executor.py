# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/executor/abstract.py``: memory is counted before workers take or lose it.

Host memory is counted before workers take it. Transfers end before the memory of the KV caches
goes away.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from vllm_ascend_kvext.engine_configuration import HostReport


def end_transfers_before_sleep(
    wrapped: Callable[..., None], executor: Executor, *args: Any, **kwargs: Any
) -> None:
    """Let no worker read or write a page while the engine sleeps."""
    if executor.vllm_config.kv_transfer_config is not None and not executor.is_sleeping:
        executor.collective_rpc(end_transfers)
    wrapped(*args, **kwargs)


def end_transfers(worker: Any) -> None:
    """Wait, in a worker's process, until none of its transfers runs. Queued transfers fail."""
    from vllm.distributed import kv_transfer

    if kv_transfer.has_kv_transfer_group():
        connector = kvext_connector_in(kv_transfer.get_kv_transfer_group())
        if connector is not None and connector.worker_side is not None:
            connector.worker_side.end_transfers()


def count_host_memory(
    wrapped: Callable[..., None], executor: Executor, kv_cache_configs: list[KVCacheConfig]
) -> None:
    """Refuse an engine whose workers want more host memory than is left, before one takes any.

    Each worker alone would find enough left, until the others have taken their parts.
    """
    vllm_config = executor.vllm_config
    if vllm_config.kv_transfer_config is not None:
        # Engines without a connector do not need this import.
        from vllm_ascend_kvext.engine_configuration import check_hosts, has_connector

        if has_connector(vllm_config):
            page_bytes = max(map(_page_bytes, kv_cache_configs), default=0)
            device_type = vllm_config.device_config.device_type
            reports = executor.collective_rpc(report_host, args=(device_type,))
            check_hosts(vllm_config, reports, page_bytes)
    wrapped(kv_cache_configs)


def _page_bytes(kv_cache_config: KVCacheConfig) -> int:
    """The bytes of a worker's KV cache."""
    tensors = kv_cache_config.kv_cache_tensors
    sizes = [tensor.size for tensor in tensors]
    if any(hasattr(tensor, "layer_stride") for tensor in tensors):
        return max(sizes)  # Since vLLM 0.30, all are parts of one allocation of this size.
    return sum(sizes)


def report_host(worker: Any, device_type: str) -> HostReport | None:
    """What is left on the host of a worker, in its process; None if it has its memory already."""
    from vllm.distributed import kv_transfer

    if kv_transfer.has_kv_transfer_group():
        return None
    # Workers of engines without a connector do not need this import.
    from vllm_ascend_kvext.engine_configuration import HostReport

    return HostReport.of_this_process(device_type)


PATCHES = (
    Patch(
        id="KVX-410",
        target="vllm.v1.executor.abstract:Executor.sleep",
        feature="connector",
        wrapper=end_transfers_before_sleep,
        why="Sleep mode unmaps the memory of the KV caches, and tells no connector whose copies "
        "are under way. On a device they would touch memory that is not there.",
        retire_when="upstream tells connectors before a worker sleeps",
        relies_on=("vllm.v1.executor.abstract:Executor.collective_rpc",),
    ),
    Patch(
        id="KVX-420",
        target="vllm.v1.executor.abstract:Executor.initialize_from_config",
        feature="connector",
        wrapper=count_host_memory,
        why="Each worker takes its part of the host memory by itself. Where all parts together are "
        "too much, the kernel kills some process, and says nothing to the engine.",
        retire_when="upstream asks connectors what they need before they take it",
        relies_on=("vllm.v1.executor.abstract:Executor.collective_rpc",),
    ),
)
