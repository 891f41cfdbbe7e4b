# SPDX-License-Identifier: Apache-2.0
"""Repairs of upstream defects: on by default, each with a switch, none of them needs the others.

One module per upstream module, named after it; `discarded_frames`, too, is for the scheduler's.
Knows nothing of retention but whether it is on.
"""

from vllm_ascend_kvext.patches.repairs import (
    ascend_platform,
    async_scheduler,
    discarded_frames,
    experts_selector,
    kv_cache_coordinator,
    kv_cache_manager,
    mamba_utils,
    scheduler,
    single_type_kv_cache_manager,
)
from vllm_ascend_kvext.patching.declaration import Patch

PATCHES: tuple[Patch, ...] = (
    *kv_cache_manager.PATCHES,
    *kv_cache_coordinator.PATCHES,
    *single_type_kv_cache_manager.PATCHES,
    *async_scheduler.PATCHES,
    *discarded_frames.PATCHES,
    *scheduler.PATCHES,
    *mamba_utils.PATCHES,
    *ascend_platform.PATCHES,
    *experts_selector.PATCHES,
)
