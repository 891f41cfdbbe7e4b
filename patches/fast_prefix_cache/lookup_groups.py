# SPDX-License-Identifier: Apache-2.0
"""Describes upstream's groups to `vllm_ascend_kvext.prefix_cache.lookup`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm_ascend_kvext.groups.model import GroupKind, window_pages
from vllm_ascend_kvext.groups.spec_attributes import kind_of, window_tokens_of
from vllm_ascend_kvext.patches.fast_prefix_cache.block_keys import group_keys
from vllm_ascend_kvext.prefix_cache.lookup import LookupGroups

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
    kind = kind_of(spec)
    if _manager_of(kind) is not manager_class or unit_tokens % block_tokens:
        return None
    return LookupGroups(
        kind=kind,
        block_tokens=block_tokens,
        unit_blocks=unit_tokens // block_tokens,
        window_blocks=window_pages(window_tokens_of(spec), block_tokens),
        looks_ahead=looks_ahead,
        group_ids=tuple(group_ids),
        keys=tuple(group_keys(block_pool, group_id, block_tokens) for group_id in group_ids),
    )


def _manager_of(kind: GroupKind) -> type[SingleTypeKVCacheManager] | None:
    """The manager whose lookup is known; a subclass may look up in another way."""
    from vllm.v1.core import single_type_kv_cache_manager as managers

    known: dict[GroupKind, type[SingleTypeKVCacheManager]] = {
        GroupKind.FULL: managers.FullAttentionManager,
        GroupKind.WINDOW: managers.SlidingWindowManager,
        GroupKind.STATE: managers.MambaManager,
    }
    return known.get(kind)
