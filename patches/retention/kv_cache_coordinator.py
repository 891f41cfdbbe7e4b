# SPDX-License-Identifier: Apache-2.0
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


class RetainingCoordinatorBefore030(RetainingCoordinator):
    """The same for vLLM < 0.30, where windows move past draft tokens in flight (vLLM #47728)."""

    def remove_skipped_blocks(  # type: ignore[override]
        self, wrapped: Callable[..., None], request_id: str, total_computed_tokens: int
    ) -> None:
        """Free what has left a window, after saving what is needed later.

        A block that is freed too early must not be the next one to be reallocated.
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

ASCEND = (
    f"{_ASCEND_COORDINATOR}.__init__",
    f"{_ASCEND_COORDINATOR}._get_effective_block_size",
    f"{_ASCEND_COORDINATOR}.find_longest_cache_hit",
    f"{_ASCEND_COORDINATOR}.verify_and_split_kv_cache_groups",
    f"{_ASCEND_MANAGERS}:CompressAttentionManager.cache_blocks",
    f"{_ASCEND_MANAGERS}:CompressAttentionManager.find_longest_cache_hit",
    "vllm_ascend.patch.platform.patch_mamba_manager:AscendMambaManager.find_longest_cache_hit",
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
