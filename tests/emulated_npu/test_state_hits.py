# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prompts with the same beginnings get the answers of no prefix caching, on every scheduler.

If a model has states and a KV connector is used, some schedulers of vLLM-Ascend take hits without a
state. A test named ``test_stock_...`` shows it. ``KVEXT_CASES=all`` sends 200 prompts and runs 20
seeds of late streams.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from emulated_plans import IS_0_23
from state_hits import WRONG
from support.sample import IS_LONG
from support.scenarios import processes

NUM_PROMPTS = 200 if IS_LONG else 12
NUM_SEEDS = 20 if IS_LONG else 5
REPAIR = "state-hits"
CONNECTORS = ("NullConnector", "KvextConnector")
BROKEN = "recompute" if IS_0_23 else "balance"
"""A scheduler that answers wrong without the repair."""
SCHEDULERS = {
    "balance": "BalanceScheduler",
    "recompute": "RecomputeScheduler",
    "load-balancing": "DyntraLBScheduler",
}
LINES = ("balance", "recompute") if IS_0_23 else tuple(SCHEDULERS)

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def report_of(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """Run a script of this folder on a model with states, and return its report."""

    def report_of(script: str, *options: str, disabled: str = "") -> dict[str, Any]:
        report = tmp_path_factory.mktemp("report") / "report.json"
        ended = processes.run(
            Path(__file__).with_name(script),
            [str(report), str(folder_of("states")), *options],
            {"VLLM_ASCEND_KVEXT_DISABLE": disabled} if disabled else {},
            processes.NPU,
        )
        assert not ended.exit_code, ended.log[-6000:]
        found: dict[str, Any] = json.loads(report.read_text())
        return found

    return report_of


@pytest.fixture(scope="module")
def run(report_of: Callable[..., dict[str, Any]]) -> Run:
    """Answers of an engine, by scheduler and connector."""

    @cache
    def run(line: str, connector: str, disabled: str = "", at_once: int = 1) -> dict[str, Any]:
        options = ("--connector", connector, "--prompts", str(NUM_PROMPTS))
        at_once_too = ("--at-once", str(at_once))
        return report_of("state_hits.py", line, *options, *at_once_too, disabled=disabled)

    return run


@pytest.mark.parametrize("connector", CONNECTORS)
def test_stock_answers_with_states_that_were_never_computed(run: Run, connector: str) -> None:
    found = run(BROKEN, connector, disabled=REPAIR)
    assert found["wrong"] > 0
    hits = [hit > 0 for hit in found["hit_tokens"]]
    assert all(hit for hit, error in zip(hits, found["errors"], strict=True) if error > WRONG)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_answers_are_those_without_prefix_caching(run: Run, line: str, connector: str) -> None:
    found = run(line, connector, at_once=1 if line == BROKEN else 4)
    assert SCHEDULERS[line] in found["schedulers"]
    assert max(found["errors"]) < WRONG


@pytest.mark.skipif(
    IS_0_23, reason="its scheduler is for decode nodes, which split prompts otherwise"
)
def test_the_repair_hits_what_vllms_own_scheduler_hits(run: Run) -> None:
    found = run(BROKEN, "NullConnector")
    own = run("vLLM's", "NullConnector")
    assert sum(found["hit_tokens"]) > 0
    assert found["hit_tokens"] == own["hit_tokens"]


@pytest.mark.skipif(IS_0_23, reason="its balance scheduler takes what all groups hit")
@pytest.mark.parametrize("disabled", ["", REPAIR])
def test_late_streams_change_no_answer_of_the_balance_scheduler(
    report_of: Callable[..., dict[str, Any]], disabled: str
) -> None:
    """Without the repair they do: see ``late_streams.py``."""
    options = ("--kind", "balanced states", "--seeds", str(NUM_SEEDS))
    assert bool(report_of("late_streams.py", *options, disabled=disabled)["failed"]) is bool(
        disabled
    )
