# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/block_pool.py``: one tight loop for each thing that is done to many blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import hashes_in_key
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.upstream_state import PoolState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


def take_new_blocks(
    wrapped: Callable[..., list[KVCacheBlock]], pool: BlockPool, num_blocks: int
) -> list[KVCacheBlock]:
    """Allocate blocks; only those that are cached cost more than a few assignments."""
    queue = pool.free_block_queue
    is_watched = pool.metrics_collector or getattr(pool, "_reuse_watchers", None)
    if is_watched or num_blocks > queue.num_free_blocks:
        return wrapped(num_blocks)
    blocks = queue.popleft_n(num_blocks)
    cache = pool.cached_block_hash_to_block._cache
    evict = pool._maybe_evict_cached_block
    is_silent = not pool.enable_kv_cache_events
    with_more_keys = getattr(pool, "cached_block_hashes_by_block", ())  # since vLLM 0.30
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
    """Cache a run of a request's blocks; nulls are left out. Emits no events."""
    keys = group_keys(pool, group_id, block_tokens)
    assert len(hashes) >= run.stop * keys.hashes_per_block
    table = pool.cached_block_hash_to_block
    cache = table._cache
    has_lengths = hasattr(pool.null_block, "_block_hash_num_tokens")  # since vLLM 0.30
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


class _HashesUpTo:
    """The first ``length`` hashes of a request, without copying them.

    Upstream slices "from here to the end" for every range it caches; on a long prompt that slice
    costs more than everything else.
    """

    __slots__ = ("_hashes", "_length")

    def __init__(self, hashes: Sequence[bytes], length: int) -> None:
        self._hashes = hashes
        self._length = min(length, len(hashes))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            return self._hashes[start:stop:step]
        return self._hashes[index]


class RequestUpTo:
    """A request whose block hashes end where a run ends; everything else is the request's."""

    __slots__ = ("_request", "block_hashes")

    def __init__(self, request: Request, num_hashes: int) -> None:
        self._request = request
        self.block_hashes = _HashesUpTo(request.block_hashes, num_hashes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def free_by_use(pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    """Free cached blocks to the back of the queue, all others to its front, each in their order."""
    uncached = [block for block in blocks if block._block_hash is None]
    if uncached:
        blocks = [block for block in blocks if block._block_hash is not None]
    if blocks:
        pool.free_blocks(blocks)
    if uncached:
        pool.free_blocks(uncached, prepend=True)


_POOL = "vllm.v1.core.block_pool:BlockPool"
_TABLE = "vllm.v1.core.block_pool:BlockHashToBlockMap"

faster = partial(
    Patch,
    kind=Kind.REPLACE,
    feature="fast-prefix-cache",
    retire_when="upstream's costs as little",
)
"""A patch of this feature."""

PATCHES = (
    faster(
        id="KVX-201",
        target=f"{_POOL}.get_new_blocks",
        wrapper=take_new_blocks,
        why="Upstream calls a method for every block that it allocates.",
        relies_on=(
            f"{_POOL}._maybe_evict_cached_block",
            f"{_TABLE}.pop",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.popleft_n",
        ),
    ),
)
