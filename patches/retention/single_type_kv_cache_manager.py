# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/single_type_kv_cache_manager.py``: null blocks are not freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.retention.block_pool import is_retaining
from vllm_ascend_kvext.patches.upstream import drop_nulls
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


def free_real_blocks(
    wrapped: Callable[..., None], manager: SingleTypeKVCacheManager, request_id: str
) -> None:
    """Take the null blocks out of a request's block table before it is freed."""
    if is_retaining(manager.block_pool):
        drop_nulls(manager, request_id)
    return wrapped(request_id)


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
        vllm=("==0.23.0.*",),
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
