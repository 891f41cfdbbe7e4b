# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Passes reports of the connector to vLLM's log and to Prometheus.

The scheduler side makes a report, see ``counters``. vLLM sends the data to the process that serves
``/metrics``, and makes the statistics again there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_ascend_kvext.connector.common.counters import METRICS
from vllm_ascend_kvext.counted import MetricTable, Number
from vllm_ascend_kvext.store.lookup import Shortfall


class KvextStats(KVConnectorStats):  # type: ignore[misc]  # mypy does not follow vLLM's imports
    """What was counted since the last report. ``data`` is a ``Report``, see ``counters``.

    An object is always true, also if it is empty. vLLM asks the scheduler side only if the object
    that the workers sent is true.
    """

    def __init__(self, data: Mapping[str, Number] | None = None) -> None:
        # The dict is copied, because vLLM passes one dict to several loggers, which each add to it.
        super().__init__(dict(data or {}))

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KvextStats) -> KvextStats:
        """Add a later report, in place. A gauge has the value of the latest report."""
        METRICS.merge(self.data, other.data)
        return self

    def is_empty(self) -> bool:
        """Whether nothing was counted. Gauges alone are no reason for a log line."""
        return all(map(METRICS.is_gauge, self.data))

    def reduce(self) -> dict[str, int | float]:
        """The names and values of one line of the log. vLLM joins the pairs."""
        line: dict[str, int | float] = {}
        for direction, done in (("store", "stored"), ("load", "loaded")):
            num_bytes = self._count(f"transfer_bytes.{direction}")
            seconds = self._count(f"transfer_seconds.{direction}")
            line[f"{done} GB"] = _in_gb(num_bytes)
            if seconds:
                line[f"{direction} GB/s per worker"] = _in_gb(num_bytes / seconds)
            if failures := self._count(f"transfer_failures.{direction}"):
                line[f"failed {direction}s"] = failures
        line["hit tokens"] = self._count("host_hit_tokens")
        line["held GB per worker"] = _in_gb(self._count("host_bytes"))
        if too_dear := self._count("host_too_dear_loads"):
            line["too dear loads"] = too_dear
        for reason in Shortfall:
            if requests := self._count(f"host_shortfalls.{reason.value}"):
                line[f"requests short: {reason.value.replace('_', ' ')}"] = requests
        return line

    def _count(self, key: str) -> int | float:
        value: int | float = self.data.get(key, 0)
        return value


class KvextPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics of all engines that one stat logger serves.

    Args:
        further_tables: The tables of extensions. All their metrics are counters.
    """

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        further_tables: Iterable[MetricTable] = (),
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._observers = [
            table.register(
                self._counter_cls, self._gauge_cls, self._labelnames, self.per_engine_labelvalues
            )
            for table in (METRICS, *further_tables)
        ]

    def observe(self, transfer_stats_data: Mapping[str, Number], engine_idx: int = 0) -> None:
        """Add one engine's report."""
        for observe in self._observers:
            observe(transfer_stats_data, engine_idx)


def _in_gb(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 3)
