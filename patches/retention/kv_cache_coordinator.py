# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_coordinator.py``: which blocks of which group are cached.

Describes a coordinator, upstream's or vllm-ascend's, to `vllm_ascend_kvext.retention`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.groups.spec_attributes import kind_of, window_tokens_of
from vllm_ascend_kvext.patches.retention.block_pool import RetainedPool
from vllm_ascend_kvext.patches.upstream import (
    LookupGroup,
    has_partial_hits,
    hashes_in_key,
    hit_unit_tokens,
    lookup_groups,
    tokens_per_block,
)
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Kind, Patch
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.managed import ManagedGroup
from vllm_ascend_kvext.retention.policy import RetentionPolicy, check_interval
from vllm_ascend_kvext.upstream_state import CoordinatorState, PoolState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


def retention_of(coordinator: KVCacheCoordinator) -> CheckpointRetention | None:
    return CoordinatorState.of(coordinator).retention


def interval_tokens_of(coordinator: KVCacheCoordinator) -> int:
    """The retention interval in effect; 0 if there is none."""
    retention = retention_of(coordinator)
    return 0 if retention is None else retention.policy.interval_tokens


def retain(
    coordinator: KVCacheCoordinator, interval_tokens: int, is_adaptive: bool = False
) -> None:
    """Start keeping checkpoints.

    Args:
        interval_tokens: ``VLLM_PREFIX_CACHE_RETENTION_INTERVAL``; 0 where it is unset.
        is_adaptive: Whether requests decide what is kept besides.

    Raises:
        ValueError: If the interval is not valid for this coordinator.
    """
    from vllm.logger import init_logger

    logger = init_logger("vllm.ascend_kvext.retention")
    if left_out := _left_to_upstream(coordinator):
        logger.warning("Prefix-cache retention is vLLM's own in this engine: %s.", left_out)
        return
    is_caching = all(manager.enable_caching for manager in coordinator.single_type_managers)
    described = lookup_groups(coordinator) if is_caching else ()
    groups = [(_group_geometry(coordinator, group), group.group_ids) for group in described]
    kinds = {geometry.kind for geometry, _ in groups}
    unit_tokens = hit_unit_tokens(coordinator) if groups else 1
    nothing_to_do = ""
    if not is_caching:
        nothing_to_do = "prefix caching is off"
    elif kinds.isdisjoint({GroupKind.WINDOW, GroupKind.STATE}):
        nothing_to_do = "this model has neither sliding-window nor state groups"
    elif not kinds <= {GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE}:
        nothing_to_do = "this model has layers of other kinds, as chunked-local or cross attention"
    if nothing_to_do:
        if not hasattr(coordinator.kv_cache_config, "prefix_cache_retention_interval"):
            coordinator.retention_interval = None  # It is that of our variable, before vLLM 0.30.
        logger.info("Prefix-cache retention has nothing to do: %s.", nothing_to_do)
        return

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
    )
    PoolState.of(coordinator.block_pool).retained = retention.cache_state
    CoordinatorState.of(coordinator).retention = retention
    logger.info(
        "Prefix-cache retention: %s in %d sliding-window and %d state group(s); hits land on "
        "multiples of %d tokens.",
        describe_policy(policy),
        len(managed[GroupKind.WINDOW]),
        len(managed[GroupKind.STATE]),
        unit_tokens,
    )


def log_least_prompt(coordinator: KVCacheCoordinator) -> None:
    """Say how long a prompt has to be to hit, with or without retention."""
    from vllm.logger import init_logger

    managers = coordinator.single_type_managers
    # With context parallelism windows have no hits.
    if any(
        not manager.enable_caching or manager.dcp_world_size * manager.pcp_world_size > 1
        for manager in managers
    ):
        return
    groups = tuple(_group_geometry(coordinator, group) for group in lookup_groups(coordinator))
    # vLLM-Ascend has partial hits beside windows, which hit whole blocks only.
    blocks_tokens = (group.block_tokens for group in groups)
    geometry = HitGeometry(groups, math.lcm(hit_unit_tokens(coordinator), *blocks_tokens))
    init_logger("vllm.ascend_kvext.retention").info(
        "Prefix-cache hits on the device: prompts of %d tokens or more, in multiples of %d.",
        geometry.min_prompt_tokens,
        geometry.unit_tokens,
    )


