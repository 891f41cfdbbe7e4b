# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Starts retention of one coordinator: describes its groups and its pool to retention.

The module translates what coordinators of upstream and vllm-ascend say into the terms of
`vllm_ascend_kvext.retention`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ascend_kvext.groups.kinds import kind_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.patches.hit_geometry import group_geometry, inner_geometry
from vllm_ascend_kvext.patches.retention.block_pool import RetainedPool
from vllm_ascend_kvext.patches.upstream import (
    defining_class,
    has_partial_hits,
    hashes_in_key,
    hit_unit_tokens,
    lookup_groups,
)
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.inside_blocks import InsideBlocks
from vllm_ascend_kvext.retention.managed import ManagedGroup
from vllm_ascend_kvext.retention.policy import RetentionPolicy, check_interval
from vllm_ascend_kvext.settings import DISABLE_VARIABLE, Settings
from vllm_ascend_kvext.upstream_state import CoordinatorState, PoolState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

_BLOCK_COPIES = "block-copies"
"""The name of a repair. Without it, hits that end inside a block read keys of others."""


def retain(
    coordinator: KVCacheCoordinator, interval_tokens: int, is_adaptive: bool = False
) -> CheckpointRetention | None:
    """Start keeping checkpoints; None if upstream goes on to decide what is kept.

    Args:
        interval_tokens: ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; 0 if it is not set.
        is_adaptive: Whether boundaries that requests ask for are also kept.

    Raises:
        ValueError: If the interval is not valid for this coordinator.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.ascend_kvext.retention")
    if left_out := _left_to_upstream(coordinator):
        logger.warning("Prefix-cache retention is vLLM's own in this engine: %s.", left_out)
        return None
    is_caching = all(manager.enable_caching for manager in coordinator.single_type_managers)
    described = lookup_groups(coordinator) if is_caching else ()
    is_inside = bool(described) and has_partial_hits(coordinator)
    groups = [(group_geometry(coordinator, group), group.group_ids) for group in described]
    if is_inside:
        # Upstream's lookup gives up a unit inside a block, which `InsideBlocks` plans for.
        block_tokens = coordinator.scheduler_block_size
        groups = [
            (replace(each, block_tokens=block_tokens, margin_tokens=0, use_eagle=False), ids)
            for each, ids in groups
        ]
    kinds = {geometry.kind for geometry, _ in groups}
    unit_tokens = hit_unit_tokens(coordinator) if groups else 1
    inside = None
    if is_inside:
        unit_tokens = coordinator.scheduler_block_size
        inside = InsideBlocks(
            inner_geometry(coordinator),
            unit_tokens,
            coordinator.block_pool.enable_kv_cache_events,
        )
    nothing_to_do = ""
    level = logging.INFO
    if not is_caching:
        nothing_to_do = "prefix caching is off; start with --enable-prefix-caching to use it"
        level = logging.WARNING
    elif kinds.isdisjoint({GroupKind.WINDOW, GroupKind.STATE}):
        nothing_to_do = "this model has neither sliding-window nor state groups"
    elif not kinds <= {GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE}:
        nothing_to_do = "this model has layers of other kinds, as chunked-local or cross attention"
    if nothing_to_do:
        if not hasattr(coordinator.kv_cache_config, "prefix_cache_retention_interval"):
            # Before vLLM 0.30, this attribute has the value of our variable.
            coordinator.retention_interval = None
        logger.log(level, "Prefix-cache retention has nothing to do: %s.", nothing_to_do)
        return None

    check_interval(interval_tokens, unit_tokens)
    managed: dict[GroupKind, list[ManagedGroup]] = {kind: [] for kind in GroupKind}
    for index, (group, group_ids) in enumerate(groups):
        for group_id in group_ids:
            manager = coordinator.single_type_managers[group_id]
            hashes_per_block = group.block_tokens // coordinator.block_pool.hash_block_size
            managed[group.kind].append(
                ManagedGroup(
                    manager,
                    index,
                    group.block_tokens,
                    _is_upstreams(manager),
                    hashes_in_key(hashes_per_block),
                )
            )
    policy = RetentionPolicy(
        HitGeometry(tuple(geometry for geometry, _ in groups), unit_tokens),
        interval_tokens,
        is_adaptive,
    )
    retention = CheckpointRetention(
        policy,
        sparse_groups=(*managed[GroupKind.WINDOW], *managed[GroupKind.STATE]),
        full_groups=tuple(managed[GroupKind.FULL]),
        pool=RetainedPool(coordinator.block_pool),
        inside=inside,
    )
    PoolState.of(coordinator.block_pool).on_uncached = retention.cache_state.note_uncached
    state = CoordinatorState.of(coordinator)
    state.retention = retention
    state.interval_tokens = interval_tokens
    state.waits_for_drafts = True
    logger.info(
        "Prefix-cache retention: %s in %d sliding-window and %d state group(s); hits land on "
        "multiples of %d tokens.",
        describe_policy(policy),
        len(managed[GroupKind.WINDOW]),
        len(managed[GroupKind.STATE]),
        inside.unit_tokens if inside is not None else unit_tokens,
    )
    return retention


def describe_policy(policy: RetentionPolicy) -> str:
    grid = f"a checkpoint per {policy.interval_tokens} tokens" if policy.interval_tokens else ""
    if not policy.is_adaptive:
        return grid or "last boundaries only"
    return f"adaptive, and {grid}" if grid else "adaptive"


def _left_to_upstream(coordinator: KVCacheCoordinator) -> str:
    """Why retention leaves this coordinator to vLLM; empty if it does not."""
    from vllm.v1.core import kv_cache_coordinator as upstreams

    managers = coordinator.single_type_managers
    for method in ("cache_blocks", "remove_skipped_blocks"):
        if defining_class(type(coordinator), method).__module__ != upstreams.__name__:
            return f"its coordinator has a {method}() that is not vLLM's own"
    if has_partial_hits(coordinator) and (reason := _why_not_inside_blocks(coordinator)):
        return f"a hit may end within a block (prefix_match_unit), and {reason}"
    if any(manager.block_pool is not coordinator.block_pool for manager in managers):
        return "groups have pools of their own"
    if any(getattr(manager, "has_prefill_checkpoint_blocks", False) for manager in managers):
        return "prefill steps leave states within them"
    if hasattr(coordinator, "get_replay_boundaries") and not all(map(_is_upstreams, managers)):
        return "a group has a manager that is not vLLM's own"
    return ""


def _why_not_inside_blocks(coordinator: KVCacheCoordinator) -> str:
    """Why retention does not keep states inside blocks; empty if it does."""
    from vllm.v1.core import single_type_kv_cache_manager as upstreams

    if _BLOCK_COPIES in Settings.from_environ(os.environ).disabled:
        return f"{DISABLE_VARIABLE} leaves out the repair {_BLOCK_COPIES}"
    groups = lookup_groups(coordinator)
    if any(kind_of(group.spec) not in (GroupKind.FULL, GroupKind.STATE) for group in groups):
        return "a group is neither full attention nor states"
    managers = coordinator.single_type_managers
    if any(manager.block_size != coordinator.scheduler_block_size for manager in managers):
        return "groups have blocks of several sizes"
    if getattr(coordinator, "num_reprefillable_tokens", 0):
        return "a drafter of several modules computes tokens again"
    for method in ("allocate_new_blocks", "cache_blocks"):
        for manager in managers:
            if defining_class(type(manager), method).__module__ != upstreams.__name__:
                return f"a group has a {method}() that is not vLLM's own"
    return ""


def _is_upstreams(manager: SingleTypeKVCacheManager) -> bool:
    """Whether only vLLM's own code caches the manager's blocks, and moves its window on."""
    from vllm.v1.core import single_type_kv_cache_manager as upstreams

    functions = (type(manager).cache_blocks, type(manager).get_num_skipped_tokens)
    return all(function.__module__ == upstreams.__name__ for function in functions)
