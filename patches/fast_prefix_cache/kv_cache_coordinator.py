# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_coordinator.py``: the longest hit of all groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.groups.kinds import kind_of, window_tokens_of
from vllm_ascend_kvext.groups.model import GroupKind, window_pages
from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import group_keys
from vllm_ascend_kvext.patches.upstream import (
    LookupGroup,
    defining_class,
    hit_unit_tokens,
    is_ascend,
    lookup_groups,
    tokens_per_block,
)
from vllm_ascend_kvext.prefix_cache.lookup import Hit, Lookup, LookupGroups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


class FastLookup:
    """The lookup of one coordinator. All its groups have a known kind."""

    def __init__(self, coordinator: KVCacheCoordinator, lookup: Lookup) -> None:
        self._block_pool = coordinator.block_pool
        self._lookup = lookup

    def find_longest_cache_hit(
        self,
        wrapped: Callable[..., Hit],
        block_hashes: Sequence[bytes],
        max_cache_hit_length: int,
    ) -> Hit:
        """Look all groups up at once."""
        table = self._block_pool.cached_block_hash_to_block._cache
        return self._lookup.longest_hit(table.get, block_hashes, max_cache_hit_length)


def describe_lookup(coordinator: KVCacheCoordinator) -> Lookup | None:
    """The coordinator's groups; None if upstream has to look some of them up."""
    from vllm.v1.core import kv_cache_coordinator as upstreams

    finder = defining_class(type(coordinator), "find_longest_cache_hit")
    # Since 0.30, vLLM-Ascend's coordinators find the same hits as upstream's.
    is_known = is_ascend(coordinator) and hasattr(coordinator, "get_replay_boundaries")
    is_known |= finder in (
        upstreams.HybridKVCacheCoordinator,
        upstreams.UnitaryKVCacheCoordinator,
    )
    num_ranks = getattr(coordinator, "dcp_world_size", 1) * getattr(
        coordinator, "pcp_world_size", 1
    )
    managers = coordinator.single_type_managers
    pool = coordinator.block_pool
    is_pool_shared = all(manager.block_pool is pool for manager in managers)
    if not is_known or num_ranks > 1 or not is_pool_shared:
        return None
    groups = [_describe_group(coordinator, group) for group in lookup_groups(coordinator)]
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    finds_junctions = hasattr(coordinator, "get_replay_boundaries")
    return Lookup(known, len(managers), pool.null_block, finds_junctions)


def _describe_group(coordinator: KVCacheCoordinator, group: LookupGroup) -> LookupGroups | None:
    """The description of groups that share a spec; None if their lookup is not known here."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    # A subclass may look up in another way.
    known = {
        GroupKind.FULL: managers.FullAttentionManager,
        GroupKind.WINDOW: managers.SlidingWindowManager,
        GroupKind.STATE: managers.MambaManager,
    }
    kind = kind_of(group.spec)
    unit_tokens = hit_unit_tokens(coordinator)
    block_tokens = tokens_per_block(coordinator, group.manager)
    if known.get(kind) is not type(group.manager) or unit_tokens % block_tokens:
        return None
    return LookupGroups(
        kind=kind,
        block_tokens=block_tokens,
        unit_blocks=unit_tokens // block_tokens,
        window_blocks=window_pages(window_tokens_of(group.spec), block_tokens),
        use_eagle=group.use_eagle,
        margin_tokens=group.margin_tokens,
        group_ids=group.group_ids,
        keys=tuple(
            group_keys(coordinator.block_pool, group_id, block_tokens)
            for group_id in group.group_ids
        ),
    )


_MODULE = "vllm.v1.core.kv_cache_coordinator"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)

RELIES_ON = (
    f"{_MODULE}:HybridKVCacheCoordinator.find_longest_cache_hit",
    f"{_MODULE}:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
    f"{_MODULE}:UnitaryKVCacheCoordinator.find_longest_cache_hit",
    f"{_MANAGERS}:FullAttentionManager.find_longest_cache_hit",
    f"{_MANAGERS}:SlidingWindowManager.find_longest_cache_hit",
    f"{_MANAGERS}:MambaManager.find_longest_cache_hit",
)
"""The functions that are replaced, and the functions whose results the replacements must equal.

Upstream calls functions for every block of the prompt, in every group.
"""

ASCEND = (
    "vllm_ascend.patch.platform.patch_mamba_manager:AscendMambaManager.find_longest_cache_hit",
)

ASCEND_SINCE_0_30 = (
    f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
    f"{_ASCEND_COORDINATOR}.verify_and_split_kv_cache_groups",
)
"""The functions of vLLM-Ascend. The lookup of vLLM-Ascend 0.23 is not replaced."""
