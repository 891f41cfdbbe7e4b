# SPDX-License-Identifier: Apache-2.0
"""The keys of a block pool's groups, made once per group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool

_GROUP_KEYS = "_kvext_group_keys"


def group_keys(block_pool: BlockPool, group_id: int, block_tokens: int) -> GroupKeys:
    """The keys of a group whose blocks hold ``block_tokens`` tokens."""
    known: dict[tuple[int, int], GroupKeys] | None = getattr(block_pool, _GROUP_KEYS, None)
    if known is None:
        known = {}
        setattr(block_pool, _GROUP_KEYS, known)
    keys = known.get((group_id, block_tokens))
    if keys is None:
        hashes_per_block = block_tokens // block_pool.hash_block_size
        keys = GroupKeys.of_group(group_id, hashes_per_block)
        known[group_id, block_tokens] = keys
    return keys


def cached_block(
    block_pool: BlockPool, hashes: Any, group_id: int, block_tokens: int, block_index: int
) -> Any:
    """The cached block that holds what a request's block at this index holds, or None.

    Args:
        hashes: ``Request.block_hashes``.
    """
    keys = group_keys(block_pool, group_id, block_tokens)
    if (block_index + 1) * keys.hashes_per_block > len(hashes):
        return None
    return block_pool.cached_block_hash_to_block.get_one_block(keys.at(hashes, block_index))
