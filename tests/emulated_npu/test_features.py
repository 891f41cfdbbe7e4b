# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV from host memory on the emulated NPU gives the answers of an engine without the package.

Each model is served by vLLM-Ascend twice: without package, prefix caching and drafts; and with
adaptive retention and KvextConnector. With draft tokens vLLM-Ascend's own proposer and rejection
sampler run. Some answers must be equal; answers of controls must differ. ``late_streams.py`` tests
sleep with requests and transfers under way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import draft_models
import pytest
from emulated_plans import (
    CROWDED_BLOCKS,
    FULL_POOL_BLOCKS,
    GROUPS,
    IS_0_23,
    PIECES,
    RUNNERS,
    SLEEPING,
    connector,
    graphs,
    pool_of,
    small_connector,
)
from support.sample import IS_LONG, IS_SAMPLE
from support.scenarios.answers import NPU_TOLERANCE, WRONG, Served
from support.scenarios.connector import HOLES_TOKENS
from support.scenarios.processes import (
    ADAPTIVE,
    INTERVAL,
    NO_PREFIX_CACHING,
    NPU,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)

NO_HOLES = {"states"}
"""Models without holes: a state needs all tokens before it."""
WITH_TAILS = {"windows", "sinks, windows, experts", "states"}
"""Models with groups (windows, states) of which host memory holds only pages for a boundary."""
DENSE = ("full attention", "windows", "latent attention, experts")
WITH_GRAPHS = ("windows", "states")
"""Models whose decode steps are captured as graphs."""
GRAPHS = graphs("FULL_DECODE_ONLY", 1, 2, 4, 10)
GRAPHS_OF_PIECES = graphs("PIECEWISE", 1, 2, 4, 10, 64, 128)
MIN_REPLAYS = 200
"""An engine without graphs has no replays. The scenarios of a case have some hundred steps."""
MODELS = ("windows",) if IS_SAMPLE else tuple(GROUPS)
ENGINES: dict[str, dict[str, Any]] = {
    # vLLM caches no prefixes of such a model unless an argument says so. Parts of prompts are whole
    # blocks of 128 tokens, so with the workload's 128 tokens per step, prompts would wait for each
    # answer.
    "states": {"enable_prefix_caching": True, "max_num_batched_tokens": 512},
}
"""Arguments of engines that only some models need, by model."""


def check_features(found: Served, model: str) -> None:
    """Check the counts that the scenarios' names stand for."""
    assert found.report["num_groups"] == GROUPS[model]
    assert sum(found.hit_tokens("warm")) > 0 and sum(found.hit_tokens("second turn")) > 0
    holes = [f"hole: {name}" for name in HOLES_TOKENS]
    for name in ("hole tokens", "tokens behind holes"):
        assert (found.counted_in_all(name, holes) > 0) is (model not in NO_HOLES)
    if model in NO_HOLES:
        # The first prompt of the round finds only its own chunks. States exist at few boundaries.
        names = ["in the middle"] if model == "states" else HOLES_TOKENS
        for name in names:
            assert found.hit_tokens(f"hole: {name}")[0] == HOLES_TOKENS[name][0][0]
    assert found.report["batched copies"]["calls"] > 0
    if model in draft_models.WRITERS:
        check_drafts(found, model)
        return
    own = found.report["own"]
    assert found.hit_tokens("no salt") == [0] and found.hit_tokens("same salt") == [128]
    assert own["transfer_failures.load"] > 0 and own["transfer_failures.store"] > 0


def check_crowd(found: Served, model: str) -> None:
    assert found.counted("storm", "preemptions") > 0
    if model in draft_models.WRITERS:
        check_drafts(found, model)
        return
    assert found.report["own"]["host_swapped_requests"] > 0
    assert found.report["own"]["host_removed_entries.evicted"] > 0


def check_hits(found: Served, model: str) -> None:
    assert sum(found.hit_tokens("twice")) > 0


