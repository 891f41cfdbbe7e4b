# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention beside ``--prefix-match-unit`` on the real engine: hits inside blocks change no answer.

The model is Qwen3-Next, whose states are those of gated delta rules, with and without drafts of its
own layer. Answers are compared with those of an engine without the plugin, prefix caching and
drafts. Wrong states are seen. ``KVEXT_RUNNER=v2`` chooses vLLM's V2 model runner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import ADAPTIVE, NO_PREFIX_CACHING, PLUGIN_OFF, LazyReports, Plan
from support.scenarios.states import MTP, NO_DRAFTS, RUNNER_ENVIRON, plan
from support.states import state_models

pytestmark = [pytest.mark.timeout(1200), pytest.mark.vllm(">=0.30")]

MODEL = "qwen3-next, two layers per group"
BLOCK_TOKENS = 64
UNIT_TOKENS = 16
ENGINE = {"block_size": BLOCK_TOKENS, "prefix_match_unit": UNIT_TOKENS}
CONTROLS = ("zeroed states", "foreign states")
HOST_CONTROLS = ("zeroed states, host", "foreign states, host", "loads of nothing")
VISIBLE = 100 * LOGPROB_TOLERANCE
SIBLINGS = ("siblings", "siblings at once", "siblings again", "turns of siblings")


class Cell(NamedTuple):
    """An engine: where drafts come from, the order of steps, and what this package does."""

    drafts: str
    is_async: bool
    kind: str

    @property
    def name(self) -> str:
        order = "asynchronous" if self.is_async else "synchronous"
        return f"{self.drafts or 'no'} drafts, {order}, {self.kind}"


KINDS: dict[str, Mapping[str, str]] = {
    "upstream's retention": {},
    "adaptive": ADAPTIVE,
    "interval": {"VLLM_PREFIX_CACHE_RETENTION_INTERVAL": "0"},
    "both": ADAPTIVE,
}
AS_SERVED = Cell(MTP, True, "both")
ALL = [
    Cell(drafts, order, kind) for drafts in ("", MTP) for order in (False, True) for kind in KINDS
]
CELLS = {cell.name: cell for cell in (ALL if IS_LONG else [AS_SERVED])}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    @cache
    def folder_of(has_drafts: bool) -> Path:
        return state_models.write(tmp_path_factory.mktemp("model"), MODEL, has_drafts)

    def plan_of(cell: Cell, drafts: str, **engine: Any) -> Plan:
        made = plan(
            lambda: folder_of(bool(cell.drafts)),
            ["sightings", "siblings", "controls"],
            drafts,
            cell.is_async,
            BLOCK_TOKENS,
            **engine,
        )
        options = {**made.options, "match_unit_tokens": UNIT_TOKENS}
        return Plan(made.model, made.scenarios, "states", made.engine, options)

    references = {
        f"reference, {drafts}": plan_of(Cell(drafts, False, ""), NO_DRAFTS, **NO_PREFIX_CACHING)
        for drafts in {cell.drafts for cell in CELLS.values()}
    }
    started = [(PLUGIN_OFF | RUNNER_ENVIRON, references)]
    for kind, environ in KINDS.items():
        connector = processes.connector(chunk_tokens=2 * BLOCK_TOKENS) if kind == "both" else {}
        plans = {
            name: plan_of(cell, cell.drafts, **ENGINE, **connector)
            for name, cell in CELLS.items()
            if cell.kind == kind
        }
        if plans:
            started.append(({**environ, **RUNNER_ENVIRON}, plans))
    return LazyReports(tmp_path_factory, started)


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> Cell:
    return CELLS[request.param]


def test_hits_change_no_answer(
    cell: Cell, reports: LazyReports, record_property: Callable[[str, Any], None]
) -> None:
    served: Served = reports[cell.name]
    right = [label for label in served.labels if label.startswith("before")]
    right += [label for label in served.labels if "states" not in label and "loads" not in label]
    reference = reports[f"reference, {cell.drafts}"]
    largest = served.check_equal(reference, dict.fromkeys(right))
    record_property("largest error", largest)
    hits = [answer.hit_tokens for label in right for answer in served.answers(label)]
    num_inside = sum(tokens % BLOCK_TOKENS > 0 for tokens in hits)
    print(f"\nlargest error {largest:.1e}, {sum(hits)} tokens hit, {num_inside} hits inside blocks")
    if cell.kind != "upstream's retention":
        assert num_inside > 10
    served.check_nothing_is_left()


def test_wrong_states_show(cell: Cell, reports: LazyReports) -> None:
    served = reports[cell.name]
    labels = (*CONTROLS, *HOST_CONTROLS) if cell.kind == "both" else CONTROLS
    reference = reports[f"reference, {cell.drafts}"]
    errors = {label: served.logprob_error(label, reference) for label in labels}
    print(f"\n{errors}")
    assert min(errors.values()) > VISIBLE


@pytest.mark.skipif(not IS_LONG, reason="only `make test-long` starts the other engines")
@pytest.mark.parametrize("drafts", [NO_DRAFTS, MTP])
def test_retention_hits_more_than_upstreams(drafts: str, reports: LazyReports) -> None:
    own, upstreams = (
        reports[Cell(drafts, False, kind).name] for kind in ("adaptive", "upstream's retention")
    )
    for label in ("device", "next turn", *SIBLINGS):
        hits = [
            sum(answer.hit_tokens for answer in each.answers(label)) for each in (own, upstreams)
        ]
        print(f"\n{label}: {hits[0]} tokens hit, with vLLM's retention {hits[1]}")
        assert hits[0] >= hits[1], label
