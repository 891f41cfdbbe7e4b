# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_coordinator.py``: a block that one group hits goes to no other group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


def hold_hits_while_allocating(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request_id: str,
    new_computed_blocks: Sequence[Sequence[KVCacheBlock]],
    num_local_computed_tokens: int,
    num_external_computed_tokens: int,
) -> None:
    """Take the hits of all groups off the free queue before any group allocates from it."""
    held: list[KVCacheBlock] = []
    if num_external_computed_tokens > 0:  # Without a load, no block is allocated.
        num_tokens = num_local_computed_tokens + num_external_computed_tokens
        for manager, blocks in zip(
            coordinator.single_type_managers, new_computed_blocks, strict=True
        ):
            # The request does not use blocks before the window, so any group may allocate them.
            first = manager.get_num_skipped_tokens(num_tokens) // manager.block_size
            held += [b for b in blocks[first:] if b.ref_cnt == 0 and not b.is_null]
    # `BlockPool.touch` is not called, because it would count as an access in the metrics.
    for block in held:
        coordinator.block_pool.free_block_queue.remove(block)
        block.ref_cnt += 1
    try:
        wrapped(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )
    finally:
        coordinator.block_pool.free_blocks(held)


PATCHES = (
    Patch(
        id="KVX-301",
        target="vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.allocate_new_computed_blocks",
        feature="two-phase-allocation",
        vllm=BEFORE_0_30,
        wrapper=hold_hits_while_allocating,
        why="Upstream goes from group to group, takes the local hits of each, and allocates its "
        "blocks for what a KV connector loads. A block that a later group hits can be allocated "
        "for an earlier group, and then belongs to both.",
        retire_when="0.23 is not supported any more: vLLM 0.30 takes the hits of all groups first",
        relies_on=(
            "vllm.v1.core.single_type_kv_cache_manager:"
            "SingleTypeKVCacheManager.allocate_new_computed_blocks",
            "vllm.v1.core.block_pool:BlockPool.touch",
            "vllm.v1.core.block_pool:BlockPool.free_blocks",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
        ),
        ascend=(
            "vllm_ascend.core.single_type_kv_cache_manager:"
            "CompressAttentionManager.allocate_new_computed_blocks",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
        ),
    ),
)
