# SPDX-License-Identifier: Apache-2.0
"""What ``status --holes`` says without an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from vllm_ascend_kvext.commands.hole_reasons import REFUSALS_METRIC, describe_holes
from vllm_ascend_kvext.compat import Upstream
from vllm_ascend_kvext.features import CONNECTOR
from vllm_ascend_kvext.holes.eligibility import EngineRefusal, HoleRefusal
from vllm_ascend_kvext.settings import Mode, Settings

UPSTREAM = Upstream("0.23.0")
DOCS = Path(__file__).parents[2] / "docs"


def test_every_reason_is_there_and_says_where_an_engine_tells_it() -> None:
    said_by = {row.what: row.said_by for row in describe_holes(Settings(), UPSTREAM)}
    for of_request in HoleRefusal:
        metric = f'{REFUSALS_METRIC}{{reason="{of_request.value}"}}'
        assert said_by[f"request: {of_request.value}"] == metric
    for of_engine in EngineRefusal:
        assert said_by[f"engine: {of_engine.value}"] == "log: hole_reuse is off"


def test_schedulers_of_vllm_ascend_are_those_of_the_docs() -> None:
    rows = describe_holes(Settings(), Upstream("0.23.0", "0.23.0"))
    schedulers = [row for row in rows if row.what.startswith("scheduler")]
    assert len(schedulers) == 5
    page = (DOCS / "tested_on_ascend.md").read_text()
    for row in schedulers[1:]:
        assert f"| {row.what.split()[1]}" in page
        assert row.reason in page.replace("`", "")
    assert [row for row in rows if row not in schedulers] == [
        row for row in describe_holes(Settings(), UPSTREAM) if row not in schedulers
    ]


@pytest.mark.parametrize(
    "settings", [Settings(mode=Mode.OFF), Settings(disabled=frozenset({CONNECTOR.name}))]
)
def test_without_the_connector_there_is_nothing_to_say(settings: Settings) -> None:
    assert describe_holes(settings, UPSTREAM) == []


def test_a_setting_that_is_off_is_all_there_is_to_say() -> None:
    (row,) = describe_holes(Settings(reuses_holes=False), UPSTREAM)
    assert (row.what, row.holes) == ("setting", "not computed")
