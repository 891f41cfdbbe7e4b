# SPDX-License-Identifier: Apache-2.0
"""Retention: which blocks stay in the prefix cache. One module per upstream module."""

from vllm_ascend_kvext.patches.retention import (
    block_pool,
    kv_cache_coordinator,
    kv_cache_manager,
    scheduler,
    single_type_kv_cache_manager,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *block_pool.PATCHES,
    *kv_cache_coordinator.PATCHES,
    *kv_cache_manager.PATCHES,
    *scheduler.PATCHES,
    *single_type_kv_cache_manager.PATCHES,
)
