# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/executor/abstract.py``: transfers end before the memory of the KV caches goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.connector.scheduler import kvext_connector_in
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.v1.executor.abstract import Executor


def end_transfers_before_sleep(
    wrapped: Callable[..., None], executor: Executor, *args: Any, **kwargs: Any
) -> None:
    """Let no worker read or write a page while it sleeps."""
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
)