def check_holes(found: Served, model: str) -> None:
    check_hits(found, model)
    assert sum(found.hit_tokens("warm")) > 0
    assert found.counted_in_all("hole tokens", [f"hole: {name}" for name in HOLES_TOKENS]) > 0


def check_two_devices(found: Served, model: str) -> None:
    """Each device has its own heads, and all have the same latents."""
    check_holes(found, model)
    has_latents = model == "latent attention, experts"
    assert found.report["own"]["host_sharing_workers"] == (2 if has_latents else 1)


def check_four_devices(found: Served, model: str) -> None:
    """All devices have the same latents. Each of them stores a part of these."""
    check_holes(found, model)
    assert found.report["own"]["host_sharing_workers"] == 4


def check_graphs(found: Served, model: str) -> None:
    """All steps without prompts are replays of graphs."""
    check_features(found, model)
    assert found.report["replays"] > MIN_REPLAYS


def check_graphs_of_a_crowd(found: Served, model: str) -> None:
    check_crowd(found, model)
    assert found.report["replays"] > MIN_REPLAYS


def check_sleep(found: Served, model: str) -> None:
    """Memory and weights were freed. Host memory was emptied and is used again."""
    facts = found.report["facts"]
    assert facts["asleep bytes"] < facts["awake bytes"] / 2 and facts["has no weights"]
    for event in ("a sleep", "new weights"):
        assert sum(found.hit_tokens(f"after {event}")) == 0
        assert found.counted(f"loaded after {event}", "connector") > 0


def check_drafts(found: Served, model: str) -> None:
    drafted = found.counted_in_all("draft tokens")
    assert 0.02 * drafted < found.counted_in_all("accepted draft tokens") < drafted


class Case(NamedTuple):
    """Engines, one for each of some models.

    Attributes:
        check: Asserts that the engine used the feature of the case.
        pool_blocks: Blocks of the pool, by the number of KV cache groups.
        shares_process: Whether cases with the same environment run in one process.
    """

    models: Sequence[str]
    scenarios: Sequence[str]
    environ: Mapping[str, str]
    check: Callable[[Served, str], None]
    engine: Mapping[str, Any] = MappingProxyType({})
    pool_blocks: dict[int, int] = FULL_POOL_BLOCKS
    shares_process: bool = False


ALL = ("turns", "document", "salts", "damage", "failures", "holes", "lone_holes")
WITH_DRAFTS = ("turns", "document", "damage", "holes", "storm")
TWO_DEVICES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
CASES = {
    "kvext": Case(MODELS, ALL, ADAPTIVE, check_features, connector(), shares_process=True),
    "crowded": Case(
        MODELS,
        ("storm", "eviction"),
        ADAPTIVE,
        check_crowd,
        small_connector(),
        CROWDED_BLOCKS,
        shares_process=True,
    ),
    # The model with states is not among these, as its cell on two devices would have holes.
    "tensor parallel 2": Case(
        DENSE,
        ("turns", "document", "holes"),
        ADAPTIVE,
        check_two_devices,
        connector() | TWO_DEVICES,
    ),
    "retention by interval": Case(
        (*DENSE, "states"), ("turns", "document"), {INTERVAL: "256"}, check_hits
    ),
    "vLLM's prefix caching": Case(("states",), ("turns", "document"), PLUGIN_OFF, check_hits),
    # Models with experts are not among these. vLLM-Ascend 0.23.0 wakes up with their weights
    # transposed, for a trainer that loads new weights.
    "sleep and wake": Case(
        ("full attention", "windows"),
        ("sleeps",),
        ADAPTIVE,
        check_sleep,
        SLEEPING | connector(),
    ),
    "drafts": Case(
        tuple(draft_models.WRITERS),
        WITH_DRAFTS,
        PLUGIN_OFF,
        check_drafts,
        NO_PREFIX_CACHING,
    ),
}
if not IS_0_23:
    CASES["graphs"] = Case(WITH_GRAPHS, ALL, ADAPTIVE, check_graphs, connector() | GRAPHS)
    CASES["graphs of pieces"] = Case(
        ("windows",), ALL, {**ADAPTIVE, **PIECES}, check_graphs, connector() | GRAPHS_OF_PIECES
    )
    CASES["graphs, crowded"] = Case(
        ("windows",),
        ("storm", "eviction"),
        ADAPTIVE,
        check_graphs_of_a_crowd,
        small_connector() | GRAPHS,
        CROWDED_BLOCKS,
    )
