# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/block_pool.py``: the runs that are cached, and the places of freed blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import uncache
from vllm_ascend_kvext.prefix_cache.runs import RequestUpTo, runs_between

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
            # Since vLLM 0.30, connectors are told of the state's block, which leaves the table.
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

    def cache_inside(self, request: Request, group: ManagedGroup, tokens: int) -> None:
        block = self._block_at(request, group, tokens)
        if block is not None:
            self._cache_partial(request, group, block, tokens)

    def cache_state_inside(self, request: Request, group: ManagedGroup, tokens: int) -> bool:
        block = self._block_at(request, group, tokens)
        if block is None or block.block_hash is not None:
            return False
        key = self._cache_partial(request, group, block, tokens)
        # The request's next allocation moves the key to a new block, to which the state is copied.
        manager: Any = group.manager
        index = tokens // group.block_tokens
        manager._partial_hit_reqs[request.request_id] = index, block
        manager.num_cached_block[request.request_id] = index
        # That allocation tells connectors of the new block.
        manager._producer_partial_tail_reqs[request.request_id] = block, tokens
        # A state must not be hit in the step that computes it.
        manager.cached_blocks_this_step.add(key)
        return True

    def gives_key_away(self, request: Request, group: ManagedGroup, tokens: int) -> bool:
        manager: Any = group.manager
        key = request.block_hashes[tokens // self.block_pool.hash_block_size - 1]
        found = self.block_pool.get_cached_block(key, [manager.kv_cache_group_id])
        if not found:
            return False
        return any(
            block is found[0] and request_id != request.request_id
            for request_id, (_, block) in manager._partial_hit_reqs.items()
        )

    def _block_at(self, request: Request, group: ManagedGroup, tokens: int) -> KVCacheBlock | None:
        """The block in which a request's first ``tokens`` tokens end, inside the block."""
        blocks: list[KVCacheBlock] = group.manager.req_to_blocks[request.request_id]
        index = tokens // group.block_tokens
        if index >= len(blocks) or blocks[index].is_null:
            return None
        return blocks[index]

    def _cache_partial(
        self, request: Request, group: ManagedGroup, block: KVCacheBlock, tokens: int
    ) -> Any:
        return self.block_pool.cache_partial_block(
            request=request,
            block=block,
            num_tokens=tokens,
            kv_cache_group_id=group.manager.kv_cache_group_id,
            block_size=group.block_tokens,
        )

    def discard(self, blocks: list[KVCacheBlock]) -> None:
        uncache(self.block_pool, blocks)


class RetainingPool:
    """Methods of one block pool whose cached blocks retention keeps track of."""

    def __init__(self, block_pool: BlockPool, retained: RetainedCache) -> None:
        self._block_pool = block_pool
        self._retained = retained

    def cache_full_blocks(
        self,
        wrapped: Callable[..., None],
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        """Call upstream once per run of blocks, so that each event describes the blocks it names.

        Upstream emits one event for a range with holes. The token ids of this event cover blocks
        that its hashes leave out (vLLM issue 44451).
        """
        hashes_per_block = block_size // self._block_pool.hash_block_size
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

    def get_new_blocks(
        self, wrapped: Callable[[int], list[KVCacheBlock]], num_blocks: int
    ) -> list[KVCacheBlock]:
        """Let the least useful checkpoints give way to the blocks that are allocated.

        Upstream evicts blocks one by one, in the order in which they were freed. It evicts a
        checkpoint before the full-attention blocks that the checkpoint unlocks. Nothing can hit
        these blocks then.
        """
        self._retained.make_room(num_blocks)
        return wrapped(num_blocks)

    def free_blocks(
        self, wrapped: Callable[..., None], ordered_blocks: Iterable[KVCacheBlock]
    ) -> None:
        """Free blocks so that blocks that no checkpoint needs are reallocated first.

        Upstream itself puts blocks without a hash to the front of the queue.
        """
        self._free_by_use(ordered_blocks, wrapped, wrapped)

    def reset_prefix_cache(self, wrapped: Callable[[], bool]) -> bool:
        """Reset the cache, and forget its checkpoints."""
        is_reset = wrapped()
        if is_reset:
            self._retained.clear()
        return is_reset

    def _free_by_use(
        self,
        ordered_blocks: Iterable[KVCacheBlock],
        free_cached: Callable[[list[KVCacheBlock]], None],
        free_useless: Callable[[list[KVCacheBlock]], None],
    ) -> None:
        retained = self._retained
        blocks = ordered_blocks if isinstance(ordered_blocks, list) else list(ordered_blocks)
        useless, cached, num_surplus = retained.split_freed(blocks)
        if cached:
            free_cached(cached)
        if num_surplus:
            retained.note_surplus(cached, num_surplus)
        if useless:
            free_useless(useless)
            retained.note_uncached(useless)


class RetainingPoolBefore030(RetainingPool):
    """As `RetainingPool`, for vLLM < 0.30, which frees blocks in the order of its argument."""

    def free_blocks(
        self,
        wrapped: Callable[..., None],
        ordered_blocks: Iterable[KVCacheBlock],
        prepend: bool = False,
    ) -> None:
        """Free cached blocks to the back of the queue, all others to its front.

        Blocks without a hash can never be hit. If they stood behind cached blocks in the queue, the
        cached blocks would be reallocated first.
        """
        self._free_by_use(ordered_blocks, wrapped, partial(wrapped, prepend=True))


_POOL = "vllm.v1.core.block_pool:BlockPool"
_QUEUE = "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue"

RELIES_ON = (
    f"{_POOL}.cache_full_blocks",
    f"{_POOL}.free_blocks",
    f"{_POOL}.get_new_blocks",
    f"{_POOL}.reset_prefix_cache",
    f"{_POOL}.evict_blocks",
    f"{_POOL}.get_cached_block",
    f"{_QUEUE}.append",
    f"{_QUEUE}.remove",
    f"{_QUEUE}.popleft_n",
)

_ASCEND = "vllm_ascend.patch.platform.patch_kv_cache_utils"

ASCEND_BEFORE_0_30 = (
    f"{_ASCEND}:_ascend_free_blocks",
    f"{_ASCEND}:_ascend_free_queue_append_n",
    f"{_ASCEND}:_ascend_free_queue_prepend_n",
)
