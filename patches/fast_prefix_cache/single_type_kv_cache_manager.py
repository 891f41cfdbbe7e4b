# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/single_type_kv_cache_manager.py``: what one group caches and frees."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import (
    RequestUpTo,
    cache_run,
    faster,
    free_by_use,
)
from vllm_ascend_kvext.patches.upstream import drop_nulls
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30
from vllm_ascend_kvext.prefix_cache.runs import TailRule
from vllm_ascend_kvext.upstream_state import GroupManagerState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


def cache_by_runs(
    wrapped: Callable[..., None],
    manager: SingleTypeKVCacheManager,
    request: Request,
    num_tokens: int,
    retention_interval: int | None = None,
    **boundaries: Any,
) -> None:
    """Cache runs of blocks, without a flag for every block that is not cached."""
    request_id = request.request_id
    block_tokens = manager.block_size
    run = range(manager.num_cached_block.get(request_id, 0), num_tokens // block_tokens)
    if not run:
        return
    pool = manager.block_pool
    state = GroupManagerState.of(manager)
    if state.tail_rule is None:
        # The coordinator sets what the rule depends on before anything is cached.
        state.tail_rule = _tail_rule(manager)
    has_mask, rule = state.tail_rule
    is_upstreams = has_mask and (rule is None or retention_interval is not None)
    blocks = manager.req_to_blocks[request_id]
    # Since vLLM 0.30 a block that is not full may have a hash, which gives way to another.
    if pool.enable_kv_cache_events or is_upstreams or blocks[run.start]._block_hash is not None:
        # Upstream slices a request's hashes from each block on to the prompt's end.
        num_hashes = run.stop * block_tokens // pool.hash_block_size
        request = RequestUpTo(request, num_hashes)
        return wrapped(request, num_tokens, retention_interval, **boundaries)
    hashes = request.block_hashes
    assert len(hashes) >= run.stop
    for kept in rule.runs(run) if rule is not None else [run]:
        cache_run(pool, hashes, blocks, kept, block_tokens, manager.kv_cache_group_id)
    manager.num_cached_block[request_id] = run.stop


def _tail_rule(manager: SingleTypeKVCacheManager) -> tuple[bool, TailRule | None]:
    """Whether the manager leaves blocks out, and the rule by which it does, where it is known."""
    from vllm.v1.core.single_type_kv_cache_manager import (
        SingleTypeKVCacheManager,
        SlidingWindowManager,
    )

    mask: Any = type(manager).reachable_block_mask
    if mask.__func__ is SingleTypeKVCacheManager.reachable_block_mask.__func__:
        return False, None
    if mask.__func__ is not SlidingWindowManager.reachable_block_mask.__func__:
        return True, None
    unit_tokens, block_tokens = manager.scheduler_block_size, manager.kv_cache_spec.block_size
    unit_tokens = getattr(manager, "cache_hit_alignment_tokens", unit_tokens)  # since vLLM 0.30
    if unit_tokens is None or unit_tokens % block_tokens or block_tokens != manager.block_size:
        return True, None
    ahead_blocks = int(manager.use_eagle)
    return True, TailRule(
        unit_blocks=unit_tokens // block_tokens,
        need_blocks=-(-(manager.kv_cache_spec.sliding_window - 1) // block_tokens) + ahead_blocks,
        ahead_blocks=ahead_blocks,
    )


def skip_in_one_pass(
    wrapped: Callable[..., None],
    manager: SingleTypeKVCacheManager,
    request_id: str,
    total_computed_tokens: int,
) -> None:
    """Free the blocks that leave a window; compare one block where none does."""
    skipped_tokens = manager.get_num_skipped_tokens(total_computed_tokens)
    if skipped_tokens <= 0:
        return
    blocks = manager.req_to_blocks[request_id]
    stop = min(skipped_tokens // manager.block_size, len(blocks))
    if not stop or blocks[stop - 1] is manager._null_block:
        return
    if hasattr(wrapped, "__wrapped__"):
        # vllm-ascend 0.23.0 has windows wait for the steps in flight: fewer tokens, or the same.
        return wrapped(request_id, total_computed_tokens)
    _free_up_to(manager, blocks, 0, stop, partial(free_by_use, manager.block_pool))


def remove_in_one_pass(
    wrapped: Callable[..., None],
    manager: SingleTypeKVCacheManager,
    request_id: str,
    first_block: int,
    last_block: int,
) -> None:
    """Free the blocks that leave a window."""
    blocks = manager.req_to_blocks.get(request_id, [])
    stop = min(last_block, len(blocks))
    _free_up_to(manager, blocks, first_block, stop, manager.block_pool.free_blocks)


def _free_up_to(
    manager: SingleTypeKVCacheManager,
    blocks: list[KVCacheBlock],
    first: int,
    stop: int,
    free: Callable[[list[KVCacheBlock]], None],
) -> None:
    """Put nulls in the place of blocks before ``stop``, back to ``first`` or a null."""
    null, start = manager._null_block, stop
    while start > first and blocks[start - 1] is not null:
        start -= 1
    if leaving := blocks[start:stop][::-1]:
        blocks[start:stop] = [null] * len(leaving)
        free(leaving)


def free_window(
    wrapped: Callable[..., None], manager: SingleTypeKVCacheManager, request_id: str
) -> None:
    """Free a request's blocks without a look at the nulls before its window."""
    # Upstream counts down a reference for each of them.
    if num_nulls := drop_nulls(manager, request_id):
        manager._null_block.ref_cnt -= num_nulls
    blocks = manager.req_to_blocks.pop(request_id, None)
    if blocks:
        free_by_use(manager.block_pool, blocks[::-1])
    manager.num_cached_block.pop(request_id, None)


_MODULE = "vllm.v1.core.single_type_kv_cache_manager"
_BASE = f"{_MODULE}:SingleTypeKVCacheManager"
_WINDOW = f"{_MODULE}:SlidingWindowManager"

PATCHES = (
    faster(
        id="KVX-211",
        target=f"{_BASE}.cache_blocks",
        wrapper=cache_by_runs,
        why="Upstream computes a flag for every block of a chunk to find the few that it caches, "
        "and makes keys for every block up to the prompt's end.",
        relies_on=(
            f"{_WINDOW}.reachable_block_mask",
            "vllm.v1.core.block_pool:BlockPool.cache_full_blocks",
            "vllm.v1.core.block_pool:BlockHashToBlockMap.insert",
            "vllm.v1.core.kv_cache_utils:make_block_hash_with_group_id",
            "vllm.v1.core.kv_cache_utils:BlockHashListWithBlockSize._get_value_at",
        ),
    ),
    faster(
        id="KVX-212",
        target=f"{_BASE}.remove_skipped_blocks",
        vllm=BEFORE_0_30,
        wrapper=skip_in_one_pass,
        why="Upstream compares all fields of each block that leaves a window, and frees empty "
        "lists where none does.",
        relies_on=(f"{_WINDOW}.get_num_skipped_tokens",),
        ascend=(
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
        ),
    ),
    faster(
        id="KVX-219",
        target=f"{_BASE}._remove_blocks_in_range",
        vllm=SINCE_0_30,
        wrapper=remove_in_one_pass,
        why="Upstream compares all fields of each block that leaves a window.",
    ),
    faster(
        id="KVX-214",
        target=f"{_WINDOW}.free",
        vllm=BEFORE_0_30,
        wrapper=free_window,
        why="Upstream counts down a reference for each null block of a long request.",
    ),
)
