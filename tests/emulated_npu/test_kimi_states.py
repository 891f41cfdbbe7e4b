# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A Kimi-K3 on the emulated NPU: hits of states of Kimi delta attention and of latents.

vLLM-Ascend 0.30.0rc2 serves the model through its own planner, in both runners. Answers are
compared with those of an engine without the plugin, prefix caching and drafts.
`support.scenarios.states` has the prompts. Stock mixes up latents and states: see
`support.states.latents_by_block`, which all other tests here install.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import kimi_model
import pytest
from emulated_plans import IS_0_23, RUNNERS, connector
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import WRONG, Served
from support.scenarios.processes import (
    ADAPTIVE,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)
from support.scenarios.states import MTP, NO_DRAFTS, plan

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.skipif(IS_0_23, reason="the release does not know the model"),
]

UNIT_TOKENS = 128
TOLERANCE = 3e-3
"""Largest difference of a log-probability. Rounding in float32 makes a tenth of it: residuals are
mixed by a softmax, which enlarges it."""
ENGINE = {"max_num_batched_tokens": 512, "num_gpu_blocks_override": 500}
CONTROLS = ("zeroed states", "foreign states")
HOST_CONTROLS = ("zeroed states, host", "foreign states, host", "loads of nothing")

CELLS: dict[str, tuple[str, bool, Mapping[str, str], Mapping[str, Any]]] = {
    "no drafts, asynchronous, both": (NO_DRAFTS, True, ADAPTIVE, connector()),
    "no drafts, synchronous, default": (NO_DRAFTS, False, {}, {}),
    "no drafts, synchronous, adaptive": (NO_DRAFTS, False, ADAPTIVE, {}),
    "no drafts, synchronous, connector": (NO_DRAFTS, False, {}, connector()),
    "MTP, asynchronous, default": (MTP, True, {}, {}),
    "MTP, asynchronous, adaptive": (MTP, True, ADAPTIVE, {}),
    "MTP, asynchronous, connector": (MTP, True, {}, connector()),
    "MTP, asynchronous, both": (MTP, True, ADAPTIVE, connector()),
    "MTP, synchronous, both": (MTP, False, ADAPTIVE, connector()),
}
"""Drafts, whether scheduling is asynchronous, the environment, and arguments, by name."""

STOCK = "stock"
NUM_SEEDS = 200 if IS_LONG else 20
"""Seeds of late streams."""


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    @cache
    def folder_of(has_drafts: bool) -> Path:
        folder = tmp_path_factory.mktemp("model")
        kimi_model.write(folder, has_drafts)
        return folder

    def of_model(weights: str, drafts: str, is_async: bool, **engine: Any) -> Plan:
        folder = folder_of(weights == MTP)
        if drafts:
            engine |= kimi_model.drafts(folder)
        made = plan(
            folder,
            ["sightings", "controls"],
            drafts,
            is_async,
            UNIT_TOKENS,
            **{**ENGINE, **engine},
        )
        return replace(made, options={**made.options, "has_latents_by_block": True})

    started = []
    for weights in (NO_DRAFTS, MTP):
        reference = of_model(weights, NO_DRAFTS, False, **NO_PREFIX_CACHING)
        started.append((PLUGIN_OFF, {reference_of(weights): reference}))
    for name, (drafts, is_async, environ, engine) in CELLS.items():
        of_cell = of_model(drafts, drafts, is_async, **engine)
        started.append((RUNNERS["V1"] | environ, {name: of_cell}))
    stock = of_model(NO_DRAFTS, NO_DRAFTS, False)
    stock = replace(stock, options={**stock.options, "has_latents_by_block": False})
    started.append((RUNNERS["V1"] | PLUGIN_OFF, {STOCK: stock}))
    return LazyReports(tmp_path_factory, started, NPU)


def reference_of(weights: str) -> str:
    return f"reference, {weights or 'no'} drafts"


@pytest.fixture(params=CELLS)
def cell(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def right_labels(served: Served) -> list[str]:
    return [label for label in served.labels if label not in (*CONTROLS, *HOST_CONTROLS)]


def test_hits_change_no_answer(
    cell: str, reports: LazyReports, record_property: Callable[[str, Any], None]
) -> None:
    served, reference = reports[cell], reports[reference_of(CELLS[cell][0])]
    largest = served.check_equal(reference, right_labels(served), TOLERANCE)
    controls = CONTROLS + (HOST_CONTROLS if "own" in served.report else ())
    control = min(served.logprob_error(label, reference) for label in controls)
    record_property("largest error, control", (largest, control))
    print(f"\nROW kimi-k3, {cell}: {largest:.1e}, control {control:.1e}")
    assert control > WRONG
    assert sum(served.hit_tokens("device")) >= 8 * UNIT_TOKENS
    assert (served.counted_in_all("accepted draft tokens") > 0) is bool(CELLS[cell][0])
    assert served.report["is_async"] is CELLS[cell][1]
    if "own" in served.report:
        assert served.report["own"]["host_hit_requests"] > 0
    served.check_nothing_is_left()


def test_stock_mixes_up_latents_and_states(reports: LazyReports) -> None:
    """The defect is upstream's. With prompts that fill a few blocks, no hit is needed for it."""
    stock, reference = reports[STOCK], reports[reference_of(NO_DRAFTS)]
    wrong = max(stock.logprob_error(label, reference) for label in right_labels(stock))
    assert wrong > WRONG


@pytest.mark.parametrize("has_drafts", [False, True], ids=["no drafts", "drafts"])
def test_no_order_of_kernels_and_copies_changes_an_answer(
    tmp_path: Path, has_drafts: bool, record_property: Callable[[str, Any], None]
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    kimi_model.write(folder, has_drafts)
    kind = "states and latents" + (", drafts" if has_drafts else "")
    report_path = tmp_path / "report.json"
    ended = processes.run(
        Path(__file__).with_name("late_streams.py"),
        [str(report_path), str(folder), "--kind", kind, "--seeds", str(NUM_SEEDS)],
        {},
        NPU,
    )
    assert not ended.exit_code, ended.log[-6000:]
    report = json.loads(report_path.read_text())
    record_property("seeds, failed", (len(report["seeds"]), report["failed"]))
    assert not report["failed"]
    assert len(report["seeds"]) == NUM_SEEDS
    for name in ("batched copies", "failed copies", "connector", "preemptions", "aborts"):
        assert report["counted"].get(name, 0) > 0, name
