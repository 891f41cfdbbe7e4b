# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/single_type_kv_cache_manager.py``: what one group caches and frees."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import cache_run, free_by_use
from vllm_ascend_kvext.patches.upstream import defining_class, drop_nulls
from vllm_ascend_kvext.prefix_cache.runs import TailRule

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


def methods_of_group(
    manager: SingleTypeKVCacheManager, is_retained: bool
) -> Iterator[Callable[..., Any]]:
    """The methods that replace methods of one manager.

    Each of them does what one function of upstream does, and replaces no other function.

    Args:
        is_retained: Whether retention decides what is cached. Retention does not ask upstream's
            managers.
    """
    from vllm.v1.core import single_type_kv_cache_manager as upstreams

    rule = None if is_retained else tail_rule(manager)
    if rule is not None and _has(manager, "cache_blocks", upstreams.SingleTypeKVCacheManager):
        yield FastTails(manager, rule).cache_blocks
    window = FastWindow(manager)
    # Since vLLM 0.30, a window has no function of its own to free a request's blocks.
    if _has(manager, "free", upstreams.SlidingWindowManager):
        yield window.free
    if not _leaves_blocks(manager):
        return
    if hasattr(manager, "_remove_blocks_in_range"):
        if _has(manager, "_remove_blocks_in_range", upstreams.SingleTypeKVCacheManager):
            yield window._remove_blocks_in_range
    elif _has(manager, "remove_skipped_blocks", upstreams.SingleTypeKVCacheManager):
        yield window.remove_skipped_blocks


def _has(manager: SingleTypeKVCacheManager, method: str, owner: type) -> bool:
    """Whether the class ``owner`` of upstream defines a manager's method."""
    return defining_class(type(manager), method) is owner


def _leaves_blocks(manager: SingleTypeKVCacheManager) -> bool:
    """Whether a manager frees blocks of a running request."""
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

    methods = ("get_num_skipped_tokens", "remove_skipped_blocks")
    return not all(_has(manager, method, SingleTypeKVCacheManager) for method in methods)


def is_cached_whole(manager: SingleTypeKVCacheManager) -> bool:
    """Whether upstream's own code caches a group, and leaves none of its blocks out."""
    from vllm.v1.core import single_type_kv_cache_manager as upstreams

    cacher = defining_class(type(manager), "cache_blocks")
    return cacher.__module__ == upstreams.__name__ and _has(
        manager, "reachable_block_mask", upstreams.SingleTypeKVCacheManager
    )


