# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Adaptive retention in a test process. Its state is compared with the block pool.

The state says which cached blocks are worth keeping. A cached block that the state does not know
would stay for ever. A block that the state knows twice would be given up twice.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

from support.installed import installed, retention_installed
from support.retention.cache_state import check_cache_state, num_checkpoints
from support.retention.started import retention_of
from support.scheduler.engine import SchedulerEngine
from support.scheduler.transcript import Step
from vllm_ascend_kvext.settings import RETENTION_VARIABLE, Retention


def adaptive_chosen() -> AbstractContextManager[Any]:
    """The environment in which a block manager gets adaptive retention."""
    return mock.patch.dict(os.environ, {RETENTION_VARIABLE: Retention.ADAPTIVE.value})


@contextmanager
def adaptive_retention() -> Iterator[None]:
    """Install adaptive retention as for a user, with the repairs and the faster prefix cache."""
    with installed("fast-prefix-cache"), retention_installed(), adaptive_chosen():
        yield


def cache_state_of(block_manager: Any) -> Any:
    """The `RetainedCache` of a ``KVCacheManager``. None if nothing is retained."""
    retention = retention_of(block_manager.coordinator)
    return None if retention is None else retention.cache_state


class CheckpointsAccountForCache:
    """Check that every cached block without a request belongs to a checkpoint or is surplus.

    This is a `support.scheduler.run.Check`. When no request is left, it checks more.
    """

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        retention = retention_of(engine.scheduler.kv_cache_manager.coordinator)
        if retention is None:
            return
        pool = engine.block_pool
        check_cache_state(retention, pool.blocks, pool.free_block_queue.get_all_free_blocks())
        if not engine.scheduler.requests:
            self.counts["checkpoints when idle"] += num_checkpoints(retention.cache_state)
            assert not retention._request_states, "retention remembers requests that are gone"
