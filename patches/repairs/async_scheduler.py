# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/async_scheduler.py``: windows wait for drafts.

An asynchronous scheduler counts the drafts of a step in flight as computed. If they are rejected,
the request still needs the window before them. The repair changes the coordinator of a scheduler
with drafts and windows only. Other schedulers pay nothing in their steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
    from vllm.v1.request import Request

_replaced = InstanceMethods()


def have_windows_wait(
    wrapped: Callable[..., None], scheduler: AsyncScheduler, *args: Any, **kwargs: Any
) -> None:
    """Have the windows of a scheduler wait for its drafts, if it has both."""
    wrapped(*args, **kwargs)
    coordinator = scheduler.kv_cache_manager.coordinator
    requests = scheduler.requests
    if not scheduler.num_spec_tokens or not any(map(_has_window, coordinator.single_type_managers)):
        return

    def remove_skipped_blocks(
        wrapped: Callable[..., None], request_id: str, total_computed_tokens: int
    ) -> None:
        wait_for_drafts(wrapped, coordinator, requests, request_id, total_computed_tokens)

    _replaced.replace(coordinator, remove_skipped_blocks)


def wait_for_drafts(
    wrapped: Callable[..., None],
    coordinator: KVCacheCoordinator,
    requests: Mapping[str, Request],
    request_id: str,
    total_computed_tokens: int,
) -> None:
    """Free the blocks that have left the windows even if all drafts in flight are rejected.

    ``wrapped`` frees the blocks that have left the windows if all drafts are accepted.
    """
    request = requests.get(request_id)
    num_drafts = 0
    # A step in flight without drafts leaves one placeholder. Retention has its own allowance, which
    # also covers the tails that it saves.
    if (
        request is not None
        and request.num_output_placeholders > 1
        and not CoordinatorState.of(coordinator).waits_for_drafts
    ):
        num_drafts = drafts_in_flight(request)
    if not num_drafts:
        return wrapped(request_id, total_computed_tokens)
    for manager in coordinator.single_type_managers:
        # A Mamba manager has its own allowance for drafts.
        allowance_tokens = num_drafts if _has_window(manager) else 0
        manager.remove_skipped_blocks(request_id, total_computed_tokens - allowance_tokens)
    return None


def drafts_in_flight(request: Request) -> int:
    """The number of computed tokens that may be rejected drafts. The number is never too small."""
    if hasattr(request, "num_in_flight_tokens"):
        return 0  # vLLM-Ascend >= 0.23.0 counts drafts itself, and its managers wait for them.
    # A step in flight has one placeholder for its token, and one for each of its drafts. The next
    # step has as many drafts as any step in flight. After a preemption it has none, and the
    # placeholders are counted from zero.
    num_placeholders = request.num_output_placeholders
    num_steps = -(-num_placeholders // (1 + len(request.spec_token_ids)))
    return num_placeholders - num_steps


def _has_window(manager: SingleTypeKVCacheManager) -> bool:
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, SlidingWindowSpec

    return isinstance(manager.kv_cache_spec, (ChunkedLocalAttentionSpec, SlidingWindowSpec))


_SCHEDULER = "vllm.v1.core.sched.async_scheduler:AsyncScheduler"
_MANAGERS = "vllm.v1.core.single_type_kv_cache_manager"

PATCHES = (
    Patch(
        id="KVX-303",
        target=f"{_SCHEDULER}.__init__",
        feature="drafts-in-flight",
        vllm=BEFORE_0_30,
        wrapper=have_windows_wait,
        undo=_replaced.take_back,
        why="With asynchronous scheduling and speculative decoding, upstream frees window blocks "
        "as if all drafts in flight had been accepted. After a rejection the request reads KV that "
        "other requests have written there (vLLM #47728).",
        retire_when="0.23 is not supported any more: vLLM 0.30 waits for all tokens in flight",
        relies_on=(
            f"{_SCHEDULER}._update_after_schedule",
            "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
            "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator.remove_skipped_blocks",
            f"{_MANAGERS}:SingleTypeKVCacheManager.remove_skipped_blocks",
        ),
        ascend=(
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_allocate_slots",
            "vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_remove_skipped_blocks",
        ),
    ),
)
