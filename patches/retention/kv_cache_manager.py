# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_manager.py``: retention ends with a request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.retention import (
    block_pool,
    kv_cache_coordinator,
    single_type_kv_cache_manager,
)

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention


class RetainingManager:
    """Methods of one block manager."""

    def __init__(self, retention: CheckpointRetention) -> None:
        self._retention = retention

    def free(self, wrapped: Callable[[Request], Any], request: Request) -> Any:
        """Settle what a finished or preempted request leaves in the prefix cache.

        Upstream's replay boundary belongs to the prompt. So a request that is preempted while
        decoding, or that a next turn extends, would resume long before the end of its computed
        tokens.
        """
        self._retention.release(request)
        return wrapped(request)

    def pop_blocks_for_free(self, wrapped: Callable[[Request], Any], request: Request) -> Any:
        """As `free`, if blocks are freed later because steps in flight write them (vLLM 0.30)."""
        return self.free(wrapped, request)


def retaining_methods(
    manager: KVCacheManager, retention: CheckpointRetention
) -> Iterator[tuple[object, Callable[..., Any]]]:
    """The methods for a manager and the objects it is made of, each with the object that gets it.

    Each has the name of the method that it replaces.
    """
    coordinator = manager.coordinator
    pool = coordinator.block_pool
    is_since_0_30 = hasattr(manager, "pop_blocks_for_free")
    of_pool = block_pool.RetainingPool if is_since_0_30 else block_pool.RetainingPoolBefore030
    of_coordinator = (
        kv_cache_coordinator.RetainingCoordinator
        if is_since_0_30
        else kv_cache_coordinator.RetainingCoordinatorBefore030
    )
    retaining_pool = of_pool(pool, retention.cache_state)
    yield pool, retaining_pool.cache_full_blocks
    yield pool, retaining_pool.get_new_blocks
    yield pool, retaining_pool.free_blocks
    yield pool, retaining_pool.reset_prefix_cache
    if retention.inside is not None:
        inside_blocks = kv_cache_coordinator.RetainingCoordinatorInsideBlocks(
            coordinator, retention
        )
        yield coordinator, inside_blocks.get_num_blocks_to_allocate
        yield coordinator, inside_blocks.allocate_new_computed_blocks
        yield coordinator, inside_blocks.new_step_starts
    retaining_coordinator = of_coordinator(coordinator, retention)
    yield coordinator, retaining_coordinator.cache_blocks
    yield coordinator, retaining_coordinator.remove_skipped_blocks
    for group_manager in coordinator.single_type_managers:
        group = single_type_kv_cache_manager.RetainingGroup(group_manager)
        yield group_manager, group.pop_blocks_for_free if is_since_0_30 else group.free
    retaining_manager = RetainingManager(retention)
    yield manager, retaining_manager.free
    if is_since_0_30:
        yield manager, retaining_manager.pop_blocks_for_free


_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"

RELIES_ON = (f"{_MANAGER}.free",)
RELIES_ON_SINCE_0_30 = (f"{_MANAGER}.pop_blocks_for_free",)
