# SPDX-License-Identifier: Apache-2.0
"""What comes back from host memory on the emulated NPU is what is computed without the package.

Each model is served by vLLM-Ascend without package, prefix caching and drafts, and with adaptive
retention and KvextConnector; with draft tokens its own proposer and rejection sampler run. Beside
what must be equal stand controls: what must differ. Sleep with requests and transfers under way is
among the late streams: see ``late_streams.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import draft_models
import pytest
from emulated_plans import (
    CROWDED_BLOCKS,
    GROUPS,
    SLEEPING,
    TOLERANCE,
    WRONG,
    connector,
    pool_of,
    small_connector,
)
from support.sample import IS_SAMPLE
from support.scenarios.answers import Served
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

SCENARIOS = ("turns", "document", "salts", "damage", "failures", "holes", "lone_holes")
CROWDED = ("storm", "eviction")

FEATURES: dict[str, tuple[str, ...]] = {
    "store and load": ("warm", "twice", "second turn"),
    "one document": ("first question", "second question", "four questions"),
    "holes": tuple(f"hole: {name}" for name in HOLES_TOKENS),
    "preemption and swap": ("storm", "after the storm"),
    "salts": ("salted", "other salt", "no salt", "same salt"),
    "failed copies": (
        *("failing stores", "after failed stores", "failing loads", "after failed loads"),
        *("after failures", "one part fails"),
    ),
    "holes, one request": (),
    "eviction": (),
}
"""By name the labels of the workload; without labels, those that begin as `BEGINNINGS` say."""
FEATURES_WITH_DRAFTS = tuple(FEATURES)[:4]
BEGINNINGS = {"holes, one request": "lone hole: ", "eviction": "round "}
LEFT_OUT = tuple(f"hole left out: {name}" for name in HOLES_TOKENS)
DAMAGED_ROWS, DAMAGED_TAILS = ("zeroed rows", "swapped rows"), ("zeroed tails", "swapped tails")

NO_HOLES = {"states", *draft_models.WRITERS}
"""Models in which no holes are left: where a chunk is missing, all behind it is computed. A state
needs all tokens before it; for drafts see docs/offload.md."""
WITH_TAILS = {"windows", "sinks, windows, experts", "states"}
"""Models with groups of which host memory holds what a boundary needs: windows, states."""
ENGINES: dict[str, dict[str, Any]] = {
    # vLLM has no prefix caching here unless it is asked for; and with the workload's 128 tokens a
    # step, prompts would wait for each answer: their parts are whole blocks of 128 tokens.
    "states": {"enable_prefix_caching": True, "max_num_batched_tokens": 512},
}
"""By model, what its engines need beside what all have."""
MODELS = tuple(GROUPS)[:2] if IS_SAMPLE else tuple(GROUPS)
CELLS = [
    (model, feature)
    for model in MODELS
    for feature in (FEATURES_WITH_DRAFTS if model in draft_models.WRITERS else FEATURES)
    if not (model in NO_HOLES and "holes" in feature)
    and not (IS_SAMPLE and feature == "holes, one request")
]


def has_hits(found: Served) -> bool:
    return sum(found.hit_tokens("twice")) > 0


def has_holes(found: Served) -> bool:
    return (
        has_hits(found)
        and sum(found.hit_tokens("warm")) > 0
        and found.counted_in_all("hole tokens", labels_of(found, "holes")) > 0
    )


def has_slept(found: Served) -> bool:
    """Memory and weights went away; host memory was emptied, and is used again."""
    facts, events = found.report["facts"], ("a sleep", "new weights")
    return (
        facts["asleep bytes"] < facts["awake bytes"] / 2
        and facts["has no weights"]
        and all(sum(found.hit_tokens(f"after {event}")) == 0 for event in events)
        and all(found.counted(f"loaded after {event}", "connector") > 0 for event in events)
    )


def drafts_are_accepted(found: Served) -> bool:
    drafted = found.counted_in_all("draft tokens")
    return 0.02 * drafted < found.counted_in_all("accepted draft tokens") < drafted


@dataclass(frozen=True)
class Alone:
    """A feature with an engine of its own.

    Attributes:
        is_met: Whether the engine did what the feature says.
        controls: Labels of what is wrong on purpose.
    """

    models: Sequence[str]
    scenarios: Sequence[str]
    environ: Mapping[str, str]
    is_met: Callable[[Served], bool]
    engine: Mapping[str, Any] = field(default_factory=dict)
    controls: Sequence[str] = ()


DENSE = ("full attention", "windows", "latent attention, experts")
TWO_DEVICES = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
ALONE = {
    # States on two devices are left out: their cell would ask for holes.
    "tensor parallel 2": Alone(
        *(DENSE, ("turns", "document", "holes"), ADAPTIVE, has_holes),
        engine=connector() | TWO_DEVICES,
        controls=LEFT_OUT,
    ),
    "retention by interval": Alone(
        (*DENSE, "states"), ("turns", "document"), {INTERVAL: "256"}, has_hits
    ),
    "vLLM's prefix caching": Alone(("states",), ("turns", "document"), PLUGIN_OFF, has_hits),
    # None with experts: vLLM-Ascend 0.23.0 wakes up with their weights transposed, for a trainer
    # that loads others.
    "sleep and wake": Alone(
        *(("full attention", "windows"), ("sleeps",), ADAPTIVE, has_slept),
        engine=SLEEPING | connector(),
        controls=("zeroed host memory",),
    ),
    "drafts": Alone(
        tuple(draft_models.WRITERS),
        ("turns", "document", "damage", "holes", "storm"),
        PLUGIN_OFF,
        drafts_are_accepted,
        NO_PREFIX_CACHING,
    ),
}
ALONE_CELLS = [
    (model, feature)
    for feature, alone in ALONE.items()
    for model in alone.models
    if not IS_SAMPLE or (model, feature) == ("full attention", "sleep and wake")
]


@pytest.fixture(scope="module")
def served(
    folder_of: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    """By name and model: ``reference``, ``kvext``, ``crowded``, and those of `ALONE`."""
    without: dict[str, Plan] = {}
    with_package: dict[str, Plan] = {}
    processes: list[tuple[Mapping[str, str], dict[str, Plan]]] = []
    for model in MODELS:
        folder, of_model = folder_of(model), ENGINES.get(model, {})
        scenarios, crowded = SCENARIOS, CROWDED
        pool, few = (of_model | pool_of(model, *blocks) for blocks in ((), (CROWDED_BLOCKS,)))
        reference = pool | NO_PREFIX_CACHING
        if model in draft_models.WRITERS:
            scenarios, crowded = ("turns", "document", "damage", "holes"), ("storm",)
            pool, few = (engine | draft_models.drafts(folder) for engine in (pool, few))
        elif IS_SAMPLE or model in NO_HOLES:
            scenarios = SCENARIOS[:-1]
        asleep = ("sleeps",) if (model, "sleep and wake") in ALONE_CELLS else ()
        asked = (*scenarios, *crowded, *asleep)
        without[f"reference, {model}"] = Plan(folder, asked, engine=reference)
        with_package |= {
            f"kvext, {model}": Plan(folder, scenarios, engine=connector() | pool),
            f"crowded, {model}": Plan(folder, crowded, engine=small_connector() | few),
        }
        for feature in (feature for other, feature in ALONE_CELLS if other == model):
            alone = ALONE[feature]
            plan = Plan(folder, alone.scenarios, engine=pool | alone.engine)
            processes.append((alone.environ, {f"{feature}, {model}": plan}))
        if not IS_SAMPLE or model == MODELS[-1]:  # Few models share a process.
            processes += [(PLUGIN_OFF, without), (ADAPTIVE, with_package)]
            without, with_package = {}, {}
    return LazyReports(tmp_path_factory, processes, NPU)


@pytest.mark.parametrize(("model", "feature"), ALONE_CELLS)
def test_answers_of_other_engines_are_those_without_the_package(
    served: LazyReports, report_cell: Any, model: str, feature: str
) -> None:
    found, reference = served[f"{feature}, {model}"], served[f"reference, {model}"]
    controls = ALONE[feature].controls
    right = [label for label in found.labels if label not in controls]
    wrong = [found.logprob_error(label, reference) for label in controls]
    largest = found.check_equal(reference, right, TOLERANCE)
    report_cell(feature, model, largest, max(wrong, default=math.nan))
    assert ALONE[feature].is_met(found), found.report
    assert not wrong or max(wrong) > WRONG
    found.check_nothing_is_left()


def labels_of(served: Served, feature: str) -> list[str]:
    beginning, labels = BEGINNINGS.get(feature), FEATURES[feature]
    return [
        label
        for label in served.labels
        if label in labels or (beginning is not None and label.startswith(beginning))
    ]


@pytest.mark.parametrize(("model", "feature"), CELLS)
def test_answers_are_those_without_the_package(
    served: LazyReports, report_cell: Any, model: str, feature: str
) -> None:
    kvext, reference = served[f"kvext, {model}"], served[f"reference, {model}"]
    is_crowded = feature in ("preemption and swap", "eviction")
    found = served[f"crowded, {model}"] if is_crowded else kvext
    controls = LEFT_OUT if "holes" in feature else DAMAGED_ROWS
    if model == "states":
        controls += DAMAGED_TAILS  # Most of its layers have no rows.
    largest = found.check_equal(reference, labels_of(found, feature), TOLERANCE)
    wrong = max(kvext.logprob_error(label, reference) for label in controls)
    report_cell(feature, model, largest, wrong)
    assert wrong > WRONG


@pytest.mark.parametrize("model", MODELS)
def test_what_is_wrong_in_host_memory_is_seen(served: LazyReports, model: str) -> None:
    found, reference = served[f"kvext, {model}"], served[f"reference, {model}"]
    for label in DAMAGED_ROWS + (DAMAGED_TAILS if model in WITH_TAILS else ()):
        assert found.logprob_error(label, reference) > WRONG, label
    assert found.logprob_error("intact", reference) <= TOLERANCE


@pytest.mark.parametrize("model", MODELS)
def test_each_feature_was_met(served: LazyReports, model: str) -> None:
    """Counts of what the names of the features say."""
    found, crowded = served[f"kvext, {model}"], served[f"crowded, {model}"]
    assert found.report["num_groups"] == GROUPS[model]
    assert sum(found.hit_tokens("warm")) > 0 and sum(found.hit_tokens("second turn")) > 0
    for name in ("hole tokens", "tokens behind holes"):
        is_met = found.counted_in_all(name, labels_of(found, "holes")) > 0
        assert is_met is (model not in NO_HOLES)
    assert crowded.counted("storm", "preemptions") > 0
    assert found.report["batched copies"]["calls"] > 0
    for each in (found, crowded):
        each.check_nothing_is_left()
    if model in draft_models.WRITERS:
        assert served[f"reference, {model}"].counted_in_all("draft tokens") == 0
        assert drafts_are_accepted(found) and drafts_are_accepted(crowded)
        return
    own = found.report["own"]
    assert found.hit_tokens("no salt") == [0] and found.hit_tokens("same salt") == [128]
    assert own["transfer_failures.load"] > 0 and own["transfer_failures.store"] > 0
    assert crowded.report["own"]["host_swapped_requests"] > 0
    assert crowded.report["own"]["host_removed_entries.evicted"] > 0


@pytest.mark.parametrize("model", [model for model in MODELS if model in NO_HOLES])
def test_where_a_chunk_is_missing_all_behind_it_is_computed(
    served: LazyReports, model: str
) -> None:
    found, reference = served[f"kvext, {model}"], served[f"reference, {model}"]
    of_holes = [label for label in found.labels if label.startswith("hole")]
    found.check_equal(reference, of_holes, TOLERANCE)
    # The first prompt of the round meets its own chunks only. States are at few boundaries.
    for name in ["in the middle"] if model == "states" else HOLES_TOKENS:
        assert found.hit_tokens(f"hole: {name}")[0] == HOLES_TOKENS[name][0][0]
