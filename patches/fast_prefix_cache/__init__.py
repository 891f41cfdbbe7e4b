# SPDX-License-Identifier: Apache-2.0
"""The prefix-cache path of the scheduler at a fraction of its cost, decision for decision.

One module per upstream module, named after it. What these patches replace they do exactly as
upstream, for retention as for dense caching, and know nothing of either: what retention does
otherwise wraps them. What they do not cover they leave to upstream.
"""

from vllm_ascend_kvext.patches.fast_prefix_cache import (
    block_pool,
    kv_cache_coordinator,
    kv_cache_manager,
    single_type_kv_cache_manager,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *block_pool.PATCHES,
    *single_type_kv_cache_manager.PATCHES,
    *kv_cache_coordinator.PATCHES,
    *kv_cache_manager.PATCHES,
)
