# SPDX-License-Identifier: Apache-2.0
"""``vllm/distributed/kv_transfer/kv_connector/v1/metrics.py``: what became of LMCache's stores.

LMCache's connector reports how long its lookups took, and vLLM does not ask for it: it asks the
scheduler's side only if what the workers have sent is true, and these have nothing to send.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from vllm_ascend_kvext.lmcache.store_checks import LOST, OUTCOMES, UNCHECKED, StoreChecks

_REPORT_EVERY_S = 1.0

_KEYS = {outcome: f"kvext_stored_tokens.{outcome}" for outcome in OUTCOMES}


class LMCacheStats(KVConnectorStats):  # type: ignore[misc]  # mypy does not follow vLLM's imports
    """LMCache's statistics, and tokens stored by outcome.

    Always true, even if empty, so that vLLM asks the scheduler's side, too.

    Attributes:
        data: Numbers, which add up, and LMCache's lists of observations.
    """

    def __init__(self, data: Mapping[str, Any] | None = None) -> None:
        super().__init__(dict(data or {}))

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> LMCacheStats:
        """Add a later report, in place."""
        for key, value in other.data.items():
            self.data[key] = self.data[key] + value if key in self.data else value
        return self

    def is_empty(self) -> bool:
        return not any(self.data.values())

    def reduce(self) -> dict[str, int | float]:
        """For one line of the log; vLLM joins the pairs."""
        theirs = {key: value for key, value in self.data.items() if key not in _KEYS.values()}
        line: dict[str, int | float] = dict(_of_lmcache(theirs))
        if lost := self.data.get(_KEYS[LOST], 0):
            line["tokens LMCache lost of those it reported as stored"] = lost
        if unchecked := self.data.get(_KEYS[UNCHECKED], 0):
            line["tokens stored and not looked up"] = unchecked
        return line


class LMCachePromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """LMCache's metrics, and a counter of tokens stored by outcome.

    Args:
        theirs: Made by LMCache's connector; None where it makes none.
        arguments: vLLM's, for any connector's metrics.
    """

    def __init__(self, theirs: Any, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._theirs = theirs
        self._counter = self._counter_cls(
            name="vllm:kvext_lmcache_stored_tokens",
            documentation="Tokens that LMCache's server has reported as stored, by what a lookup "
            "has found of them afterwards.",
            labelnames=[*self._labelnames, "outcome"],
        )
        for labels in self.per_engine_labelvalues.values():
            for outcome in OUTCOMES:
                self._counter.labels(*labels, outcome)  # Prometheus shows it from the start.

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add one engine's report."""
        if self._theirs is not None:
            self._theirs.observe(transfer_stats_data, engine_idx)
        labels = self.per_engine_labelvalues[engine_idx]
        for outcome, key in _KEYS.items():
            # Asked for anew each time, see `vllm_ascend_kvext.connector.stats`.
            if tokens := transfer_stats_data.get(key):
                self._counter.labels(*labels, outcome).inc(tokens)


def report_stores(connector: Any, checks: StoreChecks | None) -> None:
    """Let the statistics of a connector of the scheduler have what was counted.

    They are of one class on both sides, as MultiConnector expects.

    Args:
        connector: LMCache's.
        checks: None where nothing is counted.
    """
    get_theirs: Callable[[], Any] = connector.get_kv_connector_stats

    def get_kv_connector_stats() -> LMCacheStats:
        theirs = get_theirs()
        stats = LMCacheStats(theirs.data if theirs is not None else None)
        counts = checks.take_counts() if checks is not None else {}
        stats.data.update({_KEYS[outcome]: tokens for outcome, tokens in counts.items()})
        return stats

    connector.get_kv_connector_stats = get_kv_connector_stats


def ask_for_reports(connector: Any) -> None:
    """Let a connector of a worker send what makes vLLM ask the scheduler's."""
    get_theirs: Callable[[], Any] = connector.get_kv_connector_stats
    last_s = 0.0

    def get_kv_connector_stats() -> LMCacheStats | None:
        nonlocal last_s
        now_s = time.monotonic()
        if now_s - last_s < _REPORT_EVERY_S:
            return None
        last_s = now_s
        theirs = get_theirs()
        return LMCacheStats(theirs.data if theirs is not None else None)

    connector.get_kv_connector_stats = get_kv_connector_stats


def _of_lmcache(data: dict[str, Any]) -> dict[str, int | float]:
    """LMCache's part of a log line."""
    try:
        from lmcache.integration.vllm.lmcache_mp_metrics import LMCacheMPConnectorStats
    except ImportError:
        return {}
    return dict(LMCacheMPConnectorStats(data=data).reduce())
