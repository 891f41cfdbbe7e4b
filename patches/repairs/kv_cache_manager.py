# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_manager.py``: all groups hit equally far, and only computed blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import tokens_per_block, uncache
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


def trim_full_groups(
    wrapped: Callable[..., tuple[KVCacheBlocks, int]],
    manager: KVCacheManager,
    request: Request,
) -> tuple[KVCacheBlocks, int]:
    """Return no block behind the hit in any full-attention group."""
    blocks, hit_tokens = wrapped(request)
    for group_id, block_tokens in _full_groups(manager.coordinator):
        group_blocks = blocks.blocks[group_id]
        if len(group_blocks) * block_tokens > hit_tokens:
            del group_blocks[hit_tokens // block_tokens :]
    return blocks, hit_tokens


def _full_groups(coordinator: KVCacheCoordinator) -> tuple[tuple[int, int], ...]:
    """The group id and the tokens per block of each full-attention group. They never change."""
    state = CoordinatorState.of(coordinator)
    if state.full_groups is None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        state.full_groups = tuple(
            (manager.kv_cache_group_id, tokens_per_block(coordinator, manager))
            for manager in coordinator.single_type_managers
            if isinstance(manager.kv_cache_spec, FullAttentionSpec)
        )
    return state.full_groups


def uncache_when_preempted(
    wrapped: Callable[..., None], manager: KVCacheManager, *args: Any, **kwargs: Any
) -> None:
    """Have a new manager uncache what a preempted request has cached and never computed."""
    wrapped(*args, **kwargs)
    # This replacement lies over retention's, which settles what is left of a request.
    _replaced.replace(manager, _UncachingManager(manager).free)


class _UncachingManager:
    """The methods of one block manager that this repair replaces."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    def free(self, wrapped: Callable[[Request], None], request: Request) -> None:
        """Uncache the blocks of a preempted request whose tokens were scheduled, not computed.

        Upstream counts tokens as computed once the step is planned. If a request is preempted
        earlier, it has cached more tokens than it counts. Only running requests are preempted. For
        other requests, a failed load may have set the count to 0, but the blocks that they had hit
        are right.
        """
        from vllm.v1.request import RequestStatus

        if request.status == RequestStatus.RUNNING:
            manager = self._manager
            coordinator = manager.coordinator
            uncomputed = [
                block
                for group in coordinator.single_type_managers
                for block in group.req_to_blocks.get(request.request_id, ())[
                    request.num_computed_tokens // tokens_per_block(coordinator, group) :
                ]
                if block.block_hash is not None
            ]
            if uncomputed:
                uncache(manager.block_pool, uncomputed)
        wrapped(request)


_replaced = InstanceMethods()

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_ASCEND_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"
_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)

PATCHES = (
    Patch(
        id="KVX-143",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        feature="trim-full-groups",
        vllm=BEFORE_0_30,
        wrapper=trim_full_groups,
        why="Upstream trims the first full-attention group to the hit. The other groups return "
        "cached blocks behind the hit, and the request then writes into these.",
        retire_when="0.23 is not supported any more: vLLM 0.30 trims every full-attention group",
        relies_on=(
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
        ),
        ascend=(
            f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
            f"{_ASCEND_COORDINATOR}._get_effective_block_size",
        ),
    ),
    Patch(
        id="KVX-312",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
        feature="preempted-in-step",
        wrapper=uncache_when_preempted,
        undo=_replaced.take_back,
        why="Upstream caches blocks when their tokens are scheduled. A request that is preempted "
        "(by priority) in the same step leaves blocks that can be hit and were never computed.",
        retire_when="upstream uncaches them; vLLM 0.30.0 does not (pull request 43569 is open)",
        relies_on=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.free",
            f"{_SCHEDULER}._preempt_request",
            f"{_SCHEDULER}._update_after_schedule",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.block_pool:BlockPool.evict_blocks",
        ),
        ascend=(
            f"{_ASCEND_LIFETIME}:_patched_allocate_slots",
            f"{_ASCEND_LIFETIME}:_patched_update_after_schedule",
            "vllm_ascend.patch.platform.patch_pp_mtp:_patch_scheduler_update_after_schedule.<locals>."
            "_patched_update_after_schedule",
        ),
    ),
)
