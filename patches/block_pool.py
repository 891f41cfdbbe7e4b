# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/block_pool.py``: what is cached in one call, and where freed blocks go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from vllm_ascend_kvext.retention.protocols import ManagedGroup

RETAINING = "_kvext_retaining"
"""Attribute set on the block pool of a coordinator whose blocks are retained sparsely."""


def is_retaining(block_pool: BlockPool) -> bool:
    return getattr(block_pool, RETAINING, False)


class RetainedPool:
    """A block pool as `vllm_ascend_kvext.retention` sees it."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool

    def cache(self, request: Request, group: ManagedGroup, run: range) -> None:
        self._block_pool.cache_full_blocks(
            request=request,
            blocks=group.manager.req_to_blocks[request.request_id],
            num_cached_blocks=run.start,
            num_full_blocks=run.stop,
            block_size=group.block_tokens,
            kv_cache_group_id=group.manager.kv_cache_group_id,
        )

    def find(self, request: Request, group: ManagedGroup, block_index: int) -> KVCacheBlock | None:
        hashes = request.block_hashes
        if group.block_tokens != self._block_pool.hash_block_size:
            from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

            hashes = BlockHashListWithBlockSize(
                hashes, self._block_pool.hash_block_size, group.block_tokens
            )
        if block_index >= len(hashes):
            return None
        found = self._block_pool.get_cached_block(
            hashes[block_index], [group.manager.kv_cache_group_id]
        )
        return found[0] if found else None

    def refresh(self, block: KVCacheBlock) -> None:
        if block.ref_cnt == 0:
            self._block_pool.free_block_queue.remove(block)
            self._block_pool.free_block_queue.append(block)

    def discard(self, blocks: list[KVCacheBlock]) -> None:
        self._block_pool.evict_blocks({block.block_id for block in blocks})
        _move_to_front(self._block_pool, [block for block in blocks if block.ref_cnt == 0])


def _move_to_front(block_pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    queue = block_pool.free_block_queue
    for block in blocks:
        queue.remove(block)
    if hasattr(queue, "prepend_n"):
        queue.prepend_n(blocks)
        return
    # vLLM 0.20.2 can only append: link the blocks in behind the queue's fake head.
    head = queue.fake_free_list_head
    for block in reversed(blocks):
        block.prev_free_block = head
        block.next_free_block = head.next_free_block
        block.next_free_block.prev_free_block = block
        head.next_free_block = block
    queue.num_free_blocks += len(blocks)


class _HashesUpTo:
    """The first ``length`` hashes of a request, without copying them.

    Upstream slices "from here to the end" for every run it caches; on a long prompt that slice
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


class _RequestUpTo:
    """A request whose block hashes end where a run ends; everything else is the request's."""

    __slots__ = ("_request", "block_hashes")

    def __init__(self, request: Request, num_hashes: int) -> None:
        self._request = request
        self.block_hashes = _HashesUpTo(request.block_hashes, num_hashes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)


def cache_runs(
    wrapped: Callable[..., None], instance: BlockPool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Call upstream once per run of blocks, so that each event describes the blocks it names."""
    if not is_retaining(instance):
        return wrapped(*args, **kwargs)
    return _cache_runs(wrapped, instance, *args, **kwargs)


def _cache_runs(
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
    hashes_per_block = block_size // block_pool.hash_block_size
    holes = [block.is_null for block in blocks[num_cached_blocks:num_full_blocks]]
    if block_mask is not None:
        holes = [hole or not kept for hole, kept in zip(holes, block_mask, strict=True)]
    for run in _runs_between(holes):
        stop = num_cached_blocks + run.stop
        wrapped(
            request=_RequestUpTo(request, stop * hashes_per_block),
            blocks=blocks,
            num_cached_blocks=num_cached_blocks + run.start,
            num_full_blocks=stop,
            block_size=block_size,
            kv_cache_group_id=kv_cache_group_id,
        )


def _runs_between(holes: list[bool]) -> Iterator[range]:
    """Maximal ranges of indices without a hole."""
    start = 0
    for hole in [i for i, is_hole in enumerate(holes) if is_hole] if True in holes else ():
        if start < hole:
            yield range(start, hole)
        start = hole + 1
    if start < len(holes):
        yield range(start, len(holes))


def free_useless_blocks_first(
    wrapped: Callable[..., None], instance: BlockPool, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Free cached blocks to the back of the queue, all others to its front."""
    if not is_retaining(instance):
        return wrapped(*args, **kwargs)
    return _free_useless_blocks_first(wrapped, instance, *args, **kwargs)


def _free_useless_blocks_first(
    wrapped: Callable[..., None],
    block_pool: BlockPool,
    ordered_blocks: Iterable[KVCacheBlock],
    prepend: bool = False,
) -> None:
    kept: list[KVCacheBlock] = []
    useless: list[KVCacheBlock] = []
    for block in ordered_blocks:
        if not block.is_null:
            (useless if prepend or block.block_hash is None else kept).append(block)
    if kept:
        wrapped(kept)
    if useless:
        wrapped(useless)
        _move_to_front(block_pool, [block for block in useless if block.ref_cnt == 0])


_VLLM = ("==0.20.2.*", "==0.23.0.*")

PATCHES = (
    Patch(
        id="KVX-101",
        target="vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
        kind=Kind.WRAP,
        feature="retention",
        vllm=_VLLM,
        wrapper=cache_runs,
        why="Upstream emits one BlockStored event for a range with holes: its token ids then "
        "cover blocks that its hashes leave out (vLLM issue 44451).",
        retire_when="upstream emits one event per contiguous run",
    ),
    Patch(
        id="KVX-102",
        target="vllm.v1.core.block_pool:BlockPool.free_blocks",
        kind=Kind.WRAP,
        feature="retention",
        vllm=_VLLM,
        wrapper=free_useless_blocks_first,
        why="Blocks without a hash can never be hit; behind cached ones in the free queue they "
        "push those out.",
        retire_when="vLLM >= 0.32, whose free_blocks splits for every caller",
        relies_on=(
            "vllm.v1.core.block_pool:BlockPool.evict_blocks",
            "vllm.v1.core.block_pool:BlockPool.get_cached_block",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.append",
            "vllm.v1.core.kv_cache_utils:FreeKVCacheBlockQueue.remove",
        ),
        ascend=(
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_blocks",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_queue_append_n",
            "vllm_ascend.patch.platform.patch_kv_cache_utils:_ascend_free_queue_prepend_n",
        ),
    ),
)