def describe_policy(policy: RetentionPolicy) -> str:
    grid = f"a checkpoint per {policy.interval_tokens} tokens" if policy.interval_tokens else ""
    if not policy.is_adaptive:
        return grid or "last boundaries only"
    return f"adaptive, and {grid}" if grid else "adaptive"


def _group_geometry(coordinator: KVCacheCoordinator, group: LookupGroup) -> GroupGeometry:
    spec = group.spec
    kind = kind_of(spec)
    block_tokens, margin_tokens = tokens_per_block(coordinator, group.manager), group.margin_tokens
    if has_partial_hits(coordinator) and group.manager.supports_fine_grained_hash_lookup:
        # A hit may end within a block, at any match unit; what looks ahead drops a unit.
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


def _left_to_upstream(coordinator: KVCacheCoordinator) -> str:
    """What of vLLM 0.30's is not reckoned with; empty if there is nothing of it."""
    managers = coordinator.single_type_managers
    if has_partial_hits(coordinator):
        return "a hit may end within a block (prefix_match_unit)"
    if any(manager.block_pool is not coordinator.block_pool for manager in managers):
        return "groups have pools of their own"
    if any(getattr(manager, "has_prefill_checkpoint_blocks", False) for manager in managers):
        return "prefill steps leave states within them"
    if hasattr(coordinator, "get_replay_boundaries") and not all(map(_is_upstreams, managers)):
        return "a group has a manager that is not vLLM's own"
    return ""


def _is_upstreams(manager: SingleTypeKVCacheManager) -> bool:
    """Whether neither vllm-ascend nor anyone else caches its blocks, or moves its window on."""
    functions = (type(manager).cache_blocks, type(manager).get_num_skipped_tokens)
    return all(function.__module__ == _MANAGERS for function in functions)


def cache_tails(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request: Request,
    num_computed_tokens: int,
) -> None:
    """Let retention cache all groups."""
    retention = retention_of(coordinator)
    if retention is None:
        wrapped(request, num_computed_tokens)
    else:
        # Of the last tokens, an MTP drafter of several modules computes its KV again (vLLM 0.30).
        reprefillable_tokens = getattr(coordinator, "num_reprefillable_tokens", 0)
        retention.cache(request, max(0, num_computed_tokens - reprefillable_tokens))


def move_windows_on(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request_id: str,
    total_computed_tokens: int,
) -> None:
    """Free what has left a window, after saving what is needed later."""
    retention = retention_of(coordinator)
    if retention is None:
        wrapped(request_id, total_computed_tokens)
        return
    computed_tokens = retention.before_skip(request_id, total_computed_tokens)
    for group in retention.sparse_groups:
        group.manager.remove_skipped_blocks(request_id, computed_tokens)


def move_settled_windows_on(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    request_id: str,
    processed_computed_tokens: int,
    num_prompt_tokens: int | None = None,
) -> None:
    """Free what has left a window, after saving what is needed later; no draft is counted."""
    retention = retention_of(coordinator)
    if retention is not None:
        retention.before_skip(request_id, processed_computed_tokens, is_settled=True)
    wrapped(request_id, processed_computed_tokens, num_prompt_tokens)


def accept_any_interval(
    wrapped: Callable[..., None], instance: None, *args: Any, **kwargs: Any
) -> None:
    """`retain` validates, against the unit of the lookup."""


