# SPDX-License-Identifier: Apache-2.0
"""``vllm_ascend/patch/platform/patch_kv_cache_coordinator.py``: the interval that was configured.

vLLM 0.30 takes its retention interval from its configuration and has no variable for it. The
coordinator of vLLM-Ascend 0.30 looks for the variable, finds none, and caches every block of
sliding-window and state groups, whatever ``--prefix-cache-retention-interval`` says.

Here an interval above 0 is obeyed: only a user can have set it. 0 is vLLM's default, and a user's 0
looks the same. There vLLM-Ascend's dense caching stays: obeying 0 would take hits of siblings, next
turns and edited prompts from users who have asked for nothing.

Where lookups drop no block for drafts (EAGLE, MTP), a prompt is kept at both positions at which it
can be resumed, by itself and by a longer one. vLLM keeps one of them; where that is a whole number
of blocks, states are at the other alone.
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
    """Give the coordinator an interval of tokens of its configuration, checked as vLLM does."""
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
    """Name where the same prompt resumes, and a longer one, too, where lookups drop no block."""
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
        "have, and overlooks one that is configured: prompts keep every block of their windows "
        "that can be hit, and every state.",
        retire_when="vLLM-Ascend reads `prefix_cache_retention_interval` of the configuration",
        relies_on=(f"{_COORDINATOR}.find_longest_cache_hit",),
    ),
)
