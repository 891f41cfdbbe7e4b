# SPDX-License-Identifier: Apache-2.0
"""Reports of the connector, on the way that vLLM sends them and in its own loggers. No engine."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorLogging,
    KVConnectorProm,
)
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics import ray_wrappers
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ascend_kvext.connector.counters import METRICS, ConnectorCounters
from vllm_ascend_kvext.connector.messages import Traffic
from vllm_ascend_kvext.connector.stats import KvextPromMetrics, KvextStats
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.lookup import Shortfall

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
HELD = {"host_entries": 4, "host_bytes": 400, "host_capacity_bytes": 1000}


class Connector:
    """The part of a connector class that the loggers ask."""

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvextStats:
        return KvextStats(data)

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> KvextPromMetrics:
        return KvextPromMetrics(*arguments)


@dataclass
class Config:
    """The part of a ``VllmConfig`` that the loggers read."""

    kv_transfer_config: KVTransferConfig = field(
        default_factory=lambda: KVTransferConfig(kv_connector="Connector", kv_role="kv_both")
    )


@pytest.fixture(autouse=True)
def connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: Connector)


@pytest.fixture
def prom() -> Iterator[KVConnectorProm]:
    """As ``PrometheusStatLogger`` makes it."""
    unregister_vllm_metrics()
    yield KVConnectorProm(Config(), LABELS, ENGINES)
    unregister_vllm_metrics()


def busy_counters() -> ConnectorCounters:
    counters = ConnectorCounters(capacity_bytes=1000)
    counters.tier.entries_held, counters.tier.bytes_held = 4, 400
    counters.hit_tokens = 256
    counters.tier.shortfalls[Shortfall.NO_TAIL] = 2
    counters.tier.removed_entries[Removal.EVICTED] = 3
    counters.add_traffic({"store": Traffic(6_000_000_000, 1.5, 3)})
    return counters


def sample(name: str, engine: int = 0, **labels: str) -> float | None:
    """What Prometheus shows; None if there is no such metric."""
    labels |= {"model_name": "model", "engine": str(engine)}
    return REGISTRY.get_sample_value(f"vllm:kvext_{name}", labels)


# On the way.


def test_even_without_anything_it_is_true() -> None:
    # The scheduler leaves its own report out unless the workers' is true.
    assert KvextStats()
    assert KvextStats().is_empty()


@pytest.mark.parametrize("send", [pickle.dumps, MsgpackEncoder().encode], ids=["pickle", "msgpack"])
def test_a_report_survives_the_way(send: Any) -> None:
    report = busy_counters().take()
    stats = KvextStats(report)
    if send is pickle.dumps:
        received = pickle.loads(send(stats))
    else:
        sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.data))
        decoded = MsgpackDecoder(EngineCoreOutputs).decode(send(sent))
        received = Connector.build_kv_connector_stats(decoded.scheduler_stats.kv_connector_stats)
    assert type(received) is KvextStats
    assert received.data == report


def test_in_a_multi_connector_a_report_survives_the_way() -> None:
    report = busy_counters().take()
    sent = SchedulerStats(kv_connector_stats={"Connector": KvextStats(report)})
    decoded = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert decoded.kv_connector_stats == {"Connector": {"data": report}}


def test_reports_of_workers_are_joined_by_that_of_the_scheduler_side() -> None:
    of_workers = KvextStats().aggregate(KvextStats())
    report = busy_counters().take()
    joined = of_workers.aggregate(KvextStats(report))
    assert joined is of_workers
    assert joined.data == report


def test_a_later_report_adds_to_counters_and_replaces_gauges() -> None:
    first = KvextStats({"host_hit_tokens": 5, "host_entries": 9})
    later = KvextStats({"host_hit_tokens": 2, "host_hit_requests": 1, "host_entries": 4})
    assert first.aggregate(later).data == {
        "host_hit_tokens": 7,
        "host_hit_requests": 1,
        "host_entries": 4,
    }
    assert later.data == {"host_hit_tokens": 2, "host_hit_requests": 1, "host_entries": 4}


def test_adding_leaves_the_data_that_others_read() -> None:
    data = {"host_hit_tokens": 5}
    KvextStats(data).aggregate(KvextStats({"host_hit_tokens": 2}))
    assert data == {"host_hit_tokens": 5}


def test_what_gauges_say_is_nothing_that_happened() -> None:
    assert KvextStats(HELD).is_empty()
    assert not KvextStats({**HELD, "host_hit_tokens": 1}).is_empty()


def test_reset() -> None:
    stats = KvextStats(busy_counters().take())
    stats.reset()
    assert stats.data == {}
    assert stats.is_empty()


# In the log.


def test_the_log_line_says_what_moved_how_fast_and_what_was_missing() -> None:
    counters = busy_counters()
    counters.add_traffic({"load": Traffic(500_000_000, 0.25, 1)})
    counters.tier.failed_loads = 1
    counters.too_dear_loads = 7
    assert KvextStats(counters.take()).reduce() == {
        "stored GB": 6.0,
        "store GB/s per worker": 4.0,
        "loaded GB": 0.5,
        "load GB/s per worker": 2.0,
        "failed loads": 1,
        "hit tokens": 256,
        "held GB per worker": 0.0,
        "too dear loads": 7,
        "requests short: no tail": 2,
    }


def test_a_quiet_log_line_is_short() -> None:
    assert KvextStats({"host_hit_tokens": 1, "host_bytes": 2_000_000_000}).reduce() == {
        "stored GB": 0.0,
        "loaded GB": 0.0,
        "hit tokens": 1,
        "held GB per worker": 2.0,
    }


def test_vllm_logs_what_happened_since_its_last_line_and_nothing_if_nothing_did() -> None:
    logging = KVConnectorLogging(Config().kv_transfer_config)
    lines: list[str] = []
    counters = busy_counters()
    logging.observe(counters.take())
    counters.hit_tokens += 100
    logging.observe(counters.take())
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1
    assert "stored GB=6.0" in lines[0]
    assert "hit tokens=356" in lines[0]

    counters.tier.entries_held += 1
    logging.observe(counters.take())
    logging.log(lambda text, *values: lines.append(text % values))
    assert len(lines) == 1


# In Prometheus.


def test_counters_add_up_and_gauges_are_set(prom: KVConnectorProm) -> None:
    counters = busy_counters()
    prom.observe(counters.take())
    counters.hit_tokens += 44
    counters.tier.entries_held = 1
    prom.observe(counters.take())
    assert sample("host_hit_tokens_total") == 300
    assert sample("host_shortfalls_total", reason="no_tail") == 2
    assert sample("host_shortfalls_total", reason="evicted") == 0
    assert sample("host_removed_entries_total", reason="evicted") == 3
    assert sample("transfer_bytes_total", direction="store") == 6_000_000_000
    assert sample("transfer_seconds_total", direction="store") == 1.5
    assert sample("host_entries") == 1
    assert sample("host_bytes") == 400
    assert sample("host_capacity_bytes") == 1000


def test_engines_are_told_apart(prom: KVConnectorProm) -> None:
    prom.observe({"host_hit_tokens": 5, "host_entries": 2}, 0)
    prom.observe({"host_hit_tokens": 7, "host_entries": 3}, 1)
    assert [sample("host_hit_tokens_total", engine) for engine in ENGINES] == [5, 7]
    assert [sample("host_entries", engine) for engine in ENGINES] == [2, 3]


def test_every_metric_is_there_from_the_start(prom: KVConnectorProm) -> None:
    for metric in METRICS:
        suffix = "" if metric.is_gauge else "_total"
        for value in metric.label_values or (None,):
            labels = {metric.label: value} if metric.label and value else {}
            assert sample(metric.name + suffix, **labels) == 0, metric.name


def test_what_another_release_counts_is_left_out(prom: KVConnectorProm) -> None:
    prom.observe({"host_hit_tokens": 5, "host_sunspots": 1})
    assert sample("host_hit_tokens_total") == 5


def test_names_are_registered_once_and_gauges_of_several_processes_are_the_latest() -> None:
    registered: list[tuple[str, str | None]] = []

    def recording(metric_class: Any) -> Any:
        def build(name: str, **arguments: Any) -> Any:
            registered.append((name, arguments.get("multiprocess_mode")))
            return metric_class(name, **arguments, registry=None)

        return build

    types = {each: recording(each) for each in (Counter, Gauge, Histogram)}
    KvextPromMetrics(Config(), types, LABELS, ENGINES)
    assert registered == [
        (f"vllm:kvext_{metric.name}", "mostrecent" if metric.is_gauge else None)
        for metric in METRICS
    ]
    assert len(registered) == len(set(registered))


@dataclass
class RayMetric:
    """What vLLM uses of one of Ray's metrics."""

    name: str
    description: str
    tag_keys: tuple[str, ...]
    default_tags: dict[str, str] = field(default_factory=dict)
    values: dict[tuple[str, ...], float] = field(default_factory=dict)

    @property
    def _tag_keys(self) -> tuple[str, ...]:
        return self.tag_keys

    def set_default_tags(self, tags: dict[str, str]) -> None:
        self.default_tags = dict(tags)

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None:
        key = self._key(tags)
        self.values[key] = self.values.get(key, 0) + value

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        self.values[self._key(tags)] = value

    def _key(self, tags: dict[str, str] | None) -> tuple[str, ...]:
        tags = self.default_tags | (tags or {})
        return tuple(tags[key] for key in self.tag_keys if key != "ReplicaId")


def test_ray_keeps_labels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    made: dict[str, RayMetric] = {}

    class Ray:
        """``ray.util.metrics``."""

        @staticmethod
        def Counter(name: str, **arguments: Any) -> RayMetric:  # noqa: N802
            return made.setdefault(name, RayMetric(name, **arguments))

        Gauge = Counter

    monkeypatch.setattr(ray_wrappers, "ray_metrics", Ray)
    prom = ray_wrappers.RayKVConnectorProm(Config(), LABELS, ENGINES)
    for engine in ENGINES:
        prom.observe(
            {
                "transfer_bytes.store": 10 + engine,
                "transfer_bytes.load": 20 + engine,
                "host_entries": 30 + engine,
            },
            engine,
        )
    assert made["vllm_kvext_transfer_bytes"].values == {
        ("model", "0", "store"): 10,
        ("model", "0", "load"): 20,
        ("model", "1", "store"): 11,
        ("model", "1", "load"): 21,
    }
    assert made["vllm_kvext_host_entries"].values == {("model", "0"): 30, ("model", "1"): 31}
