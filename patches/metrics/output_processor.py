# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/engine/output_processor.py``: no report of retention is lost on the way to the loggers.

Before vLLM 0.30, ``LLMEngine.step`` drops the statistics of steps without output, such as all
chunks of a prompt but its last. The patched function sees all statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm_ascend_kvext.patches.metrics.stats import attach_report, attached_report
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch
from vllm_ascend_kvext.retention.stats import METRICS
from vllm_ascend_kvext.upstream_state import ReportsState

if TYPE_CHECKING:
    from vllm.v1.engine.output_processor import OutputProcessor
    from vllm.v1.metrics.stats import SchedulerStats


def carry_over(
    wrapped: Callable[..., None],
    processor: OutputProcessor,
    scheduler_stats: SchedulerStats | None,
) -> None:
    """Add the reports that were not recorded yet to the report of this step.

    The same dict is attached to all steps until `patches.metrics.loggers.mark_recorded` empties it.
    """
    wrapped(scheduler_stats)
    if scheduler_stats is None:
        return
    unrecorded = ReportsState.of(processor).counts
    report = attached_report(scheduler_stats)
    if report:
        METRICS.merge(unrecorded, report)
    if unrecorded:
        attach_report(scheduler_stats, unrecorded)


PATCHES = (
    Patch(
        id="KVX-167",
        target="vllm.v1.engine.output_processor:OutputProcessor.update_scheduler_stats",
        feature="retention",
        vllm=BEFORE_0_30,
        wrapper=carry_over,
        why="LLM records no statistics of a step without output, so the counts of a long prompt's "
        "chunks are lost.",
        retire_when="0.23 is not supported any more: vLLM 0.30 records every step",
        relies_on=("vllm.v1.engine.llm_engine:LLMEngine.step",),
    ),
)
