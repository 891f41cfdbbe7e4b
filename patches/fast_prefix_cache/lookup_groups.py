# SPDX-License-Identifier: Apache-2.0
"""Describes upstream's groups to `vllm_ascend_kvext.prefix_cache.lookup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.fast_prefix_cache.block_keys import group_keys
from vllm_ascend_kvext.prefix_cache.lookup import LookupGroups, Reads

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheSpec


def describe_groups(
    manager_class: type[SingleTypeKVCacheManager],
    spec: KVCacheSpec,
    group_ids: Sequence[int],
    block_pool: BlockPool,
    unit_tokens: int,
    looks_ahead: bool,
    block_tokens: int,
) -> LookupGroups | None:
    """Groups that share a spec; None if they are looked up in a way that is not known here.

    Args:
        unit_tokens: A hit is a multiple of it.
        block_tokens: Tokens that one block covers.
    """
    reads = _reads(manager_class, spec)
    if reads is None or unit_tokens % block_tokens:
        return None
    window_blocks = 0
    if reads is Reads.WINDOW:
        window_blocks = -(-(spec.sliding_window - 1) // block_tokens)
    return LookupGroups(
        reads=reads,
        block_tokens=block_tokens,
        unit_blocks=unit_tokens // block_tokens,
        window_blocks=window_blocks,
        looks_ahead=looks_ahead,
        group_ids=tuple(group_ids),
        keys=tuple(group_keys(block_pool, group_id, block_tokens) for group_id in group_ids),
    )


def _reads(manager_class: type[SingleTypeKVCacheManager], spec: KVCacheSpec) -> Reads | None:
    from vllm.v1.core import single_type_kv_cache_manager as managers
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    if manager_class is managers.FullAttentionManager and isinstance(spec, FullAttentionSpec):
        return Reads.ALL
    if manager_class is managers.SlidingWindowManager and isinstance(spec, SlidingWindowSpec):
        return Reads.WINDOW
    if manager_class is managers.MambaManager and isinstance(spec, MambaSpec):
        return Reads.LAST
    return None
