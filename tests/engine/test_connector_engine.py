# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KvextConnector on the real engine: the KV that host memory returns is the KV computed before."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.connector import (
    COMMON_TOKENS,
    CONTINUED_QUESTION,
    DAMAGED_BOUNDARIES_TOKENS,
    DOCUMENT_TOKENS,
    HOLES_TOKENS,
    LONE_HOLES_TOKENS,
    LONE_REPLY_TOKENS,
    PROMPT_LENGTHS,
    QUESTION_LENGTHS,
    SMALL_POOL_TOKENS,
)
from support.scenarios.engine import CHUNK_TOKENS, REPLY_TOKENS
from support.scenarios.processes import (
    ADAPTIVE,
    CPU,
    IS_V2_RUNNER,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    TWO_CPUS,
    LazyReports,
    Plan,
)

BLOCK_TOKENS = CPU.block_tokens


class Setting(NamedTuple):
    """An engine with a connector, and the scenarios that it serves; see `Plan`.

    An engine that ``is_main_only`` shows little about other versions of vLLM.
    """

    scenarios: Sequence[str]
    model: str = "one window"
    options: Mapping[str, Any] = {}
    engine: Mapping[str, Any] = {}
    is_main_only: bool = False


CONNECTOR = processes.connector()["kv_transfer_config"]
ADDRESSED = {
    "kv_connector": "AddressedConnector",
    "kv_connector_module_path": "support.connector.stand_ins",
    "kv_role": "kv_both",
}


def several(*connectors: Mapping[str, Any]) -> dict[str, Any]:
    """An engine with a MultiConnector of these connectors."""
    return {
        "kv_transfer_config": CONNECTOR
        | {
            "kv_connector": "MultiConnector",
            "kv_connector_extra_config": {"connectors": list(connectors)},
        },
        # vLLM's logger of a MultiConnector cannot read connectors' reports in this process.
        "disable_log_stats": True,
    }


