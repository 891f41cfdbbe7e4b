# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Workers of one engine that share host memory, all in this process.

Each worker has pages of its own, and registers them in a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

from support.connector.meetings import Meeting, in_threads
from support.connector.worker_configs import AttentionLayer, parallel_config, vllm_config
from support.layout.truth import LayoutFixture
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.worker.shared_arena import HostPeers
from vllm_ascend_kvext.connector.worker.worker_side import WorkerSide


@contextmanager
def shared_workers(
    pages: Sequence[LayoutFixture],
    host_gib: float,
    num_kv_heads: int = 1,
    hosts: Sequence[str | None] | None = None,
    moves: Sequence[Any] | None = None,
) -> Iterator[list[WorkerSide]]:
    """Registered workers, one for each set of pages.

    Args:
        host_gib: The host memory of all workers together.
        hosts: The host of each worker, None if it does not know; one for all by default.
        moves: What moves the bytes of each worker; None for the transfer op.
    """
    num_ranks = len(pages)
    meeting = Meeting(num_ranks)
    hosts = hosts or ["here"] * num_ranks
    config = vllm_config(
        {name: AttentionLayer() for name in pages[0].kv_caches},
        parallel_config=parallel_config(tensor_parallel_size=num_ranks),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: num_kv_heads),
    )
    options = ConnectorOptions(host_memory_gib=host_gib, world_size=num_ranks)

    def meet(rank: int) -> HostPeers:
        return HostPeers(rank, partial(meeting.exchange, rank), hosts[rank])

    workers = [
        WorkerSide(
            config,
            pages[rank].config,
            options,
            meet=partial(meet, rank),
            move=moves[rank] if moves else None,
        )
        for rank in range(num_ranks)
    ]
    try:
        failed = in_threads(lambda rank: workers[rank].register(pages[rank].kv_caches), num_ranks)
        for each in failed:
            if each is not None:
                raise each
        yield workers
    finally:
        for worker in workers:
            worker.shutdown()