def tail_rule(manager: SingleTypeKVCacheManager) -> TailRule | None:
    """The rule by which a sliding window leaves blocks out; None if the rule is not known."""
    from vllm.v1.core.single_type_kv_cache_manager import SlidingWindowManager

    if not _has(manager, "reachable_block_mask", SlidingWindowManager):
        return None
    block_tokens = manager.kv_cache_spec.block_size
    unit_tokens = manager.scheduler_block_size
    unit_tokens = getattr(manager, "cache_hit_alignment_tokens", unit_tokens)  # Since vLLM 0.30.
    if unit_tokens is None or unit_tokens % block_tokens or block_tokens != manager.block_size:
        return None
    ahead_blocks = int(manager.use_eagle)
    return TailRule(
        unit_blocks=unit_tokens // block_tokens,
        need_blocks=-(-(manager.kv_cache_spec.sliding_window - 1) // block_tokens) + ahead_blocks,
        ahead_blocks=ahead_blocks,
    )


class FastTails:
    """The method by which the manager of one sliding window caches blocks."""

    def __init__(self, manager: SingleTypeKVCacheManager, rule: TailRule) -> None:
        self._manager = manager
        self._rule = rule

    def cache_blocks(
        self,
        wrapped: Callable[..., None],
        request: Request,
        num_tokens: int,
        retention_interval: int | None = None,
        **boundaries: Any,
    ) -> None:
        """Cache runs of blocks, without a flag for every block that is not cached."""
        manager = self._manager
        request_id = request.request_id
        block_tokens = manager.block_size
        run = range(manager.num_cached_block.get(request_id, 0), num_tokens // block_tokens)
        if not run:
            return
        pool = manager.block_pool
        blocks = manager.req_to_blocks[request_id]
        # Since vLLM 0.30 a block that is not full may have a hash, which another hash replaces.
        has_hash = blocks[run.start]._block_hash is not None
        if pool.enable_kv_cache_events or retention_interval is not None or has_hash:
            wrapped(request, num_tokens, retention_interval, **boundaries)
            return
        hashes = request.block_hashes
        assert len(hashes) >= run.stop
        for kept in self._rule.runs(run):
            cache_run(pool, hashes, blocks, kept, block_tokens, manager.kv_cache_group_id)
        manager.num_cached_block[request_id] = run.stop


class FastWindow:
    """The methods by which the manager of one group frees blocks."""

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self._manager = manager

    def remove_skipped_blocks(
        self, wrapped: Callable[..., None], request_id: str, total_computed_tokens: int
    ) -> None:
        """Free the blocks that leave a window. If no block leaves, compare only one block."""
        manager = self._manager
        skipped_tokens = manager.get_num_skipped_tokens(total_computed_tokens)
        if skipped_tokens <= 0:
            return
        blocks = manager.req_to_blocks[request_id]
        stop = min(skipped_tokens // manager.block_size, len(blocks))
        if not stop or blocks[stop - 1] is manager._null_block:
            return
        if hasattr(wrapped, "__wrapped__"):
            # vllm-ascend 0.23.0 lets windows wait for steps in flight, so it may free fewer blocks.
            wrapped(request_id, total_computed_tokens)
            return
        _free_up_to(manager, blocks, 0, stop, partial(free_by_use, manager.block_pool))

    def _remove_blocks_in_range(
        self, wrapped: Callable[..., None], request_id: str, first_block: int, last_block: int
    ) -> None:
        """Free the blocks that leave a window."""
        manager = self._manager
        blocks = manager.req_to_blocks.get(request_id, [])
        stop = min(last_block, len(blocks))
        _free_up_to(manager, blocks, first_block, stop, manager.block_pool.free_blocks)

    def free(self, wrapped: Callable[..., None], request_id: str) -> None:
        """Free a request's blocks without a look at each null before its window."""
        manager = self._manager
        # Upstream counts down a reference for each null.
        if num_nulls := drop_nulls(manager, request_id):
            manager._null_block.ref_cnt -= num_nulls
        blocks = manager.req_to_blocks.pop(request_id, None)
        if blocks:
            free_by_use(manager.block_pool, blocks[::-1])
        manager.num_cached_block.pop(request_id, None)


def _free_up_to(
    manager: SingleTypeKVCacheManager,
    blocks: list[KVCacheBlock],
    first: int,
    stop: int,
    free: Callable[[list[KVCacheBlock]], None],
) -> None:
    """Replace the blocks before ``stop`` by nulls, going back as far as ``first`` or a null."""
    null = manager._null_block
    start = stop
    while start > first and blocks[start - 1] is not null:
        start -= 1
    if leaving := blocks[start:stop][::-1]:
        blocks[start:stop] = [null] * len(leaving)
        free(leaving)


_MODULE = "vllm.v1.core.single_type_kv_cache_manager"
_BASE = f"{_MODULE}:SingleTypeKVCacheManager"
_WINDOW = f"{_MODULE}:SlidingWindowManager"

RELIES_ON = (
    f"{_BASE}.cache_blocks",
    f"{_WINDOW}.reachable_block_mask",
    f"{_WINDOW}.get_num_skipped_tokens",
)
"""Upstream computes a flag for every block of a chunk to find the few that it caches."""

RELIES_ON_BEFORE_0_30 = (f"{_BASE}.remove_skipped_blocks", f"{_WINDOW}.free")
"""Upstream compares all fields of each block that leaves a window, and frees empty lists if no
block leaves. For each null block of a long request it counts down a reference."""

RELIES_ON_SINCE_0_30 = (f"{_BASE}._remove_blocks_in_range",)
"""Upstream compares all fields of each block that leaves a window."""