SMALL_POOL = {"num_gpu_blocks_override": SMALL_POOL_TOKENS // BLOCK_TOKENS}
STORE_ALL = {"store_policy": "all"}

SETTINGS = {
    "default": Setting(("turns", "document", "salts", "damage", "failures", "continued_tails")),
    "no prefix caching": Setting(("turns", "document"), engine=NO_PREFIX_CACHING),
    "storm, no prefix caching": Setting(
        ("storm",), engine=NO_PREFIX_CACHING | SMALL_POOL, is_main_only=True
    ),
    "alternating": Setting(("turns", "damage"), "alternating", is_main_only=True),
    "three windows": Setting(("turns", "damage"), "three windows", is_main_only=True),
    "full": Setting(("turns", "damage"), "full"),
    "holes": Setting(("turns", "holes", "lone_holes"), "full", STORE_ALL),
    "holes, one window": Setting(("holes", "lone_holes"), options=STORE_ALL),
    "holes, three windows": Setting(("holes",), "three windows", STORE_ALL, is_main_only=True),
    "holes, no prefix caching": Setting(
        ("holes",), "full", STORE_ALL, NO_PREFIX_CACHING, is_main_only=True
    ),
    "no hybrid manager": Setting(("turns",), engine={"disable_hybrid_kv_cache_manager": True}),
    "small host memory": Setting(
        ("eviction", "storm"),
        options={"host_memory_gib": 1 / 1024, "load_if_slower": False},
        engine=SMALL_POOL,
    ),
    "swap": Setting(("storm",), engine=SMALL_POOL),
    "module path": Setting(
        ("turns",),
        engine={
            "kv_transfer_config": CONNECTOR
            | {"kv_connector_module_path": "vllm_ascend_kvext.connector"}
        },
        is_main_only=True,
    ),
    "one of several": Setting(("turns",), engine=several(CONNECTOR)),
    # Damaged KV is the control: it shows that requests read what is loaded from host memory.
    "before another handshake": Setting(
        ("turns", "damage", "failures"), engine=several(CONNECTOR, ADDRESSED)
    ),
    "behind another handshake": Setting(
        ("turns", "damage", "failures"), engine=several(ADDRESSED, CONNECTOR)
    ),
}
ADAPTIVE_SETTINGS = {
    "adaptive": Setting(("turns", "document")),
    "storm, adaptive": Setting(("storm",), engine=SMALL_POOL),
}
TWO_WORKERS_SETTINGS = {
    "two workers": Setting(
        ("turns", "document", "holes"), "full", STORE_ALL, {"tensor_parallel_size": 2}
    ),
    # One KV head, which both workers have: host memory has it once.
    "two workers, one head": Setting(
        ("turns", "document", "holes"),
        options=STORE_ALL,
        engine={"tensor_parallel_size": 2},
    ),
    "two workers, two handshakes": Setting(
        ("turns",), "full", engine=several(ADDRESSED, CONNECTOR) | {"tensor_parallel_size": 2}
    ),
}
ALL_SETTINGS = SETTINGS | ADAPTIVE_SETTINGS
if IS_V2_RUNNER:  # A step takes several times as long.
    names = ("default", "full", "holes", "holes, one window")
    SETTINGS = {name: SETTINGS[name] for name in names}
    TWO_WORKERS_SETTINGS["two workers, one window"] = Setting(
        ("turns",), engine={"tensor_parallel_size": 2}
    )
    for is_async in (True, False):
        SETTINGS[f"asynchronous: {is_async}"] = Setting(
            ("turns", "holes"), "full", STORE_ALL, {"async_scheduling": is_async}
        )
    ALL_SETTINGS = SETTINGS | TWO_WORKERS_SETTINGS


def named(*names: str) -> list[Any]:
    return [
        pytest.param(
            name, marks=pytest.mark.main_version if ALL_SETTINGS[name].is_main_only else ()
        )
        for name in names
        if name in ALL_SETTINGS
    ]


def with_scenario(scenario: str) -> list[Any]:
    return named(*(name for name, each in ALL_SETTINGS.items() if scenario in each.scenarios))


@pytest.fixture(scope="module")
def reports(
    model_folder: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    """Reports by setting. By model: answers without plugin, connector and prefix caching."""
    chosen = {
        name: setting
        for name, setting in ALL_SETTINGS.items()
        if not (IS_SAMPLE and setting.is_main_only)
    }
    scenarios: dict[str, dict[str, None]] = {}
    for setting in chosen.values():
        scenarios.setdefault(setting.model, {}).update(dict.fromkeys(setting.scenarios))
    references = {
        f"reference, {model}": Plan(model_folder(model), tuple(names), engine=NO_PREFIX_CACHING)
        for model, names in scenarios.items()
    }
    plans = {
        name: Plan(
            model_folder(setting.model),
            setting.scenarios,
            engine=processes.connector(**setting.options) | setting.engine,
        )
        for name, setting in chosen.items()
    }
    started = [
        (PLUGIN_OFF, references),
        ({}, {name: plans[name] for name in plans if name in SETTINGS}),
        (ADAPTIVE, {name: plans[name] for name in plans if name in ADAPTIVE_SETTINGS}),
        (TWO_CPUS, {name: plans[name] for name in plans if name in TWO_WORKERS_SETTINGS}),
    ]
    if IS_V2_RUNNER:  # This keeps each engine within the time that a test may take.
        started = [(environ, {name: of[name]}) for environ, of in started for name in of]
    return LazyReports(tmp_path_factory, started)


@pytest.fixture
def setting(request: pytest.FixtureRequest, reports: LazyReports) -> Served:
    return reports[request.param]


@pytest.fixture
def reference(request: pytest.FixtureRequest, reports: LazyReports) -> Served:
    """The same model without plugin, connector and prefix caching."""
    name = request.node.callspec.params["setting"]
    return reports[f"reference, {ALL_SETTINGS[name].model}"]


def floor(num_tokens: int) -> int:
    return num_tokens // BLOCK_TOKENS * BLOCK_TOKENS


DAMAGED = ("zeroed rows", "swapped rows", "zeroed tails", "swapped tails")
GROUPS = {"default": 6, "alternating": 2, "three windows": 6, "full": 1, "no hybrid manager": 1}
OF_PROMPTS = [floor(length - 1) for length in PROMPT_LENGTHS]
# The last token of an answer is not computed.
OF_TURNS = [floor(length + REPLY_TOKENS - 1) for length in PROMPT_LENGTHS]


@pytest.mark.parametrize("setting", named(*ALL_SETTINGS), indirect=True)
def test_outputs_are_those_without_a_connector(
    setting: Served, reference: Served, request: pytest.FixtureRequest
) -> None:
    labels = [
        label
        for label in setting.labels
        if not label.startswith(("zeroed", "swapped", "hole left out"))
    ]
    assert len(labels) > 1
    # The first requests of an engine are computed in the same chunks as the reference's. Two
    # workers add up in another order.
    has_two = request.node.callspec.params["setting"] in TWO_WORKERS_SETTINGS
    exact = () if has_two else ("cold",)
    setting.check_equal(reference, labels, lambda label: LOGPROB_TOLERANCE * (label not in exact))


@pytest.mark.parametrize("setting", named(*ALL_SETTINGS), indirect=True)
def test_nothing_is_left_when_all_is_done(setting: Served) -> None:
    setting.check_nothing_is_left()
    assert setting.report["own"]["host_capacity_bytes"] > 0


@pytest.mark.parametrize("setting", named("two workers, one head"), indirect=True)
def test_workers_with_the_same_head_keep_it_once(setting: Served) -> None:
    assert setting.report["own"]["host_sharing_workers"] == 2


@pytest.mark.parametrize("setting", named(*GROUPS), indirect=True)
def test_engines_have_the_groups_and_the_runner_that_they_are_tested_for(
    setting: Served, request: pytest.FixtureRequest
) -> None:
    assert setting.report["num_groups"] == GROUPS[request.node.callspec.params["setting"]]
    assert setting.report["is_v2_runner"] is IS_V2_RUNNER


# Hits.


@pytest.mark.parametrize("setting", with_scenario("turns"), indirect=True)
def test_hits_end_at_the_last_row_unit(setting: Served) -> None:
    assert setting.hit_tokens("cold") == [0] * len(PROMPT_LENGTHS)
    assert setting.hit_tokens("warm") == OF_PROMPTS
    assert setting.hit_tokens("twice") == OF_PROMPTS
    assert setting.hit_tokens("second turn") == OF_TURNS
    assert setting.hit_tokens("forgotten") == [0]


@pytest.mark.parametrize("setting", with_scenario("document"), indirect=True)
def test_questions_at_once_resume_where_the_document_ends(setting: Served) -> None:
    boundary_tokens = floor(DOCUMENT_TOKENS)
    assert setting.hit_tokens("first question") == [0]
    assert 0 < setting.hit_tokens("second question")[0] <= boundary_tokens
    assert setting.hit_tokens("four questions") == [boundary_tokens] * 4


@pytest.mark.parametrize("setting", with_scenario("continued_tails"), indirect=True)
def test_questions_resume_at_tails_that_continue_those_of_their_beginning(
    setting: Served, reference: Served
) -> None:
    hits = [floor(COMMON_TOKENS + length - 1) for length in QUESTION_LENGTHS]
    chains = setting.report["facts"]["chains"]
    assert [chain[-1][1] for chain in chains] == hits
    assert chains[CONTINUED_QUESTION] == [
        [COMMON_TOKENS, COMMON_TOKENS],
        [COMMON_TOKENS, hits[CONTINUED_QUESTION]],
    ]
    assert setting.hit_tokens("questions again") == hits
    for part in ("base", "rest"):  # The control: both parts are read.
        assert setting.logprob_error(f"zeroed {part}", reference) > 100 * LOGPROB_TOLERANCE
    assert setting.hit_tokens("base fails")[0] < hits[CONTINUED_QUESTION]
    assert setting.report["facts"]["chain that has failed"] == ["gone", "gone"]
    # The question has stored its tails again. Others may have lost theirs with the base.
    hit_tokens = setting.hit_tokens("after the base has failed")
    assert hit_tokens[CONTINUED_QUESTION] == hits[CONTINUED_QUESTION]


@pytest.mark.parametrize("setting", named("default"), indirect=True)
def test_a_salt_hits_its_own_only(setting: Served) -> None:
    hits = {label: setting.hit_tokens(label) for label in ("other salt", "no salt", "same salt")}
    assert hits == {"other salt": [0], "no salt": [0], "same salt": [192]}


@pytest.mark.parametrize("name", HOLES_TOKENS)
@pytest.mark.parametrize("setting", with_scenario("holes"), indirect=True)
def test_only_holes_are_computed_before_what_is_loaded(setting: Served, name: str) -> None:
    """Three prompts share the lost tokens. The first two find nothing stored behind them."""
    lost_tokens = sum(end - first for first, end in HOLES_TOKENS[name])
    label, computed_tokens = f"hole: {name}", setting.report["facts"][f"hole: {name}"]
    assert computed_tokens >= lost_tokens
    # A model with windows computes a hole from the last tails before it.
    most_tokens = max(end for _, end in HOLES_TOKENS[name])
    if setting.report["num_groups"] == 1:
        assert computed_tokens % lost_tokens == 0
        most_tokens = lost_tokens
    for answer in setting.answers(label):
        assert answer.hit_tokens >= floor(answer.prompt_tokens - 1) - most_tokens


@pytest.mark.parametrize("name", LONE_HOLES_TOKENS)
@pytest.mark.parametrize("setting", with_scenario("lone_holes"), indirect=True)
def test_what_is_not_found_is_computed_once(setting: Served, name: str) -> None:
    label = f"lone hole: {name}"
    (answer,) = setting.answers(label)
    computed_tokens = answer.prompt_tokens - answer.hit_tokens + LONE_REPLY_TOKENS - 1
    assert setting.counted(label, "computed tokens") == computed_tokens
    assert answer.hit_tokens > 0 or name == "everything"


@pytest.mark.parametrize("setting", with_scenario("holes"), indirect=True)
def test_another_schedule_plans_steps_only_while_there_are_holes(setting: Served) -> None:
    """All repairs are in effect here."""
    with_holes = [label for label in setting.labels if setting.counted(label, "hole tokens")]
    others = [label for label in setting.labels if label not in with_holes]
    assert setting.counted_in_all("steps before another schedule", with_holes) > 0
    assert setting.counted_in_all("steps", others) > 0
    assert setting.counted_in_all("steps before another schedule", others) == 0


# The controls show that the tests above can fail.


@pytest.mark.parametrize("name", HOLES_TOKENS)
@pytest.mark.parametrize("setting", with_scenario("holes"), indirect=True)
def test_holes_that_are_not_computed_show_in_the_outputs(
    setting: Served, reference: Served, name: str
) -> None:
    label = f"hole left out: {name}"
    assert setting.logprob_error(label, reference) > 100 * LOGPROB_TOLERANCE


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("setting", with_scenario("damage"), indirect=True)
def test_wrong_host_bytes_show_in_the_outputs(
    setting: Served, reference: Served, damage: str
) -> None:
    boundary_tokens = DAMAGED_BOUNDARIES_TOKENS["tails"]
    places = setting.report["facts"][damage]
    if "tails" in damage and setting.report["num_groups"] == 1:
        assert places == []
        return
    assert len(places) == 2
    assert setting.hit_tokens(damage) == [boundary_tokens]
    assert setting.logprob_error(damage, reference) > 100 * LOGPROB_TOLERANCE


# Too little memory, and failures.


@pytest.mark.parametrize("setting", named("small host memory"), indirect=True)
def test_a_small_host_memory_evicts(setting: Served) -> None:
    own = setting.report["own"]
    assert own["host_removed_entries.evicted"] > 0
    assert own["host_shortfalls.evicted"] > 0
    assert own["host_bytes"] <= own["host_capacity_bytes"]


@pytest.mark.parametrize("setting", with_scenario("storm"), indirect=True)
def test_requests_were_preempted(setting: Served) -> None:
    assert setting.counted("storm", "preemptions") > 0


@pytest.mark.parametrize("setting", named("swap"), indirect=True)
def test_what_is_preempted_comes_back(setting: Served) -> None:
    own = setting.report["own"]
    assert own["host_swapped_requests"] > 0
    # No other request of the storm can load anything.
    assert setting.hit_tokens("storm") == [0] * 10
    assert own["host_hit_requests"] > len(setting.answers("after the storm"))


@pytest.mark.parametrize("setting", named("default"), indirect=True)
def test_failed_stores_lose_the_store(setting: Served) -> None:
    assert setting.report["own"]["transfer_failures.store"] > 0
    hits = setting.hit_tokens("after failed stores")
    complete = [floor(answer.prompt_tokens - 1) for answer in setting.answers("failing stores")]
    assert all(found <= most for found, most in zip(hits, complete, strict=True))
    assert hits != complete


@pytest.mark.parametrize("setting", named("default"), indirect=True)
def test_failed_loads_are_computed(setting: Served) -> None:
    assert setting.report["own"]["transfer_failures.load"] > 0
    assert setting.counted("failing loads", "connector") > 0
    complete = [floor(answer.prompt_tokens - 1) for answer in setting.answers("failing loads")]
    assert setting.hit_tokens("after failures") == complete
    assert 0 < setting.counted("one part fails", "hole tokens") <= CHUNK_TOKENS
