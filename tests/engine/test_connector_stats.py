# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Reports of the connector: how vLLM sends them, and what its loggers show. No engine runs."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from prometheus_client import REGISTRY
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

from vllm_ascend_kvext.connector.common.counters import METRICS, ConnectorCounters
from vllm_ascend_kvext.connector.common.messages import Traffic
from vllm_ascend_kvext.connector.common.stats import KvextStats
from vllm_ascend_kvext.connector.kvext_connector import KvextConnector
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.lookup import Shortfall

LABELS = ["model_name", "engine"]
ENGINES: dict[int, list[object]] = {0: ["model", "0"], 1: ["model", "1"]}
HELD = {"host_entries": 4, "host_bytes": 400, "host_capacity_bytes": 1000}


CONFIG = SimpleNamespace(
    kv_transfer_config=KVTransferConfig(kv_connector="KvextConnector", kv_role="kv_both")
)
"""The part of a ``VllmConfig`` that the loggers read."""


@pytest.fixture(autouse=True)
def connector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(KVConnectorFactory, "get_connector_class", lambda config: KvextConnector)


@pytest.fixture
def prom() -> Iterator[KVConnectorProm]:
    """A connector's metrics, as ``PrometheusStatLogger`` makes them."""
    unregister_vllm_metrics()
    yield KVConnectorProm(CONFIG, LABELS, ENGINES)
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
    """The value that Prometheus shows; None if there is no such metric."""
    labels |= {"model_name": "model", "engine": str(engine)}
    return REGISTRY.get_sample_value(f"vllm:kvext_{name}", labels)


# The way of a report.


@pytest.mark.parametrize("send", [pickle.dumps, MsgpackEncoder().encode], ids=["pickle", "msgpack"])
def test_a_report_survives_the_way(send: Any) -> None:
    report = busy_counters().take()
    stats = KvextStats(report)
    if send is pickle.dumps:
        received = pickle.loads(send(stats))
    else:
        sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(kv_connector_stats=stats.data))
        decoded = MsgpackDecoder(EngineCoreOutputs).decode(send(sent))
        received = KvextConnector.build_kv_connector_stats(
            decoded.scheduler_stats.kv_connector_stats
        )
    assert type(received) is KvextStats
    assert received.data == report


def test_in_a_multi_connector_a_report_survives_the_way() -> None:
    report = busy_counters().take()
    sent = SchedulerStats(kv_connector_stats={"KvextConnector": KvextStats(report)})
    decoded = MsgpackDecoder(SchedulerStats).decode(MsgpackEncoder().encode(sent))
    assert decoded.kv_connector_stats == {"KvextConnector": {"data": report}}


def test_a_later_report_is_added_and_leaves_the_data_that_others_read() -> None:
    """The scheduler side's report is added to the workers' reports, which are empty."""
    report = busy_counters().take()
    of_workers = KvextStats()
    joined = of_workers.aggregate(KvextStats(report))
    assert joined is of_workers and joined.data == report
    joined.aggregate(KvextStats({"host_hit_tokens": 2, "host_entries": 1}))
    assert joined.data == report | {"host_hit_tokens": 258, "host_entries": 1}
    assert report["host_hit_tokens"] == 256


def test_what_gauges_say_is_nothing_that_happened() -> None:
    assert KvextStats(), "the scheduler adds its own report only if the workers' report is truthy"
    assert KvextStats().is_empty()
    assert KvextStats(HELD).is_empty()
    assert not KvextStats({**HELD, "host_hit_tokens": 1}).is_empty()


# The log.


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


def test_vllm_logs_what_happened_since_its_last_line_and_nothing_if_nothing_did() -> None:
    logging = KVConnectorLogging(CONFIG.kv_transfer_config)
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


# Prometheus.


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
    assert sample("host_hit_tokens_total", engine=1) == sample("host_bytes", engine=1) == 0


def test_every_metric_is_there_from_the_start(prom: KVConnectorProm) -> None:
    for metric in METRICS:
        suffix = "" if metric.is_gauge else "_total"
        for value in metric.label_values or (None,):
            labels = {metric.label: value} if metric.label and value else {}
            assert sample(metric.name + suffix, **labels) == 0, metric.name


def test_what_another_release_counts_is_left_out(prom: KVConnectorProm) -> None:
    prom.observe({"host_hit_tokens": 5, "host_sunspots": 1})
    assert sample("host_hit_tokens_total") == 5


def test_ray_keeps_labels_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[tuple[str, ...], float] = {}

    def metric(name: str, description: str, tag_keys: tuple[str, ...]) -> Any:
        """The part of one of Ray's metrics that vLLM uses."""
        made = Mock(_tag_keys=tag_keys)

        def change(value: float, tags: dict[str, str] | None = None) -> None:
            tags = (made.set_default_tags.call_args or [[{}]])[0][0] | (tags or {})
            key = name, *(tags[each] for each in tag_keys if each != "ReplicaId")
            values[key] = values.get(key, 0) + value

        made.inc = made.set = change
        return made

    ray = SimpleNamespace(Counter=metric, Gauge=metric)
    monkeypatch.setattr(ray_wrappers, "ray_metrics", ray)
    prom = ray_wrappers.RayKVConnectorProm(CONFIG, LABELS, ENGINES)
    for engine in ENGINES:
        prom.observe(
            {
                "transfer_bytes.store": 10 + engine,
                "transfer_bytes.load": 20 + engine,
                "host_entries": 30 + engine,
            },
            engine,
        )
    assert {key: value for key, value in values.items() if value} == {
        ("vllm_kvext_transfer_bytes", "model", "0", "store"): 10,
        ("vllm_kvext_transfer_bytes", "model", "0", "load"): 20,
        ("vllm_kvext_transfer_bytes", "model", "1", "store"): 11,
        ("vllm_kvext_transfer_bytes", "model", "1", "load"): 21,
        ("vllm_kvext_host_entries", "model", "0"): 30,
        ("vllm_kvext_host_entries", "model", "1"): 31,
    }
