# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Metrics of retention: Prometheus and the log show what it counts, and only if it counts.

The engine-level tests run `support.scenarios.metrics`, in which each number is known.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from support.installed import apply_feature, revert_feature
from support.scenarios.processes import INTERVAL, Plan, serve
from support.scheduler.layouts import Attention, Group, Layout
from support.scheduler.options import EngineOptions, build_vllm_config
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.metrics import loggers
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

from vllm_ascend_kvext.patches.metrics.stats import attach_report, attached_report
from vllm_ascend_kvext.retention.stats import METRICS, LossCause, RetentionStats

PREFIX = "vllm:kvext_"
LAYOUT = Layout("1 full + 1 window", (Group(Attention.FULL, 16), Group(Attention.WINDOW, 16, 64)))


def samples(text: str) -> dict[str, dict[str, float]]:
    """The values of our metrics for each engine, by their keys in a report."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.startswith(PREFIX) or sample.name.endswith("_created"):
                continue
            assert set(sample.labels) <= {"model_name", "engine", "cause"}
            assert sample.labels["model_name"]
            name = sample.name.removeprefix(PREFIX)
            if family.type == "counter":
                assert name.endswith("_total")
                name = name.removesuffix("_total")
            key = ".".join([name, *filter(None, [sample.labels.get("cause")])])
            found.setdefault(sample.labels["engine"], {})[key] = sample.value
    return found


def test_metrics_and_log_say_what_retention_has_counted(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> None:
    """There is one engine process. The metrics could also be added up over several processes."""
    environ = {INTERVAL: "0", "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    plans = {"": Plan(tiny_model, ["chat"], "metrics")}
    served = serve(tmp_path_factory, plans, environ)[""]
    totals = served.report["totals"]
    assert len(set(totals.values())) > 1 and all(totals.values())
    assert samples(served.report["metrics"]) == {"0": totals}
    lines = re.findall(r"Engine 000: KV retention: (\d+) checkpoints kept", served.log)
    assert sum(map(int, lines)) == totals["checkpoints_kept"]


@pytest.fixture
def installed() -> Iterator[None]:
    applied = apply_feature("retention")
    yield
    if applied:
        revert_feature("retention")


@pytest.fixture
def vllm_config() -> Any:
    return build_vllm_config(LAYOUT, EngineOptions(num_blocks=8))


def encoded(report: dict[str, int] | None) -> Any:
    """Scheduler statistics as they leave an engine core."""
    stats = SchedulerStats(num_running_reqs=3)
    if report is not None:
        attach_report(stats, report)
    return MsgpackEncoder().encode(EngineCoreOutputs(scheduler_stats=stats))


def sent(report: dict[str, int] | None) -> SchedulerStats:
    """The same statistics, as they reach the engine core's client."""
    return MsgpackDecoder(EngineCoreOutputs).decode(encoded(report)).scheduler_stats


def counted(factor: int) -> dict[str, int]:
    return {key: factor * (i + 1) for i, key in enumerate(RetentionStats().totals())}


@pytest.mark.usefixtures("installed")
def test_a_report_arrives_and_its_absence_too():
    assert attached_report(sent(counted(1))) == counted(1)
    assert attached_report(sent(None)) is None
    assert sent(counted(1)) == sent(None), "the report has changed fields of upstream"


@pytest.mark.usefixtures("installed")
def test_every_engine_has_its_own_numbers_and_starts_at_zero(vllm_config):
    manager = loggers.StatLoggerManager(vllm_config, engine_idxs=[0, 1])
    zeros = dict.fromkeys(counted(1), 0)
    assert samples(generate_latest(REGISTRY).decode()) == {"0": zeros, "1": zeros}
    for engine_idx, factor in ((0, 1), (1, 100), (1, 1)):
        manager.record(sent(counted(factor)), None, engine_idx=engine_idx)
        manager.record(sent(None), None, engine_idx=engine_idx)
        manager.record(None, None, engine_idx=engine_idx)
    second = {key: value * 101 for key, value in counted(1).items()} | {"checkpoints": 1}
    assert samples(generate_latest(REGISTRY).decode()) == {"0": counted(1), "1": second}


@pytest.mark.usefixtures("installed")
@pytest.mark.vllm("<0.30")  # vLLM 0.30 records every step.
def test_what_upstream_does_not_record_is_recorded_once_with_the_next(vllm_config):
    processor = OutputProcessor(None, log_stats=True)
    manager = loggers.StatLoggerManager(vllm_config)
    reports = ({"junctions_hit": 1, "checkpoints": 5}, {"junctions_hit": 2}, None, None)
    for step, report in enumerate(reports):
        stats = sent(report)
        processor.update_scheduler_stats(stats)
        if step:
            manager.record(stats, None)
    seen = samples(generate_latest(REGISTRY).decode())["0"]
    assert (seen["junctions_hit"], seen["checkpoints"]) == (3, 5)


@pytest.mark.usefixtures("installed")
def test_unknown_numbers_are_left_alone(vllm_config):
    manager = loggers.StatLoggerManager(vllm_config)
    manager.record(sent({"of_another_release": 3, "junctions_hit": 1}), None)
    assert samples(generate_latest(REGISTRY).decode())["0"]["junctions_hit"] == 1


@pytest.mark.usefixtures("installed")
def test_one_line_for_all_engines_and_only_if_something_happened(vllm_config, mocker):
    info = mocker.spy(loggers.logger, "info")

    def lines() -> list[str]:
        texts = [call.args[0] % call.args[1:] for call in info.call_args_list]
        return [text for text in texts if "KV retention" in text]

    stat_logger = loggers.AggregatedLoggingStatLogger(vllm_config, [0, 1])
    for engine_idx in (0, 1):
        stat_logger.record(sent({"checkpoints_kept": 4}), None, engine_idx=engine_idx)
        stat_logger.record(sent({"checkpoints": 4}), None, engine_idx=engine_idx)
    stat_logger.log()
    (line,) = lines()
    assert line.startswith("2 Engines Aggregated: KV retention: 8 checkpoints kept, ")
    stat_logger.record(sent({"checkpoints": 4}), None)
    stat_logger.log()
    assert lines() == [line]


def test_metric_names_are_the_documented_ones():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for metric in METRICS:
        suffix = "" if metric.is_gauge else "_total"
        assert f"`{PREFIX}{metric.name}{suffix}" in page
    for cause in LossCause:
        assert f"`{cause.value}`" in page


RECEIVE_UNPATCHED = """
import sys
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.serial_utils import MsgpackDecoder

stats = MsgpackDecoder(EngineCoreOutputs).decode([bytes.fromhex(sys.argv[1])]).scheduler_stats
assert stats == SchedulerStats(num_running_reqs=3), stats
assert vars(stats).keys() == vars(SchedulerStats()).keys(), vars(stats)
"""


@pytest.mark.usefixtures("installed")
def test_a_process_without_the_patches_reads_what_it_always_has():
    (message,) = encoded({"checkpoints_kept": 4})
    assert b"checkpoints_kept" in message
    command = [sys.executable, "-I", "-c", RECEIVE_UNPATCHED, message.hex()]
    subprocess.run(command, check=True)
