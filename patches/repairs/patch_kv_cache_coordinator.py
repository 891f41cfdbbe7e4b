# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/patch/platform/patch_kv_cache_coordinator.py``: the interval that was configured.

vLLM 0.30 takes its retention interval from its configuration and has no variable for it. The
coordinator of vLLM-Ascend 0.30 looks for the variable, finds none, and caches every block of
sliding-window and state groups.

Without a connector its lookups drop no block for drafts (EAGLE, MTP). What vLLM keeps of a prompt
lies a block before, where sliding windows hit that block less, and states often have none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import SINCE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.request import Request


def take_configured_interval(
    wrapped: Callable[..., None], coordinator: KVCacheCoordinator, *args: Any, **kwargs: Any
) -> None:
    """Give the coordinator the interval of its configuration, checked as vLLM checks it."""
    from vllm.v1.core.kv_cache_coordinator import _validate_prefix_cache_retention_interval

    wrapped(*args, **kwargs)
    config = coordinator.kv_cache_config
    if coordinator.retention_interval is None:
        interval = config.prefix_cache_retention_interval
        _validate_prefix_cache_retention_interval(
            interval, coordinator.scheduler_block_size, config
        )
        coordinator.retention_interval = interval
        if coordinator.skips_eagle_block_drop:
            _replaced.replace(coordinator, get_replay_boundaries)


def get_replay_boundaries(
    wrapped: Callable[[Request], tuple[int, ...]], request: Request
) -> tuple[int, ...]:
    """Name the last boundary that the same prompt can hit, too, where lookups drop no block."""
    return tuple(sorted({*wrapped(request), request.num_prompt_tokens - 1}))


_replaced = InstanceMethods()

_COORDINATOR = (
    "vllm_ascend.patch.platform.patch_kv_cache_coordinator:AscendHybridKVCacheCoordinator"
)

PATCHES = (
    Patch(
        id="KVX-130",
        target=f"{_COORDINATOR}.__init__",
        feature="configured-interval",
        vllm=SINCE_0_30,
        wrapper=take_configured_interval,
        undo=_replaced.take_back,
        why="vLLM-Ascend reads the retention interval from a variable that vLLM 0.30 does not "
        "have: a prompt leaves all blocks of its windows that can be hit, 156 per group of Gemma 3 "
        "for 20,000 tokens where 2 are configured.",
        retire_when="vLLM-Ascend reads `prefix_cache_retention_interval` of the configuration",
        relies_on=(f"{_COORDINATOR}.find_longest_cache_hit",),
    ),
)
