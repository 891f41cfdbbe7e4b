# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reads upstream's objects for all patches: coordinators, their groups, block tables.

There is one function per fact, for every supported vLLM and for vLLM-Ascend. The module knows no
feature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_kvext.groups.kinds import kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.upstream_state import PoolState

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.metrics.stats import PrefillStats
    from vllm.v1.request import Request

_ANY_LENGTH_TOKENS = 1 << 40


def is_ascend(coordinator: KVCacheCoordinator) -> bool:
    """Whether the coordinator is vLLM-Ascend's own."""
    return type(coordinator).__module__.startswith("vllm_ascend.")


def tokens_per_block(coordinator: KVCacheCoordinator, manager: SingleTypeKVCacheManager) -> int:
    """Tokens that one block of a group covers.

    Managers count tokens. Only the managers of compressed groups in vLLM-Ascend 0.23 count *rows*:
    a block has ``block_size`` rows, each of ``compress_ratio`` tokens.
    """
    ratio = getattr(manager, "compress_ratio", 1) if is_ascend(coordinator) else 1
    return int(manager.block_size * ratio)


def hit_unit_tokens(coordinator: KVCacheCoordinator) -> int:
    """The number of tokens of which a coordinator's hits are multiples.

    Since vLLM 0.30, coordinators of several groups name the number. With partial hits, the number
    is less than a block. Before 0.30, vLLM-Ascend aligns hits to ``lcm_block_size`` (with the
    compress ratios), and vLLM to ``scheduler_block_size``. The coordinator of a single group aligns
    hits to the group's block size.
    """
    for name in _HIT_UNITS:
        unit_tokens: int | None = getattr(coordinator, name, None)
        if unit_tokens is not None:
            return unit_tokens
    raise AttributeError(f"{type(coordinator).__name__} names no unit of its prefix-cache hits")


_HIT_UNITS = ("_cache_hit_alignment_tokens", "lcm_block_size", "block_size", "scheduler_block_size")


def has_partial_hits(coordinator: KVCacheCoordinator) -> bool:
    """Whether a hit may end within a block, which is then copied for the request (since 0.30)."""
    return getattr(coordinator, "enable_partial_hash_hits", False)


def cache_unit_tokens(coordinator: KVCacheCoordinator) -> int | None:
    """Blocks are cached up to multiples of this number of tokens; None if all full blocks are.

    A coordinator of several groups waits for a multiple, unless it has partial hits. A group that
    looks ahead then caches one block more.
    """
    if not hasattr(coordinator, "attention_groups") or has_partial_hits(coordinator):
        return None
    return coordinator.scheduler_block_size


def hashes_in_key(hashes_per_block: int) -> int:
    """The number of hashes that make a block's key: all, or since vLLM 0.30 only the last one."""
    from vllm.v1.core.kv_cache_utils import BlockHashListWithBlockSize

    hashes: Any = [b"1"] * hashes_per_block
    return len(BlockHashListWithBlockSize(hashes, 1, hashes_per_block)[0])


class LookupGroup(NamedTuple):
    """KV cache groups of one spec, which a coordinator looks up as one.

    With ``use_eagle``, a hit drops the last block that it finds (EAGLE, MTP). For this block, the
    lookup goes ``margin_tokens`` past a length. If one group drops a block, all groups with the
    same spec do. vLLM-Ascend 0.30 drops no block if no connector loads KV
    (``skips_eagle_block_drop``). Its managers still cache the block ahead.
    """

    spec: KVCacheSpec
    group_ids: tuple[int, ...]
    manager: SingleTypeKVCacheManager  # The manager of the first group.
    use_eagle: bool
    margin_tokens: int


