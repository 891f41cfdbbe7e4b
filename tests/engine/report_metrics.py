# SPDX-License-Identifier: Apache-2.0
"""Serve chats in a process of its own, with a scheduler whose numbers are known; write its metrics.

    python report_metrics.py MODEL REPORT OPTIONS

``OPTIONS`` is JSON: arguments of ``LLM``. The engine core may be one process further away, so the
scheduler leaves the totals of its retention in a file.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from vllm.v1.core.sched.scheduler import Scheduler

from vllm_ascend_kvext.patches.retention.kv_cache_coordinator import retention_of
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats

TOTALS_VARIABLE = "TOTALS_FILE"


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


def main() -> None:
    model, report, options = sys.argv[1:]
    # Processes that are spawned inherit the path, and import the scheduler by its name.
    sys.path.insert(0, str(Path(__file__).parent))
    totals = Path(report).with_suffix(".totals")
    os.environ[TOTALS_VARIABLE] = str(totals)

    from prometheus_client import generate_latest
    from serve_workload import Server, chat
    from vllm.v1.metrics.prometheus import get_prometheus_registry

    scheduler = f"{Path(__file__).stem}.{CountingScheduler.__name__}"
    server = Server(model, {"scheduler_cls": scheduler, **json.loads(options)})
    chat(server)
    server.finish()
    server._llm.llm_engine.do_log_stats()
    seen = {
        "metrics": generate_latest(get_prometheus_registry()).decode(),
        "totals": json.loads(totals.read_text()) if totals.exists() else None,
    }
    Path(report).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
