# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/core/sched/scheduler.py``: statistics of retention, and steps that leave states."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.metrics.stats import attach_report
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of
from vllm_ascend_kvext.patching.declaration import Patch

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request


def report_retention(
    wrapped: Callable[..., SchedulerStats | None],
    scheduler: Scheduler,
    *args: Any,
    **kwargs: Any,
) -> SchedulerStats | None:
    """Send along what retention has counted since the last step."""
    stats = wrapped(*args, **kwargs)
    if stats is not None:
        retention = retention_of(scheduler.kv_cache_manager.coordinator)
        report = None if retention is None else retention.stats.take()
        if report:
            attach_report(stats, report)
    return stats


def end_step_at_checkpoint(
    wrapped: Callable[..., int],
    scheduler: Scheduler,
    request: Request,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """Shorten a prefill step so that it leaves the state of a boundary that was asked for."""
    num_new_tokens = wrapped(
        request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
    )
    retention = retention_of(scheduler.kv_cache_manager.coordinator)
    if retention is None or num_new_tokens <= 1:
        return num_new_tokens
    computed_tokens = (
        request.num_computed_tokens + num_new_local_computed_tokens + num_external_computed_tokens
    )
    stop_tokens = retention.next_stop_tokens(request, computed_tokens)
    if stop_tokens is None:
        return num_new_tokens
    return min(num_new_tokens, stop_tokens - computed_tokens)


PATCHES = (
    Patch(
        id="KVX-162",
        target="vllm.v1.core.sched.scheduler:Scheduler.make_stats",
        feature="retention",
        wrapper=report_retention,
        why="Upstream counts queries and hits, and not what became of the blocks that a lookup "
        "missed.",
        retire_when="upstream counts why a lookup ended where it did",
    ),
    Patch(
        id="KVX-145",
        target="vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
        feature="retention",
        wrapper=end_step_at_checkpoint,
        why="A state exists only where a step ends, and upstream's prefill steps end anywhere: a "
        "boundary that requests share has none.",
        retire_when="upstream ends steps at shared prefixes",
        ascend=(
            "vllm_ascend.patch.platform.patch_mamba_block_aligned_split:_mamba_block_aligned_split",
        ),
    ),
)
