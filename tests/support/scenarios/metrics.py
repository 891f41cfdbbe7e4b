# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Chats with a scheduler whose counts are known, and the metrics that result."""

from __future__ import annotations

from typing import Any

from support.retention.started import retention_of
from support.scenarios import retention
from support.scenarios.engine import watch
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats

chat = retention.chat

# The counts of the compiled module are left out. So only the counts added below remain.
CheckpointRetention.stats = property(lambda retention: retention._stats)  # type: ignore[method-assign, assignment]


class Engine(retention.Engine):
    """An engine that adds another amount to each counter of retention in every step."""

    def __init__(self, plan: dict[str, Any]) -> None:
        super().__init__(plan)
        self.stats = retention_of(self.scheduler.kv_cache_manager.coordinator).stats
        self.totals: dict[str, int] = {}
        watch(self.scheduler, "schedule", self._count)

    def _count(self, output: Any, *_: Any, **__: Any) -> None:
        # The step behind the last one has nothing to do, and its statistics are not read.
        if output.total_num_scheduled_tokens:
            add_to_each(self.stats)
            self.totals = self.stats.totals()

    def report(self) -> dict[str, Any]:
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        self.llm.llm_engine.do_log_stats()
        metrics = generate_latest(get_prometheus_registry()).decode()
        return {"metrics": metrics, "totals": self.totals}


def add_to_each(stats: RetentionStats) -> None:
    stats.checkpoints += 1
    stats.checkpoints_kept += 2
    stats.checkpoints_evicted += 3
    stats.junctions_pinned += 4
    stats.junctions_hit += 5
    stats.hints_pinned += 6
    for num_tokens, cause in enumerate(LossCause, start=7):
        stats.lost_tokens[cause] += num_tokens