def lookup_groups(coordinator: KVCacheCoordinator) -> tuple[LookupGroup, ...]:
    """The groups of a coordinator in its order of lookup.

    Groups whose blocks are never cached are left out (``prefix_cacheable``).
    """
    managers = coordinator.single_type_managers
    ahead = coordinator.eagle_group_ids
    groups = getattr(coordinator, "attention_groups", None)
    if groups is None:
        (manager,) = managers
        groups = ((manager.kv_cache_spec, (0,)),)
    drops = not getattr(coordinator, "skips_eagle_block_drop", False)
    # Since vLLM 0.30, states follow EAGLE's boundary. Their lookup looks at no further block.
    states_follow = is_ascend(coordinator) or hasattr(coordinator, "get_replay_boundaries")
    return tuple(
        LookupGroup(
            spec,
            tuple(ids),
            managers[ids[0]],
            drops and not ahead.isdisjoint(ids),
            0 if states_follow and kind_of(spec) is GroupKind.STATE else spec.block_size,
        )
        for spec, ids, *_ in groups
    )


def defining_class(kind: type, method: str) -> type:
    """The class that defines a method of ``kind``: ``kind`` itself, or a base class."""
    return next(each for each in kind.__mro__ if method in vars(each))


def leaves_a_decode(scheduler: Scheduler, request: Request, stop_tokens: int) -> bool:
    """Whether the tokens behind a stop are as many as those of a decode with drafts.

    vLLM-Ascend 0.23.0 computes such a rest of a prompt as a decode whose drafts were all accepted
    (``gdn_attn_builder.py``, ``_fold_spec_sized_prefill_chunks_into_spec``): the layer goes on from
    a state that is not the request's. Upstream's own steps hardly ever leave such a rest.
    """
    num_draft_tokens = getattr(scheduler, "num_spec_tokens", 0)
    return bool(num_draft_tokens) and request.num_tokens - stop_tokens == num_draft_tokens + 1


def step_start_tokens(
    request: Request, num_new_local_computed_tokens: int, num_external_computed_tokens: int
) -> int:
    """The tokens of a request before a step that is being planned.

    Args:
        num_new_local_computed_tokens: The tokens that the request has just hit in the prefix cache.
        num_external_computed_tokens: The tokens that the connector loads.
    """
    return (
        request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
    )


def uncache(block_pool: BlockPool, blocks: list[KVCacheBlock]) -> None:
    """Take blocks out of the prefix cache. Free blocks become the next to be reallocated."""
    block_pool.evict_blocks({block.block_id for block in blocks})
    free = [block for block in blocks if block.ref_cnt == 0]
    queue = block_pool.free_block_queue
    for block in free:
        queue.remove(block)
    queue.prepend_n(free)
    on_uncached = PoolState.of(block_pool).on_uncached
    if on_uncached is not None:
        on_uncached(free)


def set_external_hit_tokens(found: PrefillStats, num_tokens: int) -> None:
    """Correct the number of a request's tokens that the connector had. All else stays."""
    found.set(
        num_prompt_tokens=found.num_prompt_tokens,
        num_local_cached_tokens=found.num_local_cached_tokens,
        num_external_cached_tokens=num_tokens,
    )


def drop_nulls(manager: SingleTypeKVCacheManager, request_id: str) -> int:
    """Take the null blocks out of a request's block table, which is about to be freed.

    A table has nulls where no block is held: before a window, and before and between the states of
    a Mamba group. Groups that hold every block are not searched.

    Returns:
        The number of nulls.
    """
    blocks = manager.req_to_blocks.get(request_id)
    if not blocks or not manager.get_num_skipped_tokens(_ANY_LENGTH_TOKENS):
        return 0
    live = live_blocks(blocks)
    num_nulls = len(blocks) - len(live)
    if num_nulls:
        # This is a new list, because code that was handed the table may still read it.
        manager.req_to_blocks[request_id] = live
    return num_nulls


def live_blocks(blocks: list[KVCacheBlock]) -> list[KVCacheBlock]:
    """The blocks of a table that are not null, in their order. The table itself if none is null."""
    stop = len(blocks)
    while stop and not blocks[stop - 1].is_null:
        stop -= 1
    if not stop:
        return blocks
    # For a window, only nulls are left. Each comparison compares only pointers.
    if blocks[:stop].count(blocks[stop - 1]) == stop:
        return blocks[stop:]
    return [block for block in blocks if not block.is_null]
