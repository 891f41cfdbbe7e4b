# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A step that decodes waits for no store: neither the model's thread nor a stream of the model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from decoding_beside_stores import DECODED_TOKENS
from support.scenarios import processes
from support.scenarios.answers import NPU_TOLERANCE

Runs = list[dict[str, Any]]


@pytest.fixture(scope="module")
def report(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("report") / "report.json"
    script = Path(__file__).with_name("decoding_beside_stores.py")
    arguments = [str(path), str(folder_of("one window"))]
    ended = processes.run(script, arguments, {}, processes.NPU)
    assert not ended.exit_code, ended.log[-6000:]
    return json.loads(path.read_text())


def test_a_request_decodes_while_no_store_goes_on(report: dict[str, Runs]) -> None:
    assert len(report["as it is"]) == 8
    for run in report["as it is"]:
        assert run["stores under way"] > 0
        assert run["tokens"] == DECODED_TOKENS
        assert run["difference"] <= NPU_TOLERANCE
        assert run["waits for the thread"] == run["waits of streams"] == 0


def test_some_runs_have_copies_in_flight(report: dict[str, Runs]) -> None:
    enqueued = [run["copies enqueued"] > 0 for run in report["as it is"]]
    assert enqueued == [False, True] * 4


def test_steps_that_wait_for_stores_are_seen(report: dict[str, Runs]) -> None:
    assert all(run["waits for the thread"] > 0 for run in report["steps wait for stores"])


def test_streams_that_wait_for_copies_are_seen(report: dict[str, Runs]) -> None:
    assert all(run["waits of streams"] > 0 for run in report["streams wait for copies"])
