# SPDX-License-Identifier: Apache-2.0
"""Adaptive retention in a test process, and what has to hold between its state and the block pool.

The state says which cached blocks are worth something; a block that it does not know would stay in
the cache for ever, and one that they know twice would be given up twice.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.installed import installed, retention_installed
from support.retention.cache_state import check_cache_state, num_checkpoints
from support.scheduler.engine import SchedulerEngine
from support.scheduler.transcript import Step
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of
from vllm_ascend_kvext.settings import RETENTION_VARIABLE, Retention

__all__ = ["CheckpointsAccountForCache", "adaptive_retention", "cache_state_of"]


@contextmanager
def adaptive_chosen() -> Iterator[None]:
    """The environment as a block manager finds it where retention is adaptive."""
    before = os.environ.get(RETENTION_VARIABLE)
    os.environ[RETENTION_VARIABLE] = Retention.ADAPTIVE.value
    try:
        yield
    finally:
        if before is None:
            del os.environ[RETENTION_VARIABLE]
        else:
            os.environ[RETENTION_VARIABLE] = before


@contextmanager
def adaptive_retention(is_fast: bool = True) -> Iterator[None]:
    """Adaptive retention as a user gets it: with the repairs and the faster prefix cache."""
    with installed(*["fast-prefix-cache"] * is_fast), retention_installed(), adaptive_chosen():
        yield


def cache_state_of(block_manager: Any) -> Any:
    """The `RetainedCache` of a ``KVCacheManager``; None where nothing is retained."""
    retention = retention_of(block_manager.coordinator)
    return None if retention is None else retention.cache_state


class CheckpointsAccountForCache:
    """Every cached block that no request holds belongs to a checkpoint, or is surplus.

    A `support.scheduler.run.Check`; it looks closer whenever no request is left.
    """

    def __init__(self) -> None:
        self.num_idle = 0
        self.num_checkpoints = 0

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        block_manager = engine.scheduler.kv_cache_manager
        if cache_state_of(block_manager) is None:
            return
        pool = block_manager.block_pool
        free_blocks = pool.free_block_queue.get_all_free_blocks()
        check_cache_state(retention_of(block_manager.coordinator), pool.blocks, free_blocks)
        if not engine.scheduler.requests:
            self.num_idle += 1
            self.num_checkpoints += num_checkpoints(cache_state_of(block_manager))
            check_idle(block_manager)


def check_idle(block_manager: Any) -> None:
    """No request is left: nothing is remembered of any."""
    retention = retention_of(block_manager.coordinator)
    assert not retention._request_states, "remembers requests that are gone"
