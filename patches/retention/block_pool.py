# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/block_pool.py``: what is cached in one call, and where freed blocks go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import RequestUpTo
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch
from vllm_ascend_kvext.prefix_cache.runs import runs_between
from vllm_ascend_kvext.upstream_state import PoolState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_ascend_kvext._native import RetainedCache
    from vllm_ascend_kvext.retention.managed import ManagedGroup


class RetainedPool:
    """A block pool as `vllm_ascend_kvext.retention` sees it."""

    def __init__(self, block_pool: BlockPool) -> None:
        self.block_pool = block_pool

    def cache(self, request: Request, group: ManagedGroup, run: range) -> None:
        manager = group.manager
        blocks = manager.req_to_blocks[request.request_id]
        self.block_pool.cache_full_blocks(
            request=request,
            blocks=blocks,
            num_cached_blocks=run.start,
            num_full_blocks=run.stop,
            block_size=group.block_tokens,
            kv_cache_group_id=manager.kv_cache_group_id,
        )
        new_this_step = getattr(manager, "cached_blocks_this_step", None)
        if new_this_step is None:
            return
        states = [(index, blocks[index]) for index in run if not blocks[index].is_null]
        # A state must not be hit in the step that computes it.
        new_this_step.update(block._block_hash for _, block in states)
        if getattr(manager, "mamba_cache_mode", "") == "align":
            # Since vLLM 0.30 connectors are told where it lies: in the table it does not stay.
            offers = getattr(manager, "_pending_boundary_state_offloads", [])
            offers += [
                (
                    request.request_id,
                    manager.kv_cache_group_id,
                    block,
                    (index + 1) * group.block_tokens,
                )
                for index, block in states
            ]

    def discard(self, blocks: list[KVCacheBlock]) -> None:
        self.block_pool.evict_blocks({block.block_id for block in blocks})
        free = [block for block in blocks if block.ref_cnt == 0]
        _move_to_front(self.block_pool, free)
        retained = PoolState.of(self.block_pool).retained
        if retained is not None:
            retained.note_uncached(free)


def _move_to_front(block_pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    queue = block_pool.free_block_queue
    for block in blocks:
        queue.remove(block)
    queue.prepend_n(blocks)


def cache_runs(
    wrapped: Callable[..., None],
    block_pool: BlockPool,
    request: Request,
    blocks: list[KVCacheBlock],
    num_cached_blocks: int,
    num_full_blocks: int,
    block_size: int,
    kv_cache_group_id: int,
    block_mask: list[bool] | None = None,
) -> None:
    """Call upstream once per run of blocks, so that each event describes the blocks it names."""
    if PoolState.of(block_pool).retained is None:
        return wrapped(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
    hashes_per_block = block_size // block_pool.hash_block_size
    holes = [block.is_null for block in blocks[num_cached_blocks:num_full_blocks]]
    if block_mask is not None:
        holes = [hole or not kept for hole, kept in zip(holes, block_mask, strict=True)]
    for run in runs_between(holes):
        stop = num_cached_blocks + run.stop
        wrapped(
            request=RequestUpTo(request, stop * hashes_per_block),
            blocks=blocks,
            num_cached_blocks=num_cached_blocks + run.start,
            num_full_blocks=stop,
            block_size=block_size,
            kv_cache_group_id=kv_cache_group_id,
        )


def free_useless_blocks_first(
    wrapped: Callable[..., None],
    block_pool: BlockPool,
    ordered_blocks: Iterable[KVCacheBlock],
    prepend: bool = False,
) -> None:
    """Free cached blocks to the back of the queue, all others to its front."""
    retained = PoolState.of(block_pool).retained
    if retained is None:
        return wrapped(ordered_blocks, prepend)
    _free_by_use(retained, ordered_blocks, wrapped, partial(wrapped, prepend=True))


def free_surplus_first(
    wrapped: Callable[..., None],
    block_pool: BlockPool,
    ordered_blocks: Iterable[KVCacheBlock],
) -> None:
    """Free what no checkpoint needs to where it is reallocated before what one does."""
    retained = PoolState.of(block_pool).retained
    if retained is None:
        return wrapped(ordered_blocks)
    # Blocks without a hash go to the front by upstream's own doing.
    _free_by_use(retained, ordered_blocks, wrapped, wrapped)


def _free_by_use(
    retained: RetainedCache,
    ordered_blocks: Iterable[KVCacheBlock],
    free_cached: Callable[[list[KVCacheBlock]], None],
    free_useless: Callable[[list[KVCacheBlock]], None],
) -> None:
    blocks = ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
    useless, cached, num_surplus = retained.split_freed(blocks)
    if cached:
        free_cached(cached)
    if num_surplus:
        retained.note_surplus(cached, num_surplus)
    if useless:
        free_useless(useless)
        retained.note_uncached(useless)


def make_room_first(
    wrapped: Callable[..., list[KVCacheBlock]],
    block_pool: BlockPool,
    num_blocks: int,
) -> list[KVCacheBlock]:
    """Have the least useful checkpoints give way to what is allocated."""
    retained = PoolState.of(block_pool).retained
    if retained is not None:
        retained.make_room(num_blocks)
    return wrapped(num_blocks)


def forget_checkpoints(wrapped: Callable[..., bool], block_pool: BlockPool) -> bool:
    """With the cache, forget its checkpoints."""
    is_reset = wrapped()
    retained = PoolState.of(block_pool).retained
    if is_reset and retained is not None:
        retained.clear()
    return is_reset


_OF_FREEING = (
    "vllm.v1.core.block_pool:BlockPool.evict_blocks",
    "vllm.v1.core.block_pool:BlockPool.get_cached_block",
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.append",
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
)

PATCHES = (
    Patch(
        id="KVX-101",
        target="vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        feature="retention",
        wrapper=cache_runs,
        why="Upstream emits one BlockStored event for a range with holes: its token ids then "
        "cover blocks that its hashes leave out (vLLM issue 44451).",
        retire_when="upstream emits one event per contiguous run",
    ),
    Patch(
        id="KVX-102",
        target="vllm.v1.core.block_pool:BlockPool.free_blocks",
        feature="retention",
        vllm=BEFORE_0_30,
        wrapper=free_useless_blocks_first,
        why="Blocks without a hash can never be hit; behind cached ones in the free queue they "
        "push those out.",
        retire_when="0.23 is not supported any more",
        relies_on=_OF_FREEING,
        ascend=(
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_queue_append_n",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_queue_prepend_n",
        ),
    ),
    Patch(
        id="KVX-105",
        target="vllm.v1.core.block_pool:BlockPool.free_blocks",
        feature="retention",
        vllm=SINCE_0_30,
        wrapper=free_surplus_first,
        why="Upstream frees blocks that can be hit and no checkpoint needs behind those that one "
        "needs.",
        retire_when="KVX-103 is",
        relies_on=_OF_FREEING,
    ),
    Patch(
        id="KVX-103",
        target="vllm.v1.core.block_pool:BlockPool.get_new_blocks",
        feature="retention",
        wrapper=make_room_first,
        why="Upstream evicts block by block, in the order in which they were freed: a checkpoint "
        "goes before the full-attention blocks that it unlocks, which nothing can hit then.",
        retire_when="upstream evicts the blocks of a boundary together",
        relies_on=("vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n",),
    ),
    Patch(
        id="KVX-104",
        target="vllm.v1.core.block_pool:BlockPool.reset_prefix_cache",
        feature="retention",
        wrapper=forget_checkpoints,
        why="What is known of the checkpoints goes with the cache.",
        retire_when="KVX-103 is",
    ),
)
