# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/block_pool.py``: one tight loop for each operation on many blocks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import defining_class, hashes_in_key
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.prefix_cache.runs import RequestUpTo
from vllm_ascend_kvext.upstream_state import PoolState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


class FastPool:
    """Methods of one block pool.

    Args:
        whole_group_ids: Groups whose blocks are cached from the first to the last. Upstream caches
            the blocks of other groups.
    """

    def __init__(self, pool: BlockPool, whole_group_ids: Collection[int]) -> None:
        self._pool = pool
        self._whole_group_ids = whole_group_ids

    def methods(self, is_retained: bool) -> Iterator[Callable[..., Any]]:
        """The methods that replace upstream's own methods, and no method of a subclass.

        Args:
            is_retained: Whether retention decides what is cached, in a method of its own.
        """
        from vllm.v1.core.block_pool import BlockPool

        replaced: list[Callable[..., Any]] = [self.get_new_blocks]
        if not is_retained:
            replaced.append(self.cache_full_blocks)
        for method in replaced:
            if defining_class(type(self._pool), method.__name__) is BlockPool:
                yield method

    def get_new_blocks(
        self, wrapped: Callable[[int], list[KVCacheBlock]], num_blocks: int
    ) -> list[KVCacheBlock]:
        """Allocate blocks. Only cached blocks cost more than a few assignments."""
        pool = self._pool
        queue = pool.free_block_queue
        is_watched = pool.metrics_collector or getattr(pool, "_reuse_watchers", None)
        if is_watched or num_blocks > queue.num_free_blocks:
            return wrapped(num_blocks)
        blocks = queue.popleft_n(num_blocks)
        cache = pool.cached_block_hash_to_block._cache
        evict = pool._maybe_evict_cached_block
        is_silent = not pool.enable_kv_cache_events
        with_more_keys = getattr(pool, "cached_block_hashes_by_block", ())  # Since vLLM 0.30.
        for block in blocks:
            assert not block.ref_cnt
            block.ref_cnt = 1
            key = block._block_hash
            if key is not None:
                if is_silent and cache.get(key) is block and block.block_id not in with_more_keys:
                    del cache[key]
                    block.reset_hash()
                else:
                    evict(block)
        return blocks

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
        """Cache a run of blocks, and make no key that is not used."""
        if num_cached_blocks >= num_full_blocks:
            return
        pool = self._pool
        # Since vLLM 0.30 a block that is not full may have a hash, which another hash replaces.
        has_hash = blocks[num_cached_blocks]._block_hash is not None
        is_whole = block_mask is None and kv_cache_group_id in self._whole_group_ids
        if is_whole and not has_hash and not pool.enable_kv_cache_events:
            run = range(num_cached_blocks, num_full_blocks)
            hashes = request.block_hashes
            cache_run(pool, hashes, blocks, run, block_size, kv_cache_group_id)
            return
        # Upstream slices a request's hashes up to the prompt's end for each block.
        num_hashes = num_full_blocks * block_size // pool.hash_block_size
        wrapped(
            RequestUpTo(request, num_hashes),
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )


def group_keys(block_pool: BlockPool, group_id: int, block_tokens: int) -> GroupKeys:
    """The keys of a group whose blocks hold ``block_tokens`` tokens, made once."""
    known = PoolState.of(block_pool).group_keys
    keys = known.get((group_id, block_tokens))
    if keys is None:
        hashes_per_block = block_tokens // block_pool.hash_block_size
        keys = GroupKeys.of_group(group_id, hashes_per_block, hashes_in_key(hashes_per_block))
        known[group_id, block_tokens] = keys
    return keys


def cache_run(
    pool: BlockPool,
    hashes: Sequence[bytes],
    blocks: Sequence[KVCacheBlock],
    run: range,
    block_tokens: int,
    group_id: int,
) -> None:
    """Cache a run of a request's blocks without its nulls. The function emits no events."""
    keys = group_keys(pool, group_id, block_tokens)
    assert len(hashes) >= run.stop * keys.hashes_per_block
    table = pool.cached_block_hash_to_block
    cache = table._cache
    has_lengths = hasattr(pool.null_block, "_block_hash_num_tokens")  # Since vLLM 0.30.
    num_tokens = run.start * block_tokens
    for block, key in zip(blocks[run.start : run.stop], keys.of(hashes, run), strict=True):
        num_tokens += block_tokens
        if block.is_null:
            continue
        assert block._block_hash is None
        block._block_hash = key
        if has_lengths:
            block._block_hash_num_tokens = num_tokens
        if key in cache:
            table.insert(key, block)
        else:
            cache[key] = block


def free_by_use(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    """Free cached blocks to the back of the queue, and all others to its front, each in order."""
    uncached = [block for block in blocks if block._block_hash is None]
    if uncached:
        blocks = [block for block in blocks if block._block_hash is not None]
    if blocks:
        pool.free_blocks(blocks)
    if uncached:
        pool.free_blocks(uncached, prepend=True)


_POOL = "vllm.v1.core.block_pool:BlockPool"
_TABLE = "vllm.v1.core.block_pool:BlockHashToBlockMap"

RELIES_ON = (
    f"{_POOL}.get_new_blocks",
    f"{_POOL}.cache_full_blocks",
    f"{_POOL}._maybe_evict_cached_block",
    f"{_TABLE}.pop",
    f"{_TABLE}.insert",
    "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n",
    "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id",
    "vllm.v1.core.kv_cache_utils:BlockHashListWithBlockSize._get_value_at",
)
"""The functions that are replaced, and the functions whose results the replacements must equal.

Upstream calls a method for every block that it allocates. It makes keys for every block up to the
prompt's end.
"""
