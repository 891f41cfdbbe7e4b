# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_coordinator.py``: the longest hit of all groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.fast_prefix_cache.lookup_groups import describe_groups
from vllm_ascend_kvext.patches.upstream import hit_unit_tokens, lookup_groups, tokens_per_block
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.prefix_cache.lookup import Hit, Lookup

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


def find_longest_common_hit(
    wrapped: Callable[..., Hit],
    coordinator: KVCacheCoordinator,
    block_hashes: Sequence[bytes],
    max_cache_hit_length: int,
) -> Hit:
    """Look the groups up as a whole, where all of them are of a known kind."""
    try:
        lookup: Lookup | None = coordinator._kvext_lookup
    except AttributeError:
        lookup = coordinator._kvext_lookup = _describe(coordinator)
    if lookup is None:
        return wrapped(block_hashes, max_cache_hit_length)
    table = coordinator.block_pool.cached_block_hash_to_block._cache
    return lookup.longest_hit(table.get, block_hashes, max_cache_hit_length)


def _describe(coordinator: KVCacheCoordinator) -> Lookup | None:
    """The coordinator's groups; None if upstream has to look some of them up."""
    num_ranks = getattr(coordinator, "dcp_world_size", 1) * getattr(
        coordinator, "pcp_world_size", 1
    )
    if num_ranks > 1:
        return None
    pool, unit_tokens = coordinator.block_pool, hit_unit_tokens(coordinator)
    groups = [
        describe_groups(
            type(group.manager),
            group.spec,
            group.group_ids,
            pool,
            unit_tokens,
            group.looks_ahead,
            tokens_per_block(coordinator, group.manager),
        )
        for group in lookup_groups(coordinator)
    ]
    known = [group for group in groups if group is not None]
    return Lookup.of(known, pool.null_block) if known and len(known) == len(groups) else None


_MODULE = "vllm.v1.core.kv_cache_coordinator"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_FINDERS = tuple(
    f"{_MANAGERS}:{manager}.find_longest_cache_hit"
    for manager in ("FullAttentionManager", "SlidingWindowManager", "MambaManager")
)
_WHY = (
    "Upstream reads the group that needs everything first, and to its end, although what the "
    "others have lost often bounds the hit; and it goes through every block of the prompt."
)

PATCHES = (
    Patch(
        id="KVX-221",
        target=f"{_MODULE}:HybridKVCacheCoordinator.find_longest_cache_hit",
        kind=Kind.REPLACE,
        feature="fast-prefix-cache",
        vllm=("==0.23.0.*",),
        wrapper=find_longest_common_hit,
        why=_WHY,
        retire_when="upstream's costs as little",
        relies_on=(
            f"{_MODULE}:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
            *_FINDERS,
        ),
        ascend=(
            "vllm_ascend.patch.platform.patch_mamba_manager:"
            "AscendMambaManager.find_longest_cache_hit",
        ),
    ),
    Patch(
        id="KVX-222",
        target=f"{_MODULE}:UnitaryKVCacheCoordinator.find_longest_cache_hit",
        kind=Kind.REPLACE,
        feature="fast-prefix-cache",
        vllm=("==0.23.0.*",),
        wrapper=find_longest_common_hit,
        why=_WHY,
        retire_when="upstream's costs as little",
        relies_on=_FINDERS,
        ascend=(
            "vllm_ascend.patch.platform.patch_mamba_manager:"
            "AscendMambaManager.find_longest_cache_hit",
        ),
    ),
)
