# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which prompts a coordinator's prefix cache can hit, in tokens.

The module describes a coordinator of upstream or vllm-ascend in the terms of
`vllm_ascend_kvext.retention.geometry`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_ascend_kvext.groups.kinds import kind_of, window_tokens_of
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.patches.upstream import (
    LookupGroup,
    has_partial_hits,
    hit_unit_tokens,
    lookup_groups,
    tokens_per_block,
)
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator


def group_geometry(coordinator: KVCacheCoordinator, group: LookupGroup) -> GroupGeometry:
    """Groups that a coordinator looks up as one."""
    spec = group.spec
    kind = kind_of(spec)
    block_tokens, margin_tokens = tokens_per_block(coordinator, group.manager), group.margin_tokens
    if _finds_partial_states(coordinator) and group.manager.supports_fine_grained_hash_lookup:
        # A hit may end within a block, at any unit. A lookup that looks ahead gives up one unit.
        block_tokens = hit_unit_tokens(coordinator)
        margin_tokens = min(margin_tokens, block_tokens)
    return GroupGeometry(
        kind=kind,
        block_tokens=block_tokens,
        window_tokens=window_tokens_of(spec) if kind is GroupKind.WINDOW else 0,
        use_eagle=group.use_eagle,
        margin_tokens=margin_tokens,
        num_groups=len(group.group_ids),
    )


def inner_geometry(coordinator: KVCacheCoordinator) -> HitGeometry:
    """What a lookup can hit if every group has keys inside blocks, at each unit.

    A lookup that looks ahead gives up one unit.
    """
    unit_tokens = hit_unit_tokens(coordinator)
    groups = (group_geometry(coordinator, group) for group in lookup_groups(coordinator))
    return HitGeometry(
        tuple(
            replace(
                group,
                block_tokens=unit_tokens,
                margin_tokens=min(group.margin_tokens, unit_tokens),
            )
            for group in groups
        ),
        unit_tokens,
    )


def _finds_partial_states(coordinator: KVCacheCoordinator) -> bool:
    """Whether hits end within blocks of every length.

    If only some groups drop a block for drafts, upstream's scheduler ends a prompt's step one unit
    before the boundary at which its managers of states keep a state. So only some prompts that are
    a little longer than a block hit within one.
    """
    if not has_partial_hits(coordinator):
        return False
    groups = lookup_groups(coordinator)
    follows = [group.use_eagle for group in groups if kind_of(group.spec) is GroupKind.STATE]
    return all(follows) or not any(group.use_eagle for group in groups)


def log_least_prompt(coordinator: KVCacheCoordinator) -> None:
    """Say how long a prompt has to be to hit, with or without retention."""
    managers = coordinator.single_type_managers
    # With context parallelism windows have no hits.
    if any(
        not manager.enable_caching or manager.dcp_world_size * manager.pcp_world_size > 1
        for manager in managers
    ):
        return
    retention = CoordinatorState.of(coordinator).retention
    if retention is not None and retention.inside is not None:
        _log_least_prompt(retention.inside.geometry)
        return
    groups = tuple(group_geometry(coordinator, group) for group in lookup_groups(coordinator))
    # vLLM-Ascend allows partial hits in models with windows. Windows still hit whole blocks only.
    blocks_tokens = (group.block_tokens for group in groups)
    _log_least_prompt(HitGeometry(groups, math.lcm(hit_unit_tokens(coordinator), *blocks_tokens)))


def _log_least_prompt(geometry: HitGeometry) -> None:
    from vllm.logger import init_logger

    init_logger("vllm.ascend_kvext.retention").info(
        "Prefix-cache hits on the device: prompts of %d tokens or more, in multiples of %d.",
        geometry.min_prompt_tokens,
        geometry.unit_tokens,
    )
