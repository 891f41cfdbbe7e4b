# SPDX-License-Identifier: Apache-2.0
"""Chats with a scheduler whose numbers are known, and the metrics that come of them.

The engine core may be one process further away, so the scheduler leaves the totals of its retention
in a file of the working folder.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from support.scenarios import retention
from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats

chat = retention.chat
TOTALS_VARIABLE = "TOTALS_FILE"

# Without what the compiled module counts: all numbers are those of the scheduler below.
CheckpointRetention.stats = property(lambda retention: retention._stats)  # type: ignore[method-assign, assignment]


class CountingScheduler(Scheduler):
    """Adds to each number that retention counts, another amount for each, in every step."""

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        retention = retention_of(self.kv_cache_manager.coordinator)
        # The step after the last has nothing to do, and nobody waits for its statistics.
        if retention is not None and output.total_num_scheduled_tokens:
            add_to_each(retention.stats)
            Path(os.environ[TOTALS_VARIABLE]).write_text(json.dumps(retention.stats.totals()))
        return output


def add_to_each(stats: RetentionStats) -> None:
    stats.checkpoints += 1
    stats.checkpoints_kept += 2
    stats.checkpoints_evicted += 3
    stats.junctions_pinned += 4
    stats.junctions_hit += 5
    stats.hints_pinned += 6
    for num_tokens, cause in enumerate(LossCause, start=7):
        stats.lose(cause, num_tokens)


class Engine(retention.Engine):
    """An engine with that scheduler."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self._totals = Path("totals.json").resolve()
        os.environ[TOTALS_VARIABLE] = str(self._totals)
        scheduler = {"scheduler_cls": f"{__name__}.{CountingScheduler.__name__}"}
        super().__init__({**plan, "engine": plan["engine"] | scheduler})

    def report(self) -> dict[str, Any]:
        from prometheus_client import generate_latest
        from vllm.v1.metrics.prometheus import get_prometheus_registry

        self.llm.llm_engine.do_log_stats()
        totals = self._totals
        return {
            "metrics": generate_latest(get_prometheus_registry()).decode(),
            "totals": json.loads(totals.read_text()) if totals.exists() else None,
        }
