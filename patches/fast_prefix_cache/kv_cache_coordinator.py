# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_coordinator.py``: the longest hit of all groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.fast_prefix_cache.lookup_groups import lookup_groups
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.prefix_cache.lookup import Hit, Lookup, LookupGroups

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


def find_longest_common_hit(
    wrapped: Callable[..., Hit],
    instance: KVCacheCoordinator,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Hit:
    """Look the groups up as a whole, where all of them are of a known kind."""
    try:
        lookup: Lookup | None = instance._kvext_lookup
    except AttributeError:
        lookup = instance._kvext_lookup = _describe(instance)
    if lookup is None:
        return wrapped(*args, **kwargs)
    return _find_longest_common_hit(lookup, instance, *args, **kwargs)


def _find_longest_common_hit(
    lookup: Lookup,
    coordinator: KVCacheCoordinator,
    block_hashes: Sequence[bytes],
    max_cache_hit_length: int,
) -> Hit:
    table = coordinator.block_pool.cached_block_hash_to_block._cache
    return lookup.longest_hit(table.get, block_hashes, max_cache_hit_length)


def sees_all_keys(coordinator: KVCacheCoordinator) -> bool:
    """Whether every lookup of this coordinator is one of ours, so that keys may be ours too."""
    from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator

    return type(coordinator) is HybridKVCacheCoordinator and _describe(coordinator) is not None


def _describe(coordinator: KVCacheCoordinator) -> Lookup | None:
    """The coordinator's groups; None if upstream has to look some of them up."""
    groups: list[LookupGroups | None] = []
    pool = coordinator.block_pool
    if not hasattr(coordinator, "attention_groups"):
        (manager,) = coordinator.single_type_managers
        if coordinator.dcp_world_size * coordinator.pcp_world_size == 1:
            looks_ahead = 0 in coordinator.eagle_group_ids
            tokens = coordinator.block_size
            spec = coordinator.kv_cache_spec
            groups = [lookup_groups(type(manager), spec, [0], pool, tokens, looks_ahead, tokens)]
    else:
        unit_tokens = getattr(coordinator, "lcm_block_size", None)
        if unit_tokens is None:
            unit_tokens = coordinator.scheduler_block_size
        for spec, group_ids, manager_class, *_ in coordinator.attention_groups:
            # One group that looks ahead makes all those that share its spec do so.
            looks_ahead = not coordinator.eagle_group_ids.isdisjoint(group_ids)
            groups.append(
                lookup_groups(
                    manager_class,
                    spec,
                    group_ids,
                    pool,
                    unit_tokens,
                    looks_ahead,
                    spec.block_size,
                )
            )
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
        vllm=("==0.20.2.*", "==0.23.0.*"),
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
        vllm=("==0.20.2.*", "==0.23.0.*"),
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
