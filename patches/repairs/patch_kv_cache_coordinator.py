# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm_ascend/patch/platform/patch_kv_cache_coordinator.py``: the interval that was configured.

vLLM 0.30 takes its retention interval from its configuration, and has no variable for it. The
coordinator of vLLM-Ascend 0.30 reads that variable, does not find it, and caches every block of
sliding-window and state groups. So it ignores ``--prefix-cache-retention-interval``.

With this repair, an interval above 0 is used, because only a user can have set it. The value 0 is
vLLM's default, and looks like a user's 0. With 0, vLLM-Ascend still caches every block. Otherwise
users who have set nothing would lose hits of siblings, next turns and edited prompts.

If lookups drop no block for drafts (EAGLE, MTP), the repair keeps both positions of a prompt at
which a request can resume: for the same prompt, and for a longer prompt. vLLM keeps only one
position. If the kept position is a whole number of blocks, states exist only at the other position.
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
    """Give the coordinator the configured interval in tokens, after vLLM's own check."""
    from vllm.v1.core.kv_cache_coordinator import _validate_prefix_cache_retention_interval

    wrapped(*args, **kwargs)
    config = coordinator.kv_cache_config
    interval = config.prefix_cache_retention_interval
    if coordinator.retention_interval is not None or not interval:
        return
    _validate_prefix_cache_retention_interval(interval, coordinator.scheduler_block_size, config)
    coordinator.retention_interval = interval
    if coordinator.skips_eagle_block_drop or not coordinator.eagle_group_ids:
        _replaced.replace(coordinator, get_replay_boundaries)


def get_replay_boundaries(
    wrapped: Callable[[Request], tuple[int, ...]], request: Request
) -> tuple[int, ...]:
    """Add the positions at which the same prompt and a longer prompt resume."""
    num_tokens = request.num_prompt_tokens
    return tuple(sorted({*wrapped(request), num_tokens - 1, num_tokens}))


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
        "have, and ignores the configured one. Prompts keep every window block that can be hit, "
        "and every state.",
        retire_when="vLLM-Ascend reads `prefix_cache_retention_interval` of the configuration",
        relies_on=(f"{_COORDINATOR}.find_longest_cache_hit",),
    ),
)
