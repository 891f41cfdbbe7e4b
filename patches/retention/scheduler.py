# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/core/sched/scheduler.py``: statistics of retention, and steps that leave states.

Only methods of a scheduler whose blocks are retained are replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.metrics.stats import attach_report
from vllm_ascend_kvext.patches.upstream import leaves_a_decode, step_start_tokens
from vllm_ascend_kvext.patching.declaration import Patch
from vllm_ascend_kvext.patching.instance_methods import InstanceMethods
from vllm_ascend_kvext.upstream_state import CoordinatorState

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.request import Request

    from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention


def follow_retention(
    wrapped: Callable[..., None], scheduler: Scheduler, *args: Any, **kwargs: Any
) -> None:
    """Let a new scheduler report retention's counts, and end steps where retention asks for it."""
    wrapped(*args, **kwargs)
    retention = CoordinatorState.of(scheduler.kv_cache_manager.coordinator).retention
    if retention is not None:
        methods = RetainingScheduler(scheduler, retention)
        _replaced.replace(scheduler, methods.make_stats)
        _replaced.replace(scheduler, methods._mamba_block_aligned_split)


class RetainingScheduler:
    """Methods of one scheduler."""

    def __init__(self, scheduler: Scheduler, retention: CheckpointRetention) -> None:
        self._scheduler = scheduler
        self._retention = retention

    def make_stats(
        self, wrapped: Callable[..., SchedulerStats | None], *args: Any, **kwargs: Any
    ) -> SchedulerStats | None:
        """Add to the statistics what retention has counted since the last step."""
        stats = wrapped(*args, **kwargs)
        if stats is not None:
            report = self._retention.stats.take()
            if report:
                attach_report(stats, report)
        return stats

    def _mamba_block_aligned_split(
        self,
        wrapped: Callable[..., int],
        request: Request,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        """Shorten a prefill step so that it leaves the state of a boundary that was asked for."""
        num_new_tokens = wrapped(
            request, num_new_tokens, num_new_local_computed_tokens, num_external_computed_tokens
        )
        if num_new_tokens <= 1:
            return num_new_tokens
        start_tokens = step_start_tokens(
            request, num_new_local_computed_tokens, num_external_computed_tokens
        )
        stop_tokens = self._retention.next_stop_tokens(request, start_tokens)
        if stop_tokens is None or leaves_a_decode(self._scheduler, request, stop_tokens):
            return num_new_tokens
        return min(num_new_tokens, stop_tokens - start_tokens)


_replaced = InstanceMethods()

_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"

PATCHES = (
    Patch(
        id="KVX-148",
        target=f"{_SCHEDULER}.__init__",
        feature="retention",
        wrapper=follow_retention,
        undo=_replaced.take_back,
        why="Upstream counts queries and hits, and not what became of the blocks that a lookup "
        "missed. And a state exists only where a step ends: upstream's prefill steps end anywhere, "
        "so that a boundary that requests share has none.",
        retire_when="upstream counts why a lookup ended where it did, and ends steps at shared "
        "prefixes",
        relies_on=(f"{_SCHEDULER}.make_stats", f"{_SCHEDULER}._mamba_block_aligned_split"),
        ascend=(
            "vllm_ascend.patch.platform.patch_balance_schedule:BalanceScheduler.__init__",
            "vllm_ascend.patch.platform.patch_mamba_block_aligned_split:_mamba_block_aligned_split",
        ),
    ),
)
