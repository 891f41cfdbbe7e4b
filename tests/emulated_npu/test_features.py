# SPDX-License-Identifier: Apache-2.0
"""What comes back from host memory on the emulated NPU is what is computed without the package.

Each model is served by vLLM-Ascend twice: without package and prefix caching, and with adaptive
retention and KvextConnector. Beside what must be equal stand controls: what must differ.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import random_models
from support.sample import IS_SAMPLE

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "engine"))

from connector_workload import HOLES_TOKENS  # noqa: E402 (the path is set above)
from emulated_run import run_plans  # noqa: E402
from served import INTERVAL, PLUGIN_OFF, Served  # noqa: E402

TOLERANCE = 1e-3
"""Of a log-probability; float32 differs by less than a tenth of it."""
WRONG = 0.1

SCENARIOS = ("turns", "document", "salts", "damage", "failures", "holes", "lone_holes")
CROWDED = ("storm", "eviction")
FULL_POOL_BLOCKS = {1: 120, 2: 240, 4: 400, 6: 700}
CROWDED_BLOCKS = {1: 24, 2: 44, 4: 64, 6: 130}
"""By the number of KV cache groups: too few for the storm."""

FEATURES: dict[str, tuple[str, ...]] = {
    "store and load": ("warm", "twice", "second turn"),
    "one document": ("first question", "second question", "four questions"),
    "salts": ("salted", "other salt", "no salt", "same salt"),
    "failed copies": (
        *("failing stores", "after failed stores", "failing loads", "after failed loads"),
        *("after failures", "one part fails"),
    ),
    "holes": tuple(f"hole: {name}" for name in HOLES_TOKENS),
    "holes, one request": (),
    "preemption and swap": ("storm", "after the storm"),
    "eviction": (),
}
"""By name the labels of the workload; without labels, those that begin as `BEGINNINGS` say."""
BEGINNINGS = {"holes, one request": "lone hole: ", "eviction": "round "}
CONTROLS = {
    "store and load": ("zeroed rows", "swapped rows"),
    "one document": ("zeroed rows", "swapped rows"),
    "holes": tuple(f"hole left out: {name}" for name in HOLES_TOKENS),
    "holes, one request": tuple(f"hole left out: {name}" for name in HOLES_TOKENS),
}
"""What differs if nothing were right; for the other features, as for the first."""

GROUPS = {
    "full attention": 1,
    "windows": 6,
    "sinks, windows, experts": 2,
    "latent attention, experts": 1,
    "states": 4,
}
MODELS = tuple(GROUPS)[:2] if IS_SAMPLE else tuple(GROUPS)
WITH_TAILS = {"windows", "sinks, windows, experts", "states"}
"""Models with groups of which host memory holds what a boundary needs: windows, states."""

ENGINES: dict[str, dict[str, Any]] = {
    # vLLM has no prefix caching here unless it is asked for; and with the workload's 128 tokens a
    # step, prompts would wait for each answer: their parts are whole blocks of 128 tokens.
    "states": {"enable_prefix_caching": True, "max_num_batched_tokens": 512},
}
"""By model, what its engines need beside what all have."""
NO_HOLES = "a state needs all tokens before it: where a chunk is missing, all behind is computed"
LEFT_OUT = {("states", "holes"): NO_HOLES, ("states", "holes, one request"): NO_HOLES}
"""Model and feature, and why there is no such cell."""
NO_PREFIX_CACHING = {"enable_prefix_caching": False}

WORKLOAD = "feature_workload.py"

Reports = Callable[[str], Mapping[str, Served]]


def connector(**extra: Any) -> dict[str, Any]:
    return {
        "disable_hybrid_kv_cache_manager": False,
        "kv_transfer_config": {
            "kv_connector": "KvextConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {
                "host_memory_gib": 0.25,
                "chunk_tokens": 128,
                "load_if_slower": True,
                "store_policy": "all",
                **extra,
            },
        },
    }


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Reports:
    @cache
    def serve(model: str) -> Mapping[str, Served]:
        folder = tmp_path_factory.mktemp("model")
        random_models.write(folder, random_models.MODELS[model]())
        scenarios = SCENARIOS[:-1] if IS_SAMPLE else SCENARIOS
        num_groups = GROUPS[model]
        needed = ENGINES.get(model, {})
        pool = needed | {"num_gpu_blocks_override": FULL_POOL_BLOCKS[num_groups]}
        few = needed | {"num_gpu_blocks_override": CROWDED_BLOCKS[num_groups]}
        small = connector(host_memory_gib=1 / 256, swap_on_preemption=True)

        def plan(engine: dict[str, Any], *names: str) -> dict[str, Any]:
            return {"model": str(folder), "engine": engine, "scenarios": names}

        if (model, "holes, one request") in LEFT_OUT:
            scenarios = tuple(name for name in scenarios if name != "lone_holes")
        reference = plan(pool | NO_PREFIX_CACHING, *scenarios, *CROWDED)
        found = run_plans(
            WORKLOAD, {"reference": reference}, tmp_path_factory.mktemp("reference"), PLUGIN_OFF
        ) | run_plans(
            WORKLOAD,
            {
                "kvext": plan(connector() | pool, *scenarios),
                "crowded": plan(small | few, *CROWDED),
            },
            tmp_path_factory.mktemp("kvext"),
            {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
        )
        return {name: Served(report, "") for name, report in found.items()}

    return serve


TWO_DEVICES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ALONE: dict[str, tuple[tuple[str, ...], dict[str, Any], dict[str, str]]] = {
    "tensor parallel 2": (
        ("turns", "document", "holes"),
        connector() | TWO_DEVICES,
        {"VLLM_ASCEND_KVEXT_RETENTION": "adaptive"},
    ),
    "retention by interval": (("turns", "document"), {}, {INTERVAL: "256"}),
    "vLLM's prefix caching": (("turns", "document"), {}, PLUGIN_OFF),
}
"""Features with an engine of their own: scenarios, engine, environment."""
ALONE_CELLS = [
    (model, feature)
    for feature in tuple(ALONE)[:2]
    for model in ("full attention", "windows", "latent attention, experts")
] + [("states", feature) for feature in tuple(ALONE)[1:]]
"""Left out: states on two devices, whose cell would ask for holes."""


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
@pytest.mark.parametrize(("model", "feature"), ALONE_CELLS)
def test_answers_of_other_engines_are_those_without_the_package(
    tmp_path_factory: pytest.TempPathFactory, report_cell: Any, model: str, feature: str
) -> None:
    scenarios, engine, environ = ALONE[feature]
    folder = tmp_path_factory.mktemp("model")
    random_models.write(folder, random_models.MODELS[model]())
    pool = {"num_gpu_blocks_override": FULL_POOL_BLOCKS[GROUPS[model]]}
    pool |= ENGINES.get(model, {})

    def serve(engine: dict[str, Any], environ: Mapping[str, str]) -> Served:
        plan = {"model": str(folder), "engine": pool | engine, "scenarios": scenarios}
        reports = run_plans(WORKLOAD, {"": plan}, tmp_path_factory.mktemp("report"), environ)
        return Served(reports[""], "")

    reference, found = serve(NO_PREFIX_CACHING, PLUGIN_OFF), serve(engine, environ)
    errors = {label: found.logprob_error(label, reference) for label in found.labels}
    wrong = [errors.pop(label) for label in [*errors] if label.startswith("hole left out")]
    report_cell(feature, model, max(errors.values()), max(wrong, default=math.nan))
    assert max(errors.values()) <= TOLERANCE
    assert sum(found.hit_tokens("twice")) > 0
    assert set(found.report["left"].values()) == {0}
    if wrong:
        assert max(wrong) > WRONG
        assert sum(found.hit_tokens("warm")) > 0
        assert counted(found, labels_of(found, "holes"), "hole tokens") > 0


def labels_of(served: Served, feature: str) -> list[str]:
    beginning = BEGINNINGS.get(feature)
    labels = FEATURES[feature]
    return [
        label
        for label in served.labels
        if label in labels or (beginning is not None and label.startswith(beginning))
    ]


def asked(reports: Mapping[str, Served], feature: str) -> Served:
    return reports["crowded" if feature in ("preemption and swap", "eviction") else "kvext"]


def counted(served: Served, labels: list[str], name: str) -> int:
    return sum(served.report["asked"][label]["counted"].get(name, 0) for label in labels)


def skip_if_left_out(model: str, feature: str) -> None:
    if (model, feature) in LEFT_OUT:
        pytest.skip(LEFT_OUT[model, feature])
    if IS_SAMPLE and feature == "holes, one request":
        pytest.skip("not in the sample")


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("model", MODELS)
def test_answers_are_those_without_the_package(
    served: Reports, report_cell: Any, model: str, feature: str
) -> None:
    skip_if_left_out(model, feature)
    reports = served(model)
    found, reference = asked(reports, feature), reports["reference"]
    labels = labels_of(found, feature)
    assert labels
    controls = CONTROLS.get(feature, CONTROLS["store and load"])
    if model == "states" and "zeroed rows" in controls:
        controls += ("zeroed tails", "swapped tails")  # Most of its layers have no rows.
    largest = max(found.logprob_error(label, reference) for label in labels)
    wrong = max(reports["kvext"].logprob_error(label, reference) for label in controls)
    report_cell(feature, model, largest, wrong)
    assert largest <= TOLERANCE
    for label in labels:
        replies = [answer.reply for answer in found.answers(label)]
        assert replies == [answer.reply for answer in reference.answers(label)], label
    assert wrong > WRONG


@pytest.mark.parametrize("model", MODELS)
def test_what_is_wrong_in_host_memory_is_seen(served: Reports, model: str) -> None:
    reports = served(model)
    found, reference = reports["kvext"], reports["reference"]
    damaged = ["zeroed rows", "swapped rows"]
    if model in WITH_TAILS:
        damaged += ["zeroed tails", "swapped tails"]
    for label in damaged:
        assert found.logprob_error(label, reference) > WRONG, label
    assert found.logprob_error("intact", reference) <= TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_each_feature_was_met(served: Reports, model: str) -> None:
    """Counts of what the names of the features say."""
    reports = served(model)
    found, crowded = reports["kvext"], reports["crowded"]
    own = found.report["own"]
    assert sum(found.hit_tokens("warm")) > 0 and sum(found.hit_tokens("second turn")) > 0
    assert found.hit_tokens("no salt") == [0] and found.hit_tokens("same salt") == [128]
    for name in ("hole tokens", "tokens behind holes"):
        has_holes = counted(found, labels_of(found, "holes"), name) > 0
        assert has_holes is ((model, "holes") not in LEFT_OUT)
    assert own["transfer_failures.load"] > 0 and own["transfer_failures.store"] > 0
    assert counted(crowded, ["storm"], "preemptions") > 0
    assert crowded.report["own"]["host_swapped_requests"] > 0
    assert crowded.report["own"]["host_removed_entries.evicted"] > 0
    assert found.report["batched copies"]["calls"] > 0


@pytest.mark.parametrize("model", MODELS)
def test_nothing_is_left_when_all_is_done(served: Reports, model: str) -> None:
    for name in ("kvext", "crowded"):
        left = served(model)[name].report["left"]
        assert set(left.values()) == {0}, left


@pytest.mark.parametrize("model", MODELS)
def test_models_have_the_groups_that_they_are_tested_for(served: Reports, model: str) -> None:
    assert served(model)["kvext"].report["num_groups"] == GROUPS[model]


@pytest.mark.parametrize("model", [model for model, feature in LEFT_OUT if feature == "holes"])
def test_where_a_chunk_is_missing_all_behind_it_is_computed(served: Reports, model: str) -> None:
    if model not in MODELS:
        pytest.skip("not in the sample")
    reports = served(model)
    found, reference = reports["kvext"], reports["reference"]
    for label in labels_of(found, "holes"):
        assert found.logprob_error(label, reference) <= TOLERANCE, label
    # The first prompt of the round meets its own chunks only, and misses the third.
    assert found.hit_tokens("hole: in the middle")[0] == 256
