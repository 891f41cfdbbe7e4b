# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A served model with pages that the AscendC kernel moves and pages that batched DMA moves.

The choice between both, the launcher and the kernel's source are the real ones. Streams are on time
or late. A block of 128 tokens is a run, so all runs of these models are larger than
`npu_transfers.MIN_MEAN_RUN_BYTES_FOR_DMA`. The workload lowers and raises this limit, so that
transfers use the two ways in turn. One way loads what the other way has stored.

Tokens of segments may be anywhere in their pages. For them the real limit decides.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import kernel_launcher
import pytest
from emulated_plans import connector, pool_of
from support.blending.oracle import Oracle
from support.blending.served import MAX_TOKENS, expected_reuse, oracle_error
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.documents import SEPARATOR
from support.scenarios.kernel_or_dma import SEEDS
from support.scenarios.processes import ADAPTIVE, NO_PREFIX_CACHING, NPU, PLUGIN_OFF, Plan
from test_blending import HEAD_TOKENS, POOL, wrong_errors

from vllm_ascend_kvext.transfer.ascend.npu_transfers import MIN_MEAN_RUN_BYTES_FOR_DMA

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")

KERNEL = {"VLLM_ASCEND_KVEXT_ASCEND_KERNEL": "1"}
IN_TURNS = {"store": ["kernel", "dma"], "load": ["kernel", "kernel", "dma"]}
WAYS = tuple(f"{way} {name}" for way in ("kernel", "dma") for name in ("store", "load"))
MODELS = ("full attention",) if IS_SAMPLE else ("full attention", "windows")
SCENARIOS = ("skipped", "turns", "late")
SKIPPED = "kernels copy nothing"
"""Label of the control."""

Serve = Callable[..., Served]
Reports = Callable[[str], tuple[Served, Served]]


@pytest.fixture(scope="module")
def serve(folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Serve:
    """Serve an engine with the kernel. The other arguments are options of its plan."""
    libraries = str(kernel_launcher.build(tmp_path_factory.mktemp("launcher")))

    def serve(
        model: str, scenarios: tuple[str, ...], module: str = "kernel_or_dma", **options: Any
    ) -> Served:
        if module == "kernel_or_dma":
            engine = connector() | pool_of(model)
            environ = KERNEL | ADAPTIVE
        else:
            environ = KERNEL
            engine = processes.blending(separator=SEPARATOR, learn=False) | POOL
        options["libraries"] = libraries
        plan = Plan(folder_of(model), scenarios, module, engine, options)
        return processes.serve(tmp_path_factory, {"": plan}, environ, NPU)[""]

    return serve


@pytest.fixture(scope="module")
def reports(
    serve: Serve, folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """Reports of an engine with kernel and DMA, and of an engine without the package."""

    @cache
    def reports(model: str) -> tuple[Served, Served]:
        engine = pool_of(model) | NO_PREFIX_CACHING
        plans = {"": Plan(folder_of(model), SCENARIOS, "kernel_or_dma", engine)}
        reference = processes.serve(tmp_path_factory, plans, PLUGIN_OFF, NPU)[""]
        return serve(model, SCENARIOS, turns_of=IN_TURNS), reference

    return reports


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_the_package(
    reports: Reports, record_property: Any, model: str
) -> None:
    found, reference = reports(model)
    right = [label for label in found.labels if label != SKIPPED]
    wrong = found.logprob_error(SKIPPED, reference)
    largest = found.check_equal(reference, right, NPU_TOLERANCE)
    record_property("largest error, control", (largest, wrong))
    assert wrong > WRONG
    found.check_nothing_is_left()
    assert found.report["kernels"]["mappings"] == 0, "the host buffer is still mapped"


@pytest.mark.parametrize("model", MODELS)
def test_both_ways_are_taken_and_no_third(reports: Reports, model: str) -> None:
    found, _ = reports(model)
    counted = found.report["ways"]["counted"]
    kernels = found.report["kernels"]
    assert all(counted[way] > 0 for way in WAYS), counted
    launches = counted["kernel store"] + counted["kernel load"]
    assert kernels["launches"] == kernels["ended"] == launches
    assert found.report["batched copies"]["calls"] == counted["dma store"] + counted["dma load"]
    assert kernels["written bytes"] > 0
    for label in ("loaded by kernels", SKIPPED):
        assert found.hit_tokens(label) == [128]
    assert sum(found.hit_tokens("warm")) > 0


@pytest.mark.parametrize("model", MODELS)
def test_kernels_are_late_as_the_seeds_say(reports: Reports, model: str) -> None:
    found, _ = reports(model)
    assert found.report["ways"]["counted"]["kernels that were late"] >= len(SEEDS)
    for seed in SEEDS:
        assert all(hits > 0 for hits in found.hit_tokens(f"seed {seed}, warm"))


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
def test_kernels_that_do_not_wait_for_the_model_are_seen(serve: Serve, reports: Reports) -> None:
    """Check stores only: they read pages that have not been written yet."""
    model = "full attention"
    turns_of = {"store": ["kernel"], "load": ["kernel"]}
    found = serve(model, ("late",), turns_of=turns_of, without="stores wait")
    _, reference = reports(model)
    assert found.report["batched copies"] == {}
    for seed in SEEDS:
        assert found.logprob_error(f"seed {seed}, warm", reference) > WRONG


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
def test_small_runs_of_segments_go_by_the_kernel(
    serve: Serve, folder_of: Callable[[str], Path], record_property: Any
) -> None:
    """Check loads and stores. The memory in which keys are rotated is mapped as well."""
    model = "one head of keys"
    how = {"module": "kernel_segments", "heads": [HEAD_TOKENS]}
    served = serve(model, ("orders", "controls"), **how)
    skipping = serve(model, ("orders",), **how, skips_loads=True)
    oracle = Oracle(folder_of(model), served.report["facts"]["sinks"], MAX_TOKENS)
    largest, wrong = (
        max(
            oracle_error(oracle, answer, expected_reuse(answer, HEAD_TOKENS))
            for answer in found.answers(f"heads {HEAD_TOKENS}")
        )
        for found in (served, skipping)
    )
    record_property("largest error, control", (largest, wrong))
    assert largest <= NPU_TOLERANCE
    assert wrong > WRONG
    assert min(wrong_errors(oracle, served)) > WRONG
    ways = served.report["ways"]
    assert all(ways["counted"][way] > 0 for way in WAYS), ways
    for way, sizes in ways["mean run bytes"].items():
        are_small = [size < MIN_MEAN_RUN_BYTES_FOR_DMA for size in sizes]
        assert are_small == ["kernel" in way] * len(sizes), ways
    served.check_nothing_is_left()
    assert served.report["kernels"]["mappings"] == 0
