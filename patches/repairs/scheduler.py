# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/sched/scheduler.py``: the coordinator can look a request up by its id."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.repairs.kv_cache_coordinator import introduce_requests
from vllm_ascend_kvext.patching.declaration import Kind, Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler


def share_requests(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Hand the coordinator the scheduler's table of requests."""
    wrapped(*args, **kwargs)
    introduce_requests(scheduler.kv_cache_manager.coordinator, scheduler.requests)


PATCHES = (
    Patch(
        id="KVX-304",
        target="vllm.v1.core.sched.scheduler:Scheduler.__init__",
        kind=Kind.WRAP,
        feature="drafts-in-flight",
        vllm=("==0.20.2.*", "==0.23.0.*"),
        wrapper=share_requests,
        why="KVX-303 is told a request's id, and has to know how many of its tokens are drafts.",
        retire_when="KVX-303 is",
        ascend=("vllm_ascend.patch.platform.patch_async_swa_kv_lifetime:_patched_scheduler_init",),
    ),
)
