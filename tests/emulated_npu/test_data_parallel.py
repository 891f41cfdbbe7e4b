# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel ranks of vLLM-Ascend's balance scheduler answer as one engine without anything.

The ranks are engines in processes of their own. They take every step of the experts together, and
tell each other how many requests run; each has its own host memory. The reference is one engine
without this package and without prefix caching.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import random_models
from emulated_run import run_plans
from test_features import NO_PREFIX_CACHING, TOLERANCE, WRONG, connector

# isort: split
# `test_features` has put their folder on the path.
from connector_workload import HOLES_TOKENS
from served import PLUGIN_OFF, Served, logprob_error

WORKLOAD = "data_parallel_workload.py"
ADAPTIVE = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"}
POOL = {"num_gpu_blocks_override": 240}
BALANCED = {
    "data_parallel_size": 2,
    "additional_config": {"enable_balance_scheduling": True},
}
SYNCHRONOUS = BALANCED | {"async_scheduling": False}
ASYNCHRONOUS = BALANCED | {"async_scheduling": True, "distributed_executor_backend": "mp"}
"""With workers in processes of their own, as by default."""
SCENARIOS = ("turns", "holes", "crowd", "failures", "skipped")


@dataclass(frozen=True)
class Case:
    """What is served on two ranks.

    Attributes:
        model: Of ``random_models``.
        engine: Arguments of both engines.
        scenarios: Of the workload.
    """

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
"""What has to be in host memory of both ranks, and nowhere else."""
SKIPPED = "skipped loads"

Reports = Callable[[str], Mapping[str, Served]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    def run(
        folder: str, engine: Mapping[str, Any], scenarios: tuple[str, ...], **environ: str
    ) -> Served:
        plan = {"model": folder, "engine": POOL | dict(engine), "scenarios": scenarios}
        report = run_plans(WORKLOAD, {"": plan}, tmp_path_factory.mktemp("report"), environ)
        return Served(report[""], "")

    @cache
    def reference(model: str) -> tuple[str, Served]:
        folder = tmp_path_factory.mktemp("model")
        random_models.write(folder, random_models.MODELS[model]())
        return str(folder), run(str(folder), NO_PREFIX_CACHING, SCENARIOS, **PLUGIN_OFF)

    @cache
    def serve(name: str) -> Mapping[str, Served]:
        case = CASES[name]
        folder, alone = reference(case.model)
        engine = connector() | dict(case.engine)
        return {"reference": alone, "kvext": run(folder, engine, case.scenarios, **ADAPTIVE)}

    return serve


def errors(found: Served, reference: Served, label: str) -> dict[int, float]:
    """By rank, the largest difference of a log-probability from the reference's."""
    largest: dict[int, float] = {}
    ranks = found.report["asked"][label]["ranks"]
    answers, expected = found.answers(label), reference.answers(label)
    for rank, mine, theirs in zip(ranks, answers, expected, strict=True):
        largest[rank] = max(largest.get(rank, 0), logprob_error(mine, theirs))
    return largest


def counted(found: Served, label: str, name: str) -> list[int]:
    """By rank."""
    return [rank.get(name, 0) for rank in found.report["asked"][label]["counted"]]


def is_wrong_on_purpose(label: str) -> bool:
    return label.startswith("hole left out") or label == SKIPPED


@pytest.mark.parametrize("name", CASES)
def test_answers_of_both_ranks_are_those_without_the_package(
    served: Reports, report_cell: Any, name: str
) -> None:
    reports = served(name)
    found, reference = reports["kvext"], reports["reference"]
    labels = [label for label in found.labels if not is_wrong_on_purpose(label)]
    largest = {label: max(errors(found, reference, label).values()) for label in labels}
    control = min(errors(found, reference, SKIPPED).values())
    report_cell(f"data parallel 2: {name}", CASES[name].model, max(largest.values()), control)
    assert max(largest.values()) <= TOLERANCE, largest
    for label in labels:
        replies = [answer.reply for answer in found.answers(label)]
        assert replies == [answer.reply for answer in reference.answers(label)], label


@pytest.mark.parametrize("name", CASES)
def test_what_is_not_loaded_is_seen_on_both_ranks(served: Reports, name: str) -> None:
    found, reference = served(name)["kvext"], served(name)["reference"]
    wrong = errors(found, reference, SKIPPED)
    assert min(wrong.values()) > WRONG and len(wrong) == 2
    assert min(counted(found, SKIPPED, "connector")) > 0


@pytest.mark.parametrize("name", WITH_HOLES)
def test_a_hole_that_is_left_out_is_seen_on_both_ranks(served: Reports, name: str) -> None:
    found, reference = served(name)["kvext"], served(name)["reference"]
    for hole in HOLES_TOKENS:
        wrong = errors(found, reference, f"hole left out: {hole}")
        assert min(wrong.values()) > WRONG and len(wrong) == 2, hole


@pytest.mark.parametrize("name", CASES)
def test_both_ranks_have_hits_in_their_own_host_memory(served: Reports, name: str) -> None:
    found = served(name)["kvext"]
    for label in LOADED:
        hits = counted(found, label, "connector")
        print(f"{name}, {label}: {hits} tokens from host memory")
        assert min(hits) > 0
        assert counted(found, label, "prefix_cache_stats") == [0, 0]
    assert counted(found, "crowd elsewhere", "connector") == [0, 0]
    for rank in found.report["ranks"]:
        own = rank["own"]
        print(f"{name}: {own['host_hit_tokens']} tokens in all, {own['transfers.load']} loads")
        assert own["host_hit_tokens"] > 0 and own["transfers.load"] > 0


@pytest.mark.parametrize("name", WITH_HOLES)
def test_both_ranks_compute_holes(served: Reports, name: str) -> None:
    found = served(name)["kvext"]
    for hole in HOLES_TOKENS:
        for what in ("hole tokens", "tokens behind holes"):
            assert min(counted(found, f"hole: {hole}", what)) > 0, (hole, what)


@pytest.mark.parametrize("name", WITH_HOLES)
def test_loads_fail_on_one_rank_only(served: Reports, name: str) -> None:
    failed = [
        rank["own"]["transfer_failures.load"] for rank in served(name)["kvext"].report["ranks"]
    ]
    assert failed[0] == 0 and failed[1] > 0


@pytest.mark.parametrize("name", CASES)
def test_the_scheduler_is_balanced_and_a_full_rank_holds_the_other_back(
    served: Reports, name: str
) -> None:
    ranks = served(name)["kvext"].report["ranks"]
    assert len(ranks) == 2
    for rank in ranks:
        schedulers = rank["schedulers"]
        asynchronous = ["AsyncScheduler"] if name == "asynchronous" else []
        assert schedulers[: len(asynchronous) + 1] == [*asynchronous, "BalanceScheduler"]
        assert rank["engine"] == "BalanceDPEngineCoreProc"
        print(f"{name}: {rank['balanced']}")
        assert rank["balanced"]["steps that held requests back"] > 0


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_left_when_all_is_done(served: Reports, name: str) -> None:
    for rank in served(name)["kvext"].report["ranks"]:
        assert set(rank["left"].values()) == {0}, rank["left"]
