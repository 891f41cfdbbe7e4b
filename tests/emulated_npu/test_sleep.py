# SPDX-License-Identifier: Apache-2.0
"""An engine that slept answers as one that did not, with what it stores and loads afterwards.

Sleep with requests and transfers under way is among the late streams: see ``late_streams.py``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import random_models
from support.sample import IS_SAMPLE
from test_features import (
    FULL_POOL_BLOCKS,
    GROUPS,
    NO_PREFIX_CACHING,
    TOLERANCE,
    WRONG,
    connector,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from emulated_run import SLEEPING, run_plans
from served import PLUGIN_OFF, Served

LABELS = (
    *("before", "after a sleep", "loaded after a sleep"),
    *("after new weights", "loaded after new weights"),
)
MODELS = ("full attention", "windows")[: 1 if IS_SAMPLE else None]
"""None with experts: vLLM-Ascend 0.23.0 wakes up with their weights transposed, for a trainer that
loads others."""

Reports = Callable[[str], Mapping[str, Served]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    @cache
    def serve(model: str) -> Mapping[str, Served]:
        folder = tmp_path_factory.mktemp("model")
        random_models.write(folder, random_models.MODELS[model]())
        pool = {"num_gpu_blocks_override": FULL_POOL_BLOCKS[GROUPS[model]]}
        plans = {
            "reference": (pool | NO_PREFIX_CACHING, PLUGIN_OFF),
            "kvext": (pool | SLEEPING | connector(), {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}),
        }
        found = {}
        for name, (engine, environ) in plans.items():
            plan = {name: {"model": str(folder), "engine": engine}}
            reports = run_plans(
                "sleep_workload.py", plan, tmp_path_factory.mktemp("report"), environ
            )
            found[name] = Served(reports[name], "")
        return found

    return serve


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_of_an_engine_that_was_awake(
    served: Reports, report_cell: Any, model: str
) -> None:
    found, reference = served(model)["kvext"], served(model)["reference"]
    largest = max(found.logprob_error(label, reference) for label in LABELS)
    wrong = found.logprob_error("zeroed rows", reference)
    report_cell("sleep and wake", model, largest, wrong)
    assert largest <= TOLERANCE
    assert wrong > WRONG


@pytest.mark.parametrize("model", MODELS)
def test_host_memory_is_empty_after_a_sleep_and_is_used_again(served: Reports, model: str) -> None:
    found = served(model)["kvext"]
    for label in ("after a sleep", "after new weights"):
        assert sum(found.hit_tokens(label)) == 0, label
    for label in ("loaded after a sleep", "loaded after new weights"):
        assert found.report["asked"][label]["counted"].get("connector", 0) > 0, label


@pytest.mark.parametrize("model", MODELS)
def test_memory_and_weights_go_away(served: Reports, model: str) -> None:
    report: Mapping[str, Any] = served(model)["kvext"].report
    assert report["bytes"]["asleep"] < report["bytes"]["awake"] / 2
    assert report["has no weights"]
