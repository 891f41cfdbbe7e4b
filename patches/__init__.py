# SPDX-License-Identifier: Apache-2.0
"""The ledger: every change this package makes to upstream, in one tuple."""

from vllm_ascend_kvext.patches import (
    ascend_single_type_kv_cache_manager,
    block_pool,
    envs,
    kv_cache_coordinator,
    kv_cache_manager,
    loggers,
    output_processor,
    prefix_cache,
    repairs,
    scheduler,
    single_type_kv_cache_manager,
    stats,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *prefix_cache.PATCHES,
    *block_pool.PATCHES,
    *single_type_kv_cache_manager.PATCHES,
    *kv_cache_coordinator.PATCHES,
    *envs.PATCHES,
    *kv_cache_manager.PATCHES,
    *ascend_single_type_kv_cache_manager.PATCHES,
    *repairs.PATCHES,
    *stats.PATCHES,
    *scheduler.PATCHES,
    *loggers.PATCHES,
    *output_processor.PATCHES,
)