if IS_LONG:
    CASES["tensor parallel 4"] = Case(
        ("latent attention, experts",),
        ("turns", "holes"),
        ADAPTIVE,
        check_four_devices,
        connector() | TWO_DEVICES | {"tensor_parallel_size": 4},
    )
if "V2" in RUNNERS:
    CASES["V2 runner"] = Case(
        MODELS, ALL, {**ADAPTIVE, **RUNNERS["V2"]}, check_features, connector()
    )
CELLS = [
    (model, name)
    for name, case in CASES.items()
    for model in case.models
    if not IS_SAMPLE or case.shares_process or (model, name) == ("windows", "sleep and wake")
]


def scenarios_of(model: str, name: str) -> list[str]:
    left_out = {"lone_holes"} if IS_SAMPLE or model in NO_HOLES else set()
    if model in draft_models.WRITERS:
        left_out = {*ALL, "eviction"} - {*WITH_DRAFTS}
    return [each for each in CASES[name].scenarios if each not in left_out]


def is_wrong_on_purpose(model: str, name: str, label: str) -> bool:
    if "kv_transfer_config" not in CASES[name].engine:
        return False
    if label.startswith("hole left out"):
        return model not in NO_HOLES
    if label in ("zeroed tails", "swapped tails"):
        return model in WITH_TAILS
    return label in ("zeroed rows", "swapped rows", "zeroed host memory")


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    """Reports by case and model, and by ``reference`` and model."""
    processes: dict[object, tuple[Mapping[str, str], dict[str, Plan]]] = {}
    for model in MODELS:
        folder = folder_of(model)
        of_model = ENGINES.get(model, {})
        names = [name for other, name in CELLS if other == model]
        asked = dict.fromkeys(each for name in names for each in scenarios_of(model, name))
        reference = of_model | pool_of(model) | NO_PREFIX_CACHING
        together = "" if IS_SAMPLE else model
        _, plans = processes.setdefault((together, "reference"), (PLUGIN_OFF, {}))
        plans[f"reference, {model}"] = Plan(folder, tuple(asked), engine=reference)
        for name in names:
            case = CASES[name]
            engine = of_model | pool_of(model, case.pool_blocks) | dict(case.engine)
            if model in draft_models.WRITERS:
                engine |= draft_models.drafts(folder)
            process = (together, "shared") if case.shares_process else (model, name)
            _, plans = processes.setdefault(process, (case.environ, {}))
            plans[f"{name}, {model}"] = Plan(folder, scenarios_of(model, name), engine=engine)
    return LazyReports(tmp_path_factory, processes.values(), NPU)


@pytest.mark.parametrize(("model", "name"), CELLS)
def test_answers_are_those_without_the_package(
    served: LazyReports, record_property: Any, model: str, name: str
) -> None:
    found = served[f"{name}, {model}"]
    reference = served[f"reference, {model}"]
    controls = [label for label in found.labels if is_wrong_on_purpose(model, name, label)]
    right = [label for label in found.labels if label not in controls]
    largest = found.check_equal(reference, right, NPU_TOLERANCE)
    wrong = {label: found.logprob_error(label, reference) for label in controls}
    record_property("largest error, controls", (largest, wrong))
    CASES[name].check(found, model)
    found.check_nothing_is_left()
    assert reference.counted_in_all("draft tokens") == 0
    holes = [wrong.pop(label) for label in controls if label.startswith("hole")]
    assert not holes or max(holes) > WRONG
    assert not wrong or min(wrong.values()) > WRONG
