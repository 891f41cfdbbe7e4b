# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_manager.py``: steps of a running request that change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.upstream import (
    cache_unit_tokens,
    defining_class,
    has_partial_hits,
    is_ascend,
    tokens_per_block,
)
from vllm_ascend_kvext.prefix_cache.limits import GroupLimits
from vllm_ascend_kvext.prefix_cache.steps import CachingRule, StepGroup, Steps
from vllm_ascend_kvext.upstream_state import RequestState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request


class FastSteps:
    """The steps of one block manager."""

    def __init__(self, manager: KVCacheManager, steps: Steps) -> None:
        self._steps = steps
        self._nothing_new = manager.empty_kv_cache_blocks

    def allocate_slots(
        self,
        wrapped: Callable[..., KVCacheBlocks | None],
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        *others: Any,
        **admission: Any,
    ) -> KVCacheBlocks | None:
        """Allocate blocks for a step. If nothing changes in the step, do nothing."""
        steps = self._steps
        # Upstream's scheduler names no other argument for a running request.
        if not (num_new_computed_tokens or others or admission):
            limits = RequestState.of(request).limits
            if (
                limits is not None
                and new_computed_blocks is None
                and num_new_tokens > 0
                and steps.tables.get(request.request_id) is limits.table
            ):
                num_tokens = request.num_computed_tokens + num_new_tokens
                slot_tokens = num_tokens + num_lookahead_tokens
                if slot_tokens < limits.until_tokens or (
                    # With drafts, more tokens need slots than are cached, or move windows on.
                    slot_tokens < limits.next_slot_tokens
                    and request.num_computed_tokens < limits.next_skip_tokens
                    and min(num_tokens, request.num_tokens) < limits.next_cache_tokens
                ):
                    if steps.rule is not None:
                        steps.rule.note_quiet_step(request, num_tokens)
                    steps.counts.quiet += 1
                    return self._nothing_new
                if steps.does_partial_steps:
                    steps.counts.partial += 1
                    return steps.take_partial_step(
                        request, limits, num_new_tokens, num_lookahead_tokens
                    )
        allocated = wrapped(
            request,
            num_new_tokens,
            num_new_computed_tokens,
            new_computed_blocks,
            num_lookahead_tokens,
            *others,
            **admission,
        )
        steps.counts.upstream += 1
        if allocated is not None:
            # A prefill in chunks changes something in every step.
            scheduled_tokens = (
                request.num_computed_tokens + num_new_computed_tokens + num_new_tokens
            )
            is_prefilled = scheduled_tokens >= request.num_prompt_tokens
            RequestState.of(request).limits = steps.limits_of(request) if is_prefilled else None
        return allocated

    def cache_blocks(
        self, wrapped: Callable[..., None], request: Request, num_computed_tokens: int
    ) -> None:
        """Cache blocks, and return at once if nothing is due.

        An asynchronous scheduler calls this also at the end of a step.
        """
        limits = RequestState.of(request).limits
        steps = self._steps
        if limits is None or steps.tables.get(request.request_id) is not limits.table:
            wrapped(request, num_computed_tokens)
        elif num_computed_tokens >= limits.next_cache_tokens:
            wrapped(request, num_computed_tokens)
            steps.note_cached(request, limits)
        elif steps.rule is not None:
            steps.rule.note_quiet_step(request, num_computed_tokens)


