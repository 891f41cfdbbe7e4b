# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/kv_cache_manager.py``: hits end in all groups alike; windows wait for drafts.

An asynchronous scheduler plans a step before it knows how many draft tokens of the previous one
were accepted, and counts them as computed. If they are rejected, the request still needs what the
window holds before them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import tail_keeper
from vllm_ascend_kvext.patches.upstream import tokens_per_block
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

_FULL_GROUPS = "_kvext_full_groups"


def trim_full_groups(
    wrapped: Callable[..., tuple[KVCacheBlocks, int]],
    manager: KVCacheManager,
    request: Request,
) -> tuple[KVCacheBlocks, int]:
    """Hand out no block past the hit, in any full-attention group."""
    blocks, hit_tokens = wrapped(request)
    for group_id, block_tokens in _full_groups(manager.coordinator):
        group_blocks = blocks.blocks[group_id]
        if len(group_blocks) * block_tokens > hit_tokens:
            del group_blocks[hit_tokens // block_tokens :]
    return blocks, hit_tokens


def _full_groups(coordinator: KVCacheCoordinator) -> tuple[tuple[int, int], ...]:
    """Group id and tokens per block of each full-attention group; they never change."""
    groups: tuple[tuple[int, int], ...] | None = getattr(coordinator, _FULL_GROUPS, None)
    if groups is None:
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        groups = tuple(
            (manager.kv_cache_group_id, tokens_per_block(coordinator, manager))
            for manager in coordinator.single_type_managers
            if isinstance(manager.kv_cache_spec, FullAttentionSpec)
        )
        setattr(coordinator, _FULL_GROUPS, groups)
    return groups


def build_waiting_windows(
    wrapped: Callable[..., None], manager: KVCacheManager, *args: Any, **kwargs: Any
) -> None:
    """Put a rule of its own into a manager that has windows.

    Into the one object and not into its class: models without windows pay nothing, and the others
    a plain call for each request and step.
    """
    wrapped(*args, **kwargs)
    _let_windows_wait(manager)


def _let_windows_wait(manager: KVCacheManager) -> None:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    manager_class, coordinator = type(manager), manager.coordinator
    window_specs = (ChunkedLocalAttentionSpec, SlidingWindowSpec)
    groups = [
        (group, isinstance(group.kv_cache_spec, window_specs))
        for group in coordinator.single_type_managers
    ]
    if not any(has_window for _, has_window in groups):
        return

    def allocate_slots(
        request: Request,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        **others: Any,
    ) -> KVCacheBlocks | None:
        # A step in flight that has no drafts leaves one placeholder. Retention makes an allowance
        # of its own, which covers the tails that it saves.
        waits = request.num_output_placeholders > 1 and tail_keeper(coordinator) is None
        if not waits and not others:  # by position: by name, this costs three times as much
            return manager_class.allocate_slots(
                manager,
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
            )
        if waits:
            coordinator.remove_skipped_blocks = _Removal(groups, drafts_in_flight(request))
        try:
            return manager_class.allocate_slots(
                manager,
                request,
                num_new_tokens,
                num_new_computed_tokens,
                new_computed_blocks,
                num_lookahead_tokens,
                **others,
            )
        finally:
            if waits:
                del coordinator.remove_skipped_blocks

    manager.allocate_slots = allocate_slots


@dataclass(frozen=True, slots=True)
class _Removal:
    """Removes what has left the windows, should all drafts in flight be rejected.

    Attributes:
        groups: The manager of each group, and whether it has a window; a Mamba manager makes
            allowance for drafts itself.
        num_drafts: Tokens that are counted as computed and may be rejected.
    """

    groups: Sequence[tuple[SingleTypeKVCacheManager, bool]]
    num_drafts: int

    def __call__(self, request_id: str, total_computed_tokens: int) -> None:
        for group, has_window in self.groups:
            num_tokens = total_computed_tokens - (self.num_drafts if has_window else 0)
            group.remove_skipped_blocks(request_id, num_tokens)


def drafts_in_flight(request: Request) -> int:
    """How many tokens that are counted as computed may be rejected drafts; never too few."""
    if hasattr(request, "num_in_flight_tokens"):
        return 0  # vLLM-Ascend >= 0.23.0 counts these itself, and has its managers wait for them
    # A step in flight stands for one token, and one more for each of its drafts. The next step
    # has as many drafts as any in flight; none if the request was preempted, and counts anew.
    num_placeholders = request.num_output_placeholders
    num_steps = -(-num_placeholders // (1 + len(request.spec_token_ids)))
    return num_placeholders - num_steps


_VLLM = ("==0.20.2.*", "==0.23.0.*")
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_ASCEND_DRAFTS = "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime"
_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)

PATCHES = (
    Patch(
        id="KVX-143",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks",
        kind=Kind.WRAP,
        feature="trim-full-groups",
        vllm=_VLLM,
        wrapper=trim_full_groups,
        why="Upstream trims the first full-attention group to the hit; the others hand out cached "
        "blocks past it, which the request then writes into.",
        retire_when="vLLM >= 0.32, which trims every full-attention group",
        relies_on=(
            "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit",
        ),
        ascend=(
            f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
            f"{_ASCEND_COORDINATOR}._get_effective_block_size",
        ),
    ),
    Patch(
        id="KVX-303",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.__init__",
        kind=Kind.WRAP,
        feature="drafts-in-flight",
        vllm=_VLLM,
        wrapper=build_waiting_windows,
        why="With asynchronous scheduling and speculative decoding, upstream frees window blocks "
        "as if all drafts in flight had been accepted; after a rejection the request reads what "
        "others have written there (vLLM issue 47728).",
        retire_when="upstream waits for drafts in flight",
        relies_on=(
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.remove_skipped_blocks",
            f"{_MANAGERS}:SingleTypeKVCacheManager.remove_skipped_blocks",
        ),
        ascend=(
            f"{_ASCEND_DRAFTS}:_patched_allocate_slots",
            f"{_ASCEND_DRAFTS}:_patched_remove_skipped_blocks",
        ),
    ),
)
