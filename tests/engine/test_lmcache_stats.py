# SPDX-License-Identifier: Apache-2.0
"""What was counted of LMCache's stores, on the way that vLLM sends it. No engine, no LMCache."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from vllm_ascend_kvext.lmcache.store_checks import KEPT, LOST, StoreChecks
from vllm_ascend_kvext.patches.lmcache import metrics
from vllm_ascend_kvext.patches.lmcache.factory import NAME, get_connector_class
from vllm_ascend_kvext.patches.lmcache.metrics import (
    LMCachePromMetrics,
    LMCacheStats,
    ask_for_reports,
    report_stores,
)

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
LOOKUPS = "lookup_duration_seconds"
KINDS = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}


@dataclass
class Config:
    """The part of a ``VllmConfig`` that metrics read."""

    kv_transfer_config: None = None


@dataclass
class Connector:
    """LMCache's, of either side: it has observed how long lookups took."""

    theirs: KVConnectorStats | None = None

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        theirs, self.theirs = self.theirs, None
        return theirs


@dataclass
class Theirs:
    """LMCache's metrics."""

    observed: list[tuple[dict[str, Any], int]] = field(default_factory=list)

    def observe(self, data: dict[str, Any], engine_idx: int) -> None:
        self.observed.append((data, engine_idx))


@pytest.fixture(autouse=True)
def registry() -> Iterator[None]:
    unregister_vllm_metrics()
    yield
    unregister_vllm_metrics()


def counted(**tokens: int) -> dict[str, int]:
    return {f"kvext_stored_tokens.{outcome}": number for outcome, number in tokens.items()}


def checks_with(kept_tokens: int, lost_tokens: int) -> StoreChecks:
    checks = StoreChecks(lambda stored: 0, "tcp://host:1")
    checks._counts |= {KEPT: kept_tokens, LOST: lost_tokens}
    return checks


def test_the_scheduler_reports_what_was_counted_once_beside_what_lmcache_observed() -> None:
    connector: Any = Connector(KVConnectorStats(data={LOOKUPS: [0.5]}))
    report_stores(connector, checks_with(512, 256))
    stats = connector.get_kv_connector_stats()
    assert stats.data == {LOOKUPS: [0.5]} | counted(kept=512, lost=256)
    assert connector.get_kv_connector_stats().data == {}


def test_reports_are_of_one_class_where_nothing_is_counted() -> None:
    """MultiConnector does not add up others."""
    connector: Any = Connector()
    report_stores(connector, None)
    assert type(connector.get_kv_connector_stats()) is LMCacheStats


def test_a_worker_lets_the_scheduler_be_asked_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connector: Any = Connector()
    ask_for_reports(connector)
    first = connector.get_kv_connector_stats()
    assert first
    assert first.is_empty()
    assert connector.get_kv_connector_stats() is None
    monkeypatch.setattr(metrics, "_REPORT_EVERY_S", 0.0)
    assert connector.get_kv_connector_stats()


def test_reports_add_up_and_survive_a_journey() -> None:
    stats = pickle.loads(pickle.dumps(LMCacheStats({LOOKUPS: [0.5]} | counted(lost=256))))
    merged = stats.aggregate(LMCacheStats({LOOKUPS: [1.5]} | counted(lost=256, kept=512)))
    assert merged is stats
    assert merged.data == {LOOKUPS: [0.5, 1.5]} | counted(lost=512, kept=512)
    merged.reset()
    assert merged.is_empty()


def test_a_line_of_the_log_names_what_was_lost() -> None:
    line = LMCacheStats(counted(kept=512, lost=256, unchecked=128)).reduce()
    assert set(line.values()) == {256, 128}
    assert any("lost" in name for name in line)


def test_children_of_multi_connector_are_rebuilt_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    class LMCacheMPConnector:
        pass

    from vllm.distributed.kv_transfer.kv_connector.v1 import multi_connector

    found = get_connector_class(lambda: LMCacheMPConnector, object)
    monkeypatch.setattr(
        multi_connector.KVConnectorFactory, "get_connector_class_by_name", lambda name: found
    )
    sent = {NAME: {"data": counted(lost=256)}}
    rebuilt = MultiConnector.build_kv_connector_stats(sent)
    assert rebuilt.data[NAME].data == counted(lost=256)


def test_prometheus_has_a_counter_for_each_outcome_of_each_engine() -> None:
    theirs = Theirs()
    metrics = LMCachePromMetrics(theirs, Config(), KINDS, LABELS, ENGINES)

    def value(outcome: str, engine: str) -> float | None:
        labels = {"model_name": "model", "engine": engine, "outcome": outcome}
        return REGISTRY.get_sample_value("vllm:kvext_lmcache_stored_tokens_total", labels)

    assert [value(outcome, "1") for outcome in ("kept", "lost", "unchecked")] == [0, 0, 0]
    data = {LOOKUPS: [0.5]} | counted(lost=256)
    metrics.observe(data, 1)
    metrics.observe(data, 1)
    assert value("lost", "1") == 512
    assert value("lost", "0") == value("kept", "1") == 0
    assert theirs.observed == [(data, 1)] * 2


def test_lmcache_need_not_make_metrics() -> None:
    LMCachePromMetrics(None, Config(), KINDS, LABELS, ENGINES).observe(counted(lost=256))
