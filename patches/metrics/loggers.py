# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``vllm/v1/metrics/loggers.py``: retention in Prometheus and in the periodic log line."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.metrics.stats import attached_report
from vllm_ascend_kvext.patching.declaration import BEFORE_0_30, Patch
from vllm_ascend_kvext.retention.stats import METRICS, describe
from vllm_ascend_kvext.upstream_state import ReportsState

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import (
        LoggingStatLogger,
        PrometheusStatLogger,
        StatLoggerManager,
    )
    from vllm.v1.metrics.stats import SchedulerStats


def register_metrics(
    wrapped: Callable[..., None], stat_logger: PrometheusStatLogger, *args: Any, **kwargs: Any
) -> None:
    """Register the metrics after upstream's constructor, which unregisters earlier metrics.

    The logger unregisters these metrics together with its own, by their prefix.
    """
    wrapped(*args, **kwargs)
    ReportsState.of(stat_logger).observe = METRICS.register(
        stat_logger._counter_cls,
        stat_logger._gauge_cls,
        ["model_name", "engine"],
        stat_logger.per_engine_labelvalues,
    )


def record_metrics(
    wrapped: Callable[..., None],
    stat_logger: PrometheusStatLogger,
    scheduler_stats: SchedulerStats | None,
    iteration_stats: object,
    mm_cache_stats: object = None,
    engine_idx: int = 0,
) -> None:
    """Add the report of a step to the metrics."""
    wrapped(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    report = attached_report(scheduler_stats)
    observe = ReportsState.of(stat_logger).observe
    if report and observe is not None:
        observe(report, engine_idx)


def note_for_log(
    wrapped: Callable[..., None],
    stat_logger: LoggingStatLogger,
    scheduler_stats: SchedulerStats | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Collect reports until the next log line."""
    wrapped(scheduler_stats, *args, **kwargs)
    report = attached_report(scheduler_stats)
    if report:
        METRICS.merge(ReportsState.of(stat_logger).counts, report)


def log_retention(
    wrapped: Callable[..., None], stat_logger: LoggingStatLogger, *args: Any, **kwargs: Any
) -> None:
    """Log a line about retention after upstream's line, unless nothing was counted."""
    from vllm.v1.metrics.loggers import logger

    wrapped(*args, **kwargs)
    unlogged = ReportsState.of(stat_logger).counts
    line = describe(unlogged)
    unlogged.clear()
    if line:
        logger.info("%s%s", stat_logger.log_prefix, line)


def mark_recorded(
    wrapped: Callable[..., None],
    stat_loggers: StatLoggerManager,
    scheduler_stats: SchedulerStats | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Empty a report when all loggers have seen it, so that it is not carried over."""
    wrapped(scheduler_stats, *args, **kwargs)
    report = attached_report(scheduler_stats)
    if report:
        report.clear()


_MODULE = "vllm.v1.metrics.loggers"


def _for_stat_logger(
    patch_id: str, function: str, wrapper: Callable[..., None], *relies_on: str
) -> Patch:
    """A patch that lets a stat logger of upstream also report retention."""
    return Patch(
        id=patch_id,
        target=f"{_MODULE}:{function}",
        feature="retention",
        wrapper=wrapper,
        why="Only AsyncLLM uses upstream's hook for stat loggers. Upstream makes the loggers of "
        "the hook first. The Prometheus logger comes later, and unregisters all metrics whose "
        "names begin with vllm.",
        retire_when="upstream's hook serves LLM, too, and keeps a plugin's vllm: metrics",
        relies_on=relies_on,
    )


PATCHES = (
    _for_stat_logger(
        "KVX-163",
        "PrometheusStatLogger.__init__",
        register_metrics,
        "vllm.v1.metrics.prometheus:unregister_vllm_metrics",
    ),
    _for_stat_logger("KVX-164", "PrometheusStatLogger.record", record_metrics),
    _for_stat_logger("KVX-165", "LoggingStatLogger.record", note_for_log),
    _for_stat_logger(
        "KVX-166",
        "LoggingStatLogger.log",
        log_retention,
        f"{_MODULE}:AggregatedLoggingStatLogger.record",
    ),
    Patch(
        id="KVX-168",
        target=f"{_MODULE}:StatLoggerManager.record",
        feature="retention",
        vllm=BEFORE_0_30,
        wrapper=mark_recorded,
        why="A report that KVX-167 carries over must be counted only once.",
        retire_when="KVX-167 is gone",
    ),
)
