# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_coordinator.py``: the longest hit of all groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from vllm_ascend_kvext.groups.model import GroupKind, window_pages
from vllm_ascend_kvext.groups.spec_attributes import kind_of, window_tokens_of
from vllm_ascend_kvext.patches.fast_prefix_cache.block_pool import faster, group_keys
from vllm_ascend_kvext.patches.upstream import (
    LookupGroup,
    hit_unit_tokens,
    lookup_groups,
    tokens_per_block,
)
from vllm_ascend_kvext.patching.declaration import SINCE_0_30
from vllm_ascend_kvext.prefix_cache.lookup import Hit, Lookup, LookupGroups
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


def find_longest_common_hit(
    wrapped: Callable[..., Hit],
    coordinator: KVCacheCoordinator,
    block_hashes: Sequence[bytes],
    max_cache_hit_length: int,
) -> Hit:
    """Look the groups up as a whole, where all of them are of a known kind."""
    state = CoordinatorState.of(coordinator)
    if not state.has_described_lookup:
        state.lookup = _describe(coordinator)
        state.has_described_lookup = True
    lookup = state.lookup
    if lookup is None:
        return wrapped(block_hashes, max_cache_hit_length)
    table = coordinator.block_pool.cached_block_hash_to_block._cache
    return lookup.longest_hit(table.get, block_hashes, max_cache_hit_length)


def _describe(coordinator: KVCacheCoordinator) -> Lookup | None:
    """The coordinator's groups; None if upstream has to look some of them up."""
    managers = coordinator.single_type_managers
    num_ranks = getattr(coordinator, "dcp_world_size", 1) * getattr(
        coordinator, "pcp_world_size", 1
    )
    pool = coordinator.block_pool
    is_pool_shared = all(manager.block_pool is pool for manager in managers)
    if num_ranks > 1 or not is_pool_shared:
        return None
    groups = [_describe_group(coordinator, group) for group in lookup_groups(coordinator)]
    known = [group for group in groups if group is not None]
    if not known or len(known) < len(groups):
        return None
    finds_junctions = hasattr(coordinator, "get_replay_boundaries")
    return Lookup(known, len(managers), pool.null_block, finds_junctions)


def _describe_group(coordinator: KVCacheCoordinator, group: LookupGroup) -> LookupGroups | None:
    """Groups that share a spec; None if they are looked up in a way that is not known here."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    # A subclass may look up in another way.
    known = {
        GroupKind.FULL: managers.FullAttentionManager,
        GroupKind.WINDOW: managers.SlidingWindowManager,
        GroupKind.STATE: managers.MambaManager,
    }
    kind, unit_tokens = kind_of(group.spec), hit_unit_tokens(coordinator)
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
_FINDERS = tuple(
    f"{_MANAGERS}:{manager}.find_longest_cache_hit"
    for manager in ("FullAttentionManager", "SlidingWindowManager", "MambaManager")
)

_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)

_of_finding = partial(
    faster,
    wrapper=find_longest_common_hit,
    why="Upstream calls functions for every block of the prompt, in every group.",
)

PATCHES = (
    *(
        _of_finding(
            id=patch_id,
            target=f"{_MODULE}:{coordinator}.find_longest_cache_hit",
            relies_on=(*relies_on, *_FINDERS),
            ascend=(
                "vllm_ascend.patch.platform.patch_mamba_manager:"
                "AscendMambaManager.find_longest_cache_hit",
            ),
        )
        for patch_id, coordinator, relies_on in (
            (
                *("KVX-221", "HybridKVCacheCoordinator"),
                (f"{_MODULE}:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",),
            ),
            ("KVX-222", "UnitaryKVCacheCoordinator", ()),
        )
    ),
    _of_finding(
        id="KVX-223",
        target=f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
        vllm=SINCE_0_30,
        relies_on=(f"{_ASCEND_COORDINATOR}.verify_and_split_kv_cache_groups",),
    ),
)
