# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""``examples/grafana.json``: Grafana knows every field, and queries have their legends' labels.

`test_connector_serve` shows that a server has the metrics that the board asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

BOARD = Path(__file__).parents[2] / "examples" / "grafana.json"


@pytest.fixture(scope="module")
def board() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(BOARD.read_text())
    return loaded


def unknown_to_schema(given: Any, understood: Any, path: str = "board") -> Iterator[str]:
    """The paths at which Grafana's classes lose or change a value of ``given``."""
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
        columns = range(place["x"], place["x"] + place["w"])
        mine = {*product(columns, range(place["y"], place["y"] + place["h"]))}
        assert not cells & mine, panel["title"]
        assert place["x"] + place["w"] <= 24, panel["title"]
        cells |= mine


def test_every_label_in_a_legend_is_one_that_its_query_keeps(board: dict[str, Any]) -> None:
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], panel["title"]
