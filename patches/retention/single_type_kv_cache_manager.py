# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/single_type_kv_cache_manager.py``: null blocks are not freed.

Upstream hands every null block of a long sliding-window request to ``free_blocks``. The call counts
down the null block's references, and costs time in the scheduler. vLLM 0.33 skips null blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.upstream import drop_nulls, live_blocks

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager


class RetainingGroup:
    """Methods of the manager of one group."""

    def __init__(self, manager: SingleTypeKVCacheManager) -> None:
        self._manager = manager

    def pop_blocks_for_free(
        self, wrapped: Callable[[str], list[KVCacheBlock]], request_id: str
    ) -> list[KVCacheBlock]:
        """Leave the null blocks out of what is to be freed (since vLLM 0.30)."""
        return live_blocks(wrapped(request_id))

    def free(self, wrapped: Callable[[str], None], request_id: str) -> None:
        """Take the null blocks out of a request's block table before it is freed.

        Since vLLM 0.30, upstream's ``free`` calls `pop_blocks_for_free`, which then takes them out.
        """
        drop_nulls(self._manager, request_id)
        wrapped(request_id)


_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

RELIES_ON_BEFORE_0_30 = (
    f"{_MANAGERS}:SingleTypeKVCacheManager.free",
    f"{_MANAGERS}:SlidingWindowManager.free",
    f"{_MANAGERS}:MambaManager.free",
)

RELIES_ON_SINCE_0_30 = (
    f"{_MANAGERS}:SingleTypeKVCacheManager.pop_blocks_for_free",
    f"{_MANAGERS}:MambaManager.pop_blocks_for_free",
)
