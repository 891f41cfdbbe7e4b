# SPDX-License-Identifier: Apache-2.0
"""``examples/grafana.json``: Grafana knows every field, and a server has all that it asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import connector_models
import pytest
from http_served import serving

BOARD = Path(__file__).parents[2] / "examples" / "grafana.json"
CONNECTOR = {
    "kv_connector": "KvextConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"host_memory_gib": 0.1, "blending": True},
}
ARGUMENTS = (
    *("--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--block-size", "16"),
    *("--max-model-len", "1024", "--enable-prefix-caching"),
    *("--no-disable-hybrid-kv-cache-manager", "--kv-transfer-config", json.dumps(CONNECTOR)),
)
SELECTOR = re.compile(r"(vllm:\w+)\{([^}]*)\}")
LABEL = re.compile(r'(\w+)=~?"([^"]*)"')


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def expressions(board: dict[str, Any]) -> Iterator[str]:
    """What the board asks Prometheus: of every panel, and of every variable."""
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            yield target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["query"]["query"]


def unknown_to_schema(given: Any, understood: Any, path: str = "board") -> Iterator[str]:
    """Where Grafana's classes, having read ``given``, have something else or nothing."""
    if isinstance(given, dict) and isinstance(understood, dict):
        for key, value in given.items():
            yield from unknown_to_schema(value, understood.get(key), f"{path}.{key}")
    elif isinstance(given, list) and isinstance(understood, list):
        if len(given) != len(understood):
            yield path
        for index, (mine, theirs) in enumerate(zip(given, understood, strict=False)):
            yield from unknown_to_schema(mine, theirs, f"{path}[{index}]")
    elif given != understood:
        yield path


def test_grafanas_schema_knows_every_field_of_the_board(board: dict[str, Any]) -> None:
    pytest.importorskip("grafana_foundation_sdk", reason="it needs Python 3.11")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    understood = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert [*unknown_to_schema(board, understood)] == []


def test_no_two_panels_overlap(board: dict[str, Any]) -> None:
    cells: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        place = panel["gridPos"]
        mine = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & mine, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine


def test_every_label_in_a_legend_is_one_that_its_query_keeps(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], panel["title"]


def test_a_server_has_every_metric_and_label_of_the_board(
    board: dict[str, Any], tmp_path: Path
) -> None:
    connector_models.write_one_window(tmp_path)
    environ = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
    with serving(tmp_path, ARGUMENTS, environ, tmp_path / "log") as client:
        client.ask("a prompt", [[5] * 200])
        served = client._get("/metrics")
    labels_by_metric: dict[str, list[dict[str, str]]] = {}
    for name, labels in SELECTOR.findall(served):
        labels_by_metric.setdefault(name, []).append(dict(LABEL.findall(labels)))
    for expression in expressions(board):
        for name, labels in SELECTOR.findall(expression):
            series = labels_by_metric.get(name, [])
            assert series, f"{name} is not at /metrics"
            wanted = dict(LABEL.findall(labels))
            assert wanted.keys() <= series[0].keys(), (name, wanted)
            constant = {label: value for label, value in wanted.items() if "$" not in value}
            assert any(constant.items() <= one.items() for one in series), (name, constant)
