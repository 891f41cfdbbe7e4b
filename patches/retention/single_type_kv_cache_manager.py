# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/single_type_kv_cache_manager.py``: null blocks are not freed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.upstream import drop_nulls, live_blocks
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, SINCE_0_30, Patch
from vllm_ascend_kvext.upstream_state import PoolState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


def free_real_blocks(
    wrapped: Callable[..., None], manager: SingleTypeKVCacheManager, request_id: str
) -> None:
    """Take the null blocks out of a request's block table before it is freed."""
    if PoolState.of(manager.block_pool).retained is not None:
        drop_nulls(manager, request_id)
    return wrapped(request_id)


def pop_real_blocks(
    wrapped: Callable[..., list[KVCacheBlock]], manager: SingleTypeKVCacheManager, request_id: str
) -> list[KVCacheBlock]:
    """Leave the null blocks out of what is to be freed."""
    blocks = wrapped(request_id)
    return blocks if PoolState.of(manager.block_pool).retained is None else live_blocks(blocks)


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"
_WHY = (
    "Upstream hands every null block of a long sliding-window request to free_blocks, which counts "
    "down the null block's references and costs time in the scheduler."
)

PATCHES = (
    *(
        Patch(
            id=patch_id,
            target=f"{_MANAGERS}:{owner}.free",
            feature="retention",
            vllm=BEFORE_0_30,
            wrapper=free_real_blocks,
            why=_WHY,
            retire_when="0.23 is not supported any more: KVX-113 is for all managers",
        )
        for patch_id, owner in (
            ("KVX-111", "SingleTypeKVCacheManager"),
            ("KVX-112", "SlidingWindowManager"),
        )
    ),
    Patch(
        id="KVX-113",
        target=f"{_MANAGERS}:SingleTypeKVCacheManager.pop_blocks_for_free",
        feature="retention",
        vllm=SINCE_0_30,
        wrapper=pop_real_blocks,
        why=_WHY,
        retire_when="upstream drops null blocks before free_blocks; vLLM 0.33 skips them there",
    ),
)