def describe_steps(manager: KVCacheManager, rule: CachingRule | None) -> Steps | None:
    """The steps of running requests on a block manager; None if some group's steps are unknown.

    Args:
        rule: Decides instead of upstream when something is cached; None if upstream decides.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    coordinator = manager.coordinator
    group_managers = coordinator.single_type_managers
    is_known = is_ascend(coordinator) or type(coordinator).__module__ == _COORDINATOR
    # A quiet step calls no function of the manager, and so no function of a subclass.
    for method in ("allocate_slots", "cache_blocks"):
        is_known = is_known and defining_class(type(manager), method) is KVCacheManager
    # An MTP drafter of several modules computes the last tokens again (vLLM 0.30).
    is_replayed = getattr(coordinator, "num_reprefillable_tokens", 0)
    if not is_known or is_replayed or has_partial_hits(coordinator):
        return None
    groups = [_group(coordinator, group_manager) for group_manager in group_managers]
    known = tuple(group for group in groups if group is not None)
    if not known or len(known) < len(groups):
        return None
    has_states = any(_is_state(group_manager) for group_manager in group_managers)
    return Steps(
        block_manager=manager,
        groups=known,
        tables=group_managers[0].req_to_blocks,
        # vLLM-Ascend 0.23.0 wraps upstream's function. And upstream moves states between the
        # blocks of a table when it allocates.
        does_partial_steps=not (hasattr(manager.allocate_slots, "__wrapped__") or has_states),
        rule=rule,
    )


def _group(coordinator: KVCacheCoordinator, manager: SingleTypeKVCacheManager) -> StepGroup | None:
    from vllm.v1.core import single_type_kv_cache_manager as managers

    is_window = type(manager) is managers.SlidingWindowManager
    is_full = type(manager) is managers.FullAttentionManager
    unit_tokens = cache_unit_tokens(coordinator)
    if is_ascend(coordinator):
        is_full |= _is_compressed(manager)
    if not (is_window or is_full or _is_state(manager)):
        return None
    block_tokens = tokens_per_block(coordinator, manager)
    window_tokens = manager.sliding_window if is_window else 0
    draft_blocks = 0
    if _is_state(manager):
        draft_blocks = manager.num_speculative_blocks
        window_tokens = 2
        if not hasattr(coordinator, "get_replay_boundaries"):
            window_tokens += draft_blocks  # vLLM 0.23 waits for one draft token per block.
    limits = GroupLimits(
        block_tokens=block_tokens,
        window_tokens=window_tokens,
        unit_tokens=unit_tokens or 1,
        use_eagle=unit_tokens is not None and manager.use_eagle,
        row_tokens=block_tokens // manager.block_size,
        draft_blocks=draft_blocks,
    )
    return StepGroup(manager, limits, manager._null_block)


def _is_state(manager: SingleTypeKVCacheManager) -> bool:
    """Whether a manager is upstream's manager of states. vllm-ascend may replace this class."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    kind = type(manager)
    has_checkpoints = getattr(manager, "has_prefill_checkpoint_blocks", False)
    is_upstreams = kind is managers.MambaManager and kind.__module__ == managers.__name__
    return is_upstreams and not has_checkpoints


def _is_compressed(manager: SingleTypeKVCacheManager) -> bool:
    kind = type(manager)
    return (
        kind.__module__.startswith("vllm_ascend.") and kind.__name__ == "CompressAttentionManager"
    )


_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_COORDINATOR = "vllm.v1.core.kv_cache_coordinator"
_GROUP_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager"
_LIFETIME = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"

RELIES_ON = (
    f"{_MANAGER}.allocate_slots",
    f"{_MANAGER}.cache_blocks",
    f"{_COORDINATOR}:KVCacheCoordinator.remove_skipped_blocks",
    f"{_COORDINATOR}:KVCacheCoordinator.get_num_blocks_to_allocate",
    f"{_COORDINATOR}:KVCacheCoordinator.allocate_new_blocks",
    f"{_COORDINATOR}:KVCacheCoordinator.cache_blocks",
    f"{_COORDINATOR}:HybridKVCacheCoordinator.cache_blocks",
    f"{_GROUP_MANAGER}.get_num_blocks_to_allocate",
    f"{_GROUP_MANAGER}.allocate_new_blocks",
    "vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.get_num_skipped_tokens",
)
"""The functions that are replaced, and the functions whose results the replacements must equal.

Upstream passes over all groups four times in every step of every request, although nothing changes
in most steps of a decode. With asynchronous scheduling, it passes over them once more at the end of
a step.
"""

ASCEND = (f"{_LIFETIME}:_patched_allocate_slots", f"{_LIFETIME}:_patched_remove_skipped_blocks")
