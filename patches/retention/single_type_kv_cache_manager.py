# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/single_type_kv_cache_manager.py``: null blocks are not freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.fast_prefix_cache.single_type_kv_cache_manager import (
    num_leading_nulls,
)
from vllm_ascend_kvext.patches.retention.block_pool import is_retaining
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


_ANY_LENGTH_TOKENS = 1 << 40


def free_real_blocks(
    wrapped: Callable[..., None],
    instance: SingleTypeKVCacheManager,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Take the null blocks out of a request's block table before it is freed."""
    if is_retaining(instance.block_pool):
        _drop_null_blocks(instance, *args, **kwargs)
    return wrapped(*args, **kwargs)


def _drop_null_blocks(manager: SingleTypeKVCacheManager, request_id: str) -> None:
    blocks = manager.req_to_blocks.get(request_id)
    if not blocks or not manager.get_num_skipped_tokens(_ANY_LENGTH_TOKENS):
        return  # full attention has no null blocks
    num_nulls = num_leading_nulls(blocks)
    if num_nulls is None:  # states have nulls between them
        manager.req_to_blocks[request_id] = [block for block in blocks if not block.is_null]
    elif num_nulls:
        manager.req_to_blocks[request_id] = blocks[num_nulls:]


_WHY = (
    "Upstream hands every null block of a long sliding-window request to free_blocks, which "
    "counts down the null block's references and costs time in the scheduler."
)

PATCHES = (
    Patch(
        id="KVX-111",
        target="vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.free",
        kind=Kind.WRAP,
        feature="retention",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=free_real_blocks,
        why=_WHY,
        retire_when="upstream drops null blocks before free_blocks",
    ),
    Patch(
        id="KVX-112",
        target="vllm.v1.core.single_type_kv_cache_manager:SlidingWindowManager.free",
        kind=Kind.WRAP,
        feature="retention",
        vllm=("==0.23.0.*",),
        wrapper=free_real_blocks,
        why=_WHY,
        retire_when="upstream drops null blocks before free_blocks",
    ),
)
