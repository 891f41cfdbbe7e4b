# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/kv_cache_coordinator.py``: retention decides which blocks are cached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request

    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention


class RetainingCoordinator:
    """Methods of one coordinator. Retention decides which of its blocks are cached and freed."""

    def __init__(self, coordinator: KVCacheCoordinator, retention: CheckpointRetention) -> None:
        self._retention = retention
        # An MTP drafter of several modules computes KV of the last tokens again (vLLM 0.30).
        self._reprefillable_tokens: int = getattr(coordinator, "num_reprefillable_tokens", 0)

    def cache_blocks(
        self, wrapped: Callable[..., None], request: Request, num_computed_tokens: int
    ) -> None:
        """Let retention cache all groups.

        Upstream caches tails at boundaries that an EAGLE group, an aligned prompt, a next turn or a
        preempted request cannot hit, and on Ascend at boundaries that nothing can hit.
        """
        self._retention.cache(request, max(0, num_computed_tokens - self._reprefillable_tokens))

    def remove_skipped_blocks(
        self,
        wrapped: Callable[..., None],
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Free what has left a window, after saving what is needed later.

        The number of tokens counts no drafts. With EAGLE, a boundary opens only after the first
        blocks of its tail have left the window. These blocks must not be reallocated before.
        """
        self._retention.before_skip(request_id, processed_computed_tokens, is_settled=True)
        wrapped(request_id, processed_computed_tokens, num_prompt_tokens)


class RetainingCoordinatorInsideBlocks(RetainingCoordinator):
    """The same for hits that may end inside blocks (``prefix_match_unit``, since vLLM 0.30)."""

    def __init__(self, coordinator: KVCacheCoordinator, retention: CheckpointRetention) -> None:
        super().__init__(coordinator, retention)
        assert retention.inside is not None
        self._inside = retention.inside
        self._coordinator = coordinator
        self._full_groups = [
            (group.manager.kv_cache_group_id, group.block_tokens) for group in retention.full_groups
        ]

    def get_num_blocks_to_allocate(
        self,
        wrapped: Callable[..., int],
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Any,
        num_encoder_tokens: int,
        total_computed_tokens: int,
        num_local_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Let a request wait for the next step if a block that it copies is written in this step.

        Blocks are copied before the forward. As upstream does for states, the method then asks for
        more blocks than there are.
        """
        for group_id, block_tokens in self._full_groups:
            blocks = new_computed_blocks[group_id]
            is_inside = blocks and num_local_computed_tokens % block_tokens
            if is_inside and self._inside.is_written(blocks[-1].block_id):
                return int(self._coordinator.block_pool.num_gpu_blocks + 1)
        return wrapped(
            request_id,
            num_tokens,
            new_computed_blocks,
            num_encoder_tokens,
            total_computed_tokens,
            num_local_computed_tokens,
            num_tokens_main_model,
            apply_admission_cap=apply_admission_cap,
        )

    def allocate_new_computed_blocks(
        self,
        wrapped: Callable[..., None],
        request_id: str,
        new_computed_blocks: Any,
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Note the length of a hit, which the blocks do not tell."""
        hit_tokens = num_local_computed_tokens + num_external_computed_tokens
        if hit_tokens and any(new_computed_blocks):
            self._retention.note_hit(request_id, hit_tokens)
        wrapped(
            request_id,
            new_computed_blocks,
            num_local_computed_tokens,
            num_external_computed_tokens,
        )

    def new_step_starts(self, wrapped: Callable[[], None]) -> None:
        """Forget what the step before writes."""
        self._inside.begin_step()
        wrapped()


class RetainingCoordinatorBefore030(RetainingCoordinator):
    """The same for vLLM < 0.30, where windows move past draft tokens in flight (vLLM #47728)."""

    def remove_skipped_blocks(  # type: ignore[override]
        self, wrapped: Callable[..., None], request_id: str, total_computed_tokens: int
    ) -> None:
        """Free what has left a window, after saving what is needed later.

        A block that is freed too early must not be reallocated next.
        """
        retention = self._retention
        computed_tokens = retention.before_skip(request_id, total_computed_tokens)
        for group in retention.sparse_groups:
            group.manager.remove_skipped_blocks(request_id, computed_tokens)


def accept_any_interval(
    wrapped: Callable[..., None], instance: None, *args: Any, **kwargs: Any
) -> None:
    """Check nothing: retention checks the interval against the unit of the lookup."""


_MODULE = "vllm.v1.core.kv_cache_coordinator"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_ASCEND_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)
_ASCEND_MANAGERS = "vllm_ascend.core.single_type_kv_cache_manager"

RELIES_ON = (
    f"{_MODULE}:KVCacheCoordinator.cache_blocks",
    f"{_MODULE}:KVCacheCoordinator.remove_skipped_blocks",
    f"{_MODULE}:HybridKVCacheCoordinator.cache_blocks",
    f"{_MODULE}:HybridKVCacheCoordinator.find_longest_cache_hit",
    f"{_MODULE}:HybridKVCacheCoordinator.verify_and_split_kv_cache_groups",
    f"{_MODULE}:UnitaryKVCacheCoordinator.find_longest_cache_hit",
    f"{_MANAGERS}:FullAttentionManager.find_longest_cache_hit",
    f"{_MANAGERS}:SlidingWindowManager.find_longest_cache_hit",
    f"{_MANAGERS}:MambaManager.find_longest_cache_hit",
    f"{_MANAGERS}:SingleTypeKVCacheManager.cache_blocks",
    f"{_MANAGERS}:MambaManager.cache_blocks",
    f"{_MANAGERS}:SingleTypeKVCacheManager.remove_skipped_blocks",
    f"{_MANAGERS}:SlidingWindowManager.get_num_skipped_tokens",
    f"{_MANAGERS}:MambaManager.remove_skipped_blocks",
    f"{_MANAGERS}:MambaManager.get_num_skipped_tokens",
)

INSIDE_BLOCKS = (
    "vllm.v1.core.block_pool:BlockPool.cache_partial_block",
    "vllm.v1.core.block_pool:BlockPool.move_block_hashes",
    f"{_MODULE}:KVCacheCoordinator.get_num_blocks_to_allocate",
    f"{_MODULE}:KVCacheCoordinator.allocate_new_computed_blocks",
    f"{_MODULE}:KVCacheCoordinator.new_step_starts",
    f"{_MANAGERS}:SingleTypeKVCacheManager.add_local_computed_blocks",
    f"{_MANAGERS}:SingleTypeKVCacheManager.allocate_new_blocks",
    f"{_MANAGERS}:FullAttentionManager._cache_partial_tail_block",
    f"{_MANAGERS}:MambaManager._cache_partial_tail_block",
    f"{_MANAGERS}:MambaManager.allocate_new_blocks",
    f"{_MANAGERS}:MambaManager.get_num_blocks_to_allocate",
)
"""The functions with which upstream keeps and copies what ends inside a block, since 0.30."""

ASCEND = (
    f"{_ASCEND_COORDINATOR}.__init__",
    f"{_ASCEND_COORDINATOR}._get_effective_block_size",
    f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
    f"{_ASCEND_COORDINATOR}.verify_and_split_kv_cache_groups",
    f"{_ASCEND_MANAGERS}:CompressAttentionManager.cache_blocks",
    f"{_ASCEND_MANAGERS}:CompressAttentionManager.find_longest_cache_hit",
    "vllm_ascend.patch.platform.patch_mamba_manager:AscendMambaManager.find_longest_cache_hit",
)

ASCEND_INSIDE_BLOCKS = (
    "vllm_ascend.patch.platform.patch_mamba_manager:AscendMambaManager.get_num_blocks_to_allocate",
)

ASCEND_BEFORE_0_30 = (
    "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
)

PATCHES = (
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