_MODULE = "vllm.v1.core.kv_cache_coordinator"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)
_ASCEND_MANAGERS = "vllm_ascend.core.single_type_kv_cache_manager"
_of_caching = partial(
    Patch,
    kind=Kind.REPLACE,
    feature="retention",
    wrapper=cache_tails,
    why="Upstream caches tails at boundaries that an EAGLE group, an aligned prompt, a next turn "
    "or a preempted request cannot hit, and on Ascend at boundaries that nothing can hit.",
    retire_when="upstream derives what it keeps from its lookup",
)
_OF_SKIPPING = (
    f"{_MANAGERS}:SingleTypeKVCacheManager.remove_skipped_blocks",
    f"{_MANAGERS}:SlidingWindowManager.get_num_skipped_tokens",
    f"{_MANAGERS}:MambaManager.remove_skipped_blocks",
    f"{_MANAGERS}:MambaManager.get_num_skipped_tokens",
)

PATCHES = (
    _of_caching(
        id="KVX-121",
        target=f"{_MODULE}:KVCacheCoordinator.cache_blocks",
        relies_on=(
            f"{_MODULE}:HybridKVCacheCoordinator.find_longest_cache_hit",
            f"{_MODULE}:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
            f"{_MODULE}:UnitaryKVCacheCoordinator.find_longest_cache_hit",
            f"{_MANAGERS}:FullAttentionManager.find_longest_cache_hit",
            f"{_MANAGERS}:SlidingWindowManager.find_longest_cache_hit",
            f"{_MANAGERS}:MambaManager.find_longest_cache_hit",
            f"{_MANAGERS}:SingleTypeKVCacheManager.cache_blocks",
            f"{_MANAGERS}:MambaManager.cache_blocks",
        ),
        ascend=(
            f"{_ASCEND_COORDINATOR}.__init__",
            f"{_ASCEND_COORDINATOR}._get_effective_block_size",
            f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
            f"{_ASCEND_COORDINATOR}.verify_and_split_kv_cache_groups",
            f"{_ASCEND_MANAGERS}:CompressAttentionManager.cache_blocks",
            f"{_ASCEND_MANAGERS}:CompressAttentionManager.find_longest_cache_hit",
            "vllm_ascend.patch.platform.patch_mamba_manager:"
            "AscendMambaManager.find_longest_cache_hit",
        ),
    ),
    _of_caching(id="KVX-122", target=f"{_MODULE}:HybridKVCacheCoordinator.cache_blocks"),
    Patch(
        id="KVX-123",
        target=f"{_MODULE}:KVCacheCoordinator.remove_skipped_blocks",
        kind=Kind.REPLACE,
        feature="retention",
        vllm=BEFORE_0_30,
        wrapper=move_windows_on,
        why="With EAGLE a boundary opens only after the first blocks of its tail have left the "
        "window. And windows move past draft tokens in flight, which may be rejected (vLLM "
        "#47728); a block that is freed too early must not be the next one to be reallocated.",
        retire_when="0.23 is not supported any more",
        relies_on=_OF_SKIPPING,
        ascend=(
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
        ),
    ),
    Patch(
        id="KVX-125",
        target=f"{_MODULE}:KVCacheCoordinator.remove_skipped_blocks",
        feature="retention",
        vllm=SINCE_0_30,
        wrapper=move_settled_windows_on,
        why="With EAGLE a boundary opens only after the first blocks of its tail have left the "
        "window; they must not be reallocated before.",
        retire_when="upstream derives what it keeps from its lookup",
        relies_on=_OF_SKIPPING,
    ),
    Patch(
        id="KVX-124",
        target=f"{_MODULE}:_validate_prefix_cache_retention_interval",
        kind=Kind.REPLACE,
        feature="retention",
        vllm=BEFORE_0_30,
        wrapper=accept_any_interval,
        why="Upstream refuses to start a model without a sliding window when the variable is set, "
        "and on Ascend validates against a number that is not the unit of its hits.",
        retire_when="0.23 is not supported any more",
    ),
)
