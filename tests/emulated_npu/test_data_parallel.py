# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Two data-parallel ranks of vLLM-Ascend's balance scheduler answer as one plain engine does.

The ranks are engines in two processes. They make every step of the experts together, and exchange
how many requests run. Each has its own host memory. The reference is one engine without this
package and without prefix caching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from emulated_plans import connector
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.connector import HOLES_TOKENS
from support.scenarios.processes import (
    ADAPTIVE,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)

POOL = {"num_gpu_blocks_override": 240}
BALANCED = {
    "data_parallel_size": 2,
    "additional_config": {"enable_balance_scheduling": True},
}
SYNCHRONOUS = BALANCED | {"async_scheduling": False}
ASYNCHRONOUS = BALANCED | {"async_scheduling": True, "distributed_executor_backend": "mp"}
"""Arguments of engines whose workers have their own processes, as by default."""
SCENARIOS = ("turns", "holes", "crowd", "failures", "skipped")


class Case(NamedTuple):
    """A case on two ranks: a model of `random_models`, the engines, and their requests."""

    model: str
    engine: Mapping[str, Any]
    scenarios: tuple[str, ...]


CASES = {
    "windows": Case("sinks, windows, experts", SYNCHRONOUS, SCENARIOS),
    "latents": Case("latent attention, experts", SYNCHRONOUS, SCENARIOS),
    "asynchronous": Case("sinks, windows, experts", ASYNCHRONOUS, ("turns", "crowd", "skipped")),
}
WITH_HOLES = ("windows", "latents")
LOADED = ("warm", "second turn", "crowd again")
"""Scenarios whose KV must be in the host memory of both ranks and not on a device."""
SKIPPED = "skipped loads"


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    """Reports by case, and by ``reference, MODEL``."""
    served = []
    for name, case in CASES.items():
        folder = partial(folder_of, case.model)
        engine = POOL | connector() | dict(case.engine)
        plan = Plan(folder, case.scenarios, "data_parallel", engine)
        alone = Plan(folder, SCENARIOS, "data_parallel", POOL | NO_PREFIX_CACHING)
        served += [(ADAPTIVE, {name: plan}), (PLUGIN_OFF, {f"reference, {case.model}": alone})]
    return LazyReports(tmp_path_factory, served, NPU)


def with_reference(served: LazyReports, name: str) -> tuple[Served, Served]:
    return served[name], served[f"reference, {CASES[name].model}"]


def errors(found: Served, reference: Served, label: str) -> dict[int, float]:
    """Largest difference of a log-probability from the reference, by rank."""
    ranks = found.report["asked"][label]["ranks"]
    of_answers = list(zip(ranks, found.logprob_errors(label, reference), strict=True))
    return {rank: max(error for each, error in of_answers if each == rank) for rank in set(ranks)}


def counted(found: Served, label: str, name: str) -> list[int]:
    """A count of each rank."""
    return [rank.get(name, 0) for rank in found.report["asked"][label]["counted"]]


def is_wrong_on_purpose(label: str) -> bool:
    return label.startswith("hole left out") or label == SKIPPED


@pytest.mark.parametrize("name", CASES)
def test_answers_of_both_ranks_are_those_without_the_package(
    served: LazyReports, record_property: Any, name: str
) -> None:
    found, reference = with_reference(served, name)
    labels = [label for label in found.labels if not is_wrong_on_purpose(label)]
    largest = found.check_equal(reference, labels, NPU_TOLERANCE)
    wrong = errors(found, reference, SKIPPED)
    record_property("largest error, control", (largest, min(wrong.values())))
    assert min(wrong.values()) > WRONG and len(wrong) == 2, "what is not loaded is seen on both"
    assert min(counted(found, SKIPPED, "connector")) > 0
    for rank in found.report["ranks"]:
        assert set(rank["left"].values()) == {0}, rank["left"]


@pytest.mark.parametrize("name", WITH_HOLES)
def test_both_ranks_compute_holes_and_one_that_is_left_out_is_seen(
    served: LazyReports, name: str
) -> None:
    found, reference = with_reference(served, name)
    for hole in HOLES_TOKENS:
        wrong = errors(found, reference, f"hole left out: {hole}")
        assert min(wrong.values()) > WRONG and len(wrong) == 2, hole
        for what in ("hole tokens", "tokens behind holes"):
            assert min(counted(found, f"hole: {hole}", what)) > 0, (hole, what)


@pytest.mark.parametrize("name", WITH_HOLES)
def test_loads_fail_on_one_rank_only(served: LazyReports, name: str) -> None:
    failed = [rank["own"]["transfer_failures.load"] for rank in served[name].report["ranks"]]
    assert failed[0] == 0 and failed[1] > 0


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_have_hits_in_their_own_host_memory(served: LazyReports, name: str) -> None:
    found = served[name]
    for label in LOADED:
        assert min(counted(found, label, "connector")) > 0, label
        assert counted(found, label, "prefix_cache_stats") == [0, 0], label
    assert counted(found, "crowd elsewhere", "connector") == [0, 0]
    for rank in found.report["ranks"]:
        assert rank["own"]["host_hit_tokens"] > 0 and rank["own"]["transfers.load"] > 0


@pytest.mark.parametrize("name", CASES)
def test_the_scheduler_is_balanced_and_a_full_rank_holds_the_other_back(
    served: LazyReports, name: str
) -> None:
    ranks = served[name].report["ranks"]
    assert len(ranks) == 2
    asynchronous = ["AsyncScheduler"] if name == "asynchronous" else []
    for rank in ranks:
        schedulers = rank["schedulers"][: len(asynchronous) + 1]
        assert schedulers == [*asynchronous, "BalanceScheduler"]
        assert rank["engine"] == "BalanceDPEngineCoreProc"
        assert rank["balanced"]["steps that held requests back"] > 0
