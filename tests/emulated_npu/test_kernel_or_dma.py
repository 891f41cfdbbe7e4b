# SPDX-License-Identifier: Apache-2.0
"""Pages that the AscendC kernel moves in a served model, beside those that batched DMA moves.

The choice between both, the launcher and the kernel's source are the real ones, on streams that are
on time and late. A block of 128 tokens is a run, so that all runs of these models are larger than
`choice.LEAST_MEAN_RUN_BYTES_FOR_DMA`: the workload lowers and raises it, so that transfers go by
turns. What one way has stored the other one loads.

Tokens of segments lie anywhere in their pages: there the real size decides.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import kernel_launcher
import pytest
import random_models
from support.blending.oracle import Oracle
from support.sample import IS_SAMPLE

sys.path.insert(0, str(Path(__file__).parents[1] / "engine"))

from blended_prompts import SEPARATOR
from emulated_run import run_plans
from kernel_workload import SEEDS
from served import PLUGIN_OFF, Served
from test_blending import CONTROLS, HEAD_TOKENS, MOST_TOKENS, oracle_error, reused_of
from test_features import FULL_POOL_BLOCKS, NO_PREFIX_CACHING, TOLERANCE, WRONG, connector

from vllm_ascend_kvext.transfer.choice import LEAST_MEAN_RUN_BYTES_FOR_DMA

pytestmark = pytest.mark.skipif(shutil.which("cmake") is None, reason="needs cmake")

WORKLOAD = "kernel_workload.py"
KERNEL = {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive", "VLLM_ASCEND_KVEXT_ASCEND_KERNEL": "1"}
IN_TURNS = {"store": ["kernel", "dma"], "load": ["kernel", "kernel", "dma"]}
WAYS = tuple(f"{way} {name}" for way in ("kernel", "dma") for name in ("store", "load"))
GROUPS = {"full attention": 1, "windows": 6}
MODELS = tuple(GROUPS)[:1] if IS_SAMPLE else tuple(GROUPS)
SCENARIOS = ("skipped", "turns", "late")
SKIPPED = "kernels copy nothing"
"""The label of the control."""

Serve = Callable[..., Served]
Reports = Callable[[str], tuple[Served, Served]]


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kernel_launcher.build(tmp_path_factory.mktemp("launcher"))


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Serve:
    @cache
    def folder_of(model: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        random_models.write(folder, random_models.MODELS[model]())
        return folder

    def serve(
        model: str, engine: Mapping[str, Any], environ: Mapping[str, str], **more: Any
    ) -> Served:
        pool = {"num_gpu_blocks_override": FULL_POOL_BLOCKS[GROUPS[model]]}
        plan = {"model": str(folder_of(model)), "engine": pool | dict(engine), **more}
        report = run_plans(WORKLOAD, {"": plan}, tmp_path_factory.mktemp("report"), environ)[""]
        return Served(report, "")

    return serve


@pytest.fixture(scope="module")
def reports(serve: Serve, libraries: Path) -> Reports:
    """Of an engine with kernel and DMA, and of one without the package."""

    @cache
    def reports(model: str) -> tuple[Served, Served]:
        reference = serve(model, NO_PREFIX_CACHING, PLUGIN_OFF, scenarios=SCENARIOS)
        more = {"libraries": str(libraries), "turns_of": IN_TURNS, "scenarios": SCENARIOS}
        return serve(model, connector(), KERNEL, **more), reference

    return reports


@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_the_package(
    reports: Reports, report_cell: Any, model: str
) -> None:
    found, reference = reports(model)
    errors = {label: found.logprob_error(label, reference) for label in found.labels}
    wrong = errors.pop(SKIPPED)
    report_cell("kernel or DMA", model, max(errors.values()), wrong)
    assert max(errors.values()) <= TOLERANCE, errors
    for label in errors:
        replies = [answer.reply for answer in found.answers(label)]
        assert replies == [answer.reply for answer in reference.answers(label)], label
    assert wrong > WRONG


@pytest.mark.parametrize("model", MODELS)
def test_both_ways_are_taken_and_no_third(reports: Reports, model: str) -> None:
    found, _ = reports(model)
    counted, kernels = found.report["ways"]["counted"], found.report["kernels"]
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


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left_when_all_is_done(reports: Reports, model: str) -> None:
    """The host buffer is not mapped any more, either."""
    found, _ = reports(model)
    assert set(found.report["left"].values()) == {0}
    assert found.report["kernels"]["mappings"] == 0


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
def test_kernels_that_do_not_wait_for_the_model_are_seen(
    serve: Serve, reports: Reports, libraries: Path
) -> None:
    """Stores alone: what they read has not been written yet."""
    model = "full attention"
    more = {"libraries": str(libraries), "scenarios": ["late"], "without": "stores wait"}
    kernels = {"turns_of": {"store": ["kernel"], "load": ["kernel"]}}
    found = serve(model, connector(), KERNEL, **more, **kernels)
    _, reference = reports(model)
    assert found.report["batched copies"] == {}
    for seed in SEEDS:
        assert found.logprob_error(f"seed {seed}, warm", reference) > WRONG


@pytest.fixture(scope="module")
def segments_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = random_models.full_attention()
    config.num_key_value_heads = 1  # A token has 256 bytes of keys: half of a page is enough.
    folder = tmp_path_factory.mktemp("model")
    random_models.write(folder, config)
    return folder


@pytest.fixture(scope="module")
def serve_segments(
    segments_model: Path, libraries: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    def serve(**more: Any) -> dict[str, Any]:
        plan = {
            "model": str(segments_model),
            "scenarios": ["orders", "controls"],
            "heads": [HEAD_TOKENS],
            "blending": {"segment_separator": SEPARATOR},
            "engine": {"num_gpu_blocks_override": 200},
            "libraries": str(libraries),
            **more,
        }
        environ = {"VLLM_ASCEND_KVEXT_ASCEND_KERNEL": "1"}
        return run_plans(WORKLOAD, {"": plan}, tmp_path_factory.mktemp("report"), environ)[""]

    return serve


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
def test_small_runs_of_segments_go_by_the_kernel(
    serve_segments: Callable[..., dict[str, Any]], segments_model: Path, report_cell: Any
) -> None:
    """From and to the pages: the memory in which keys are rotated is mapped as well."""
    report = serve_segments()
    skipping = serve_segments(skips_loads=True, scenarios=["orders"])
    oracle = Oracle(segments_model, report["facts"]["sink"], MOST_TOKENS)
    orders = f"heads {HEAD_TOKENS}"

    def errors_of(report: dict[str, Any], label: str) -> list[float]:
        return [
            oracle_error(oracle, answer, reused_of(answer, 0)) for answer in report["asked"][label]
        ]

    errors = errors_of(report, orders)
    wrong = max(errors_of(skipping, orders))
    report_cell("kernel or DMA, segments", "full attention", max(errors), wrong)
    assert max(errors) <= TOLERANCE
    assert wrong > WRONG
    assert all(error > WRONG for label in CONTROLS for error in errors_of(report, label))
    ways = report["ways"]
    assert all(ways["counted"][way] > 0 for way in WAYS), ways
    for way, sizes in ways["mean run bytes"].items():
        are_small = [size < LEAST_MEAN_RUN_BYTES_FOR_DMA for size in sizes]
        assert are_small == ["kernel" in way] * len(sizes), ways
    assert set(report["left"].values()) == {0}
    assert report["kernels"]["mappings"] == 0
