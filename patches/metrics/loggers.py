# SPDX-License-Identifier: Apache-2.0
"""``vllm/v1/metrics/loggers.py``: retention in Prometheus and in the periodic log line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.patches.metrics.stats import attached_report
from vllm_ascend_kvext.patching.declaration import Kind, Patch
from vllm_ascend_kvext.retention.stats import METRICS, Counts, LossCause, Metric, describe, merge

if TYPE_CHECKING:
    from vllm.v1.metrics.loggers import (
        LoggingStatLogger,
        PrometheusStatLogger,
        StatLoggerManager,
    )
    from vllm.v1.metrics.stats import SchedulerStats

_PREFIX = "vllm:kvext_"
_PROMETHEUS = "_kvext_retention_metrics"
_UNLOGGED = "_kvext_retention_unlogged"


class RetentionMetrics:
    """The Prometheus metrics of retention, for all engines that one stat logger serves.

    They are built from the classes of that logger, which may be Ray's, have its labels, and go
    when it unregisters its own, by their prefix.
    """

    def __init__(self, stat_logger: PrometheusStatLogger) -> None:
        self._stat_logger = stat_logger
        self._by_engine: dict[int, dict[str, Callable[[int], None]]] = {
            engine_index: {} for engine_index in stat_logger.per_engine_labelvalues
        }
        for metric in METRICS:
            self._add(metric)

    def observe(self, report: Mapping[str, int], engine_index: int) -> None:
        """Add one engine's report."""
        updates = self._by_engine[engine_index]
        for key, value in report.items():
            # A key of another release, in an engine on another machine, is not for us.
            if key in updates:
                updates[key](value)

    def _add(self, metric: Metric) -> None:
        named: dict[str, Any] = {
            "name": _PREFIX + metric.name,
            "documentation": metric.documentation,
            "labelnames": ["model_name", "engine", *(["cause"] if metric.has_causes else [])],
        }
        if metric.is_gauge:
            parent = self._stat_logger._gauge_cls(**named, multiprocess_mode="mostrecent")
        else:
            parent = self._stat_logger._counter_cls(**named)
        for engine_index, labels in self._stat_logger.per_engine_labelvalues.items():
            for cause in LossCause if metric.has_causes else (None,):
                child = parent.labels(*labels, *([cause.value] if cause else []))
                update = child.set if metric.is_gauge else child.inc
                self._by_engine[engine_index][metric.key(cause)] = update


def register_metrics(
    wrapped: Callable[..., None], stat_logger: PrometheusStatLogger, *args: Any, **kwargs: Any
) -> None:
    """Register after upstream's constructor, which unregisters what an earlier one left."""
    wrapped(*args, **kwargs)
    setattr(stat_logger, _PROMETHEUS, RetentionMetrics(stat_logger))


def record_metrics(
    wrapped: Callable[..., None],
    stat_logger: PrometheusStatLogger,
    scheduler_stats: SchedulerStats | None,
    iteration_stats: object,
    mm_cache_stats: object = None,
    engine_idx: int = 0,
) -> None:
    """Add a report to the metrics."""
    wrapped(scheduler_stats, iteration_stats, mm_cache_stats, engine_idx)
    report = attached_report(scheduler_stats)
    metrics: RetentionMetrics | None = getattr(stat_logger, _PROMETHEUS, None)
    if report and metrics is not None:
        metrics.observe(report, engine_idx)


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
        unlogged: Counts = vars(stat_logger).setdefault(_UNLOGGED, {})
        merge(unlogged, report)


def log_retention(
    wrapped: Callable[..., None], stat_logger: LoggingStatLogger, *args: Any, **kwargs: Any
) -> None:
    """Follow upstream's line with one about retention, if there is anything to say."""
    from vllm.v1.metrics.loggers import logger

    wrapped(*args, **kwargs)
    line = describe(vars(stat_logger).pop(_UNLOGGED, {}))
    if line:
        logger.info("%s%s", stat_logger.log_prefix, line)


def mark_recorded(
    wrapped: Callable[..., None],
    stat_loggers: StatLoggerManager,
    scheduler_stats: SchedulerStats | None,
    *args: Any,
    **kwargs: Any,
) -> None:
    """Empty a report once every logger has seen it, so that it is not carried over."""
    wrapped(scheduler_stats, *args, **kwargs)
    report = attached_report(scheduler_stats)
    if report:
        report.clear()


_MODULE = "vllm.v1.metrics.loggers"
_VLLM = ("==0.23.0.*",)


def _for_stat_logger(
    patch_id: str, function: str, wrapper: Callable[..., None], *relies_on: str
) -> Patch:
    """What a stat logger of upstream does about retention besides."""
    return Patch(
        id=patch_id,
        target=f"{_MODULE}:{function}",
        kind=Kind.WRAP,
        feature="retention",
        vllm=_VLLM,
        wrapper=wrapper,
        why="Upstream's hook for stat loggers is read by AsyncLLM only, and its loggers are built "
        "before the Prometheus one, which then unregisters whatever is named vllm.",
        retire_when="upstream's hook serves LLM too, and lets vllm: metrics of a plugin live",
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
        kind=Kind.WRAP,
        feature="retention",
        vllm=_VLLM,
        wrapper=mark_recorded,
        why="What KVX-167 carries over has to be counted once.",
        retire_when="KVX-167 is gone",
    ),
)
