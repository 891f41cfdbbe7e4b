# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Blended requests on the real engine give the answers that plain torch computes.

`test_request_machine` checks on the scheduler what other requests see of random blended ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.blending.oracle import Oracle, Reused
from support.blending.served import (
    MAX_TOKENS,
    MIN_TOKENS,
    expected_reuse,
    num_tokens,
    oracle_error,
)
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE as SAME_TOLERANCE
from support.scenarios.answers import Answer, errors
from support.scenarios.blending import (
    CROWD,
    CROWD_POOL_TOKENS,
    CROWD_REPLY_TOKENS,
    HEADS_TOKENS,
    ORDERS,
    REPLY_TOKENS,
    SHORT_TOKENS,
)
from support.scenarios.documents import SEPARATOR
from support.scenarios.processes import (
    CPU,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    TWO_CPUS,
    LazyReports,
    Plan,
    Reports,
)
from tiny_models import WINDOW_TOKENS

ORACLE_TOLERANCE = 1e-3
"""The tolerance of log-probabilities in fp32. The largest seen difference was 3e-4."""
SINK_IDS = (7, 8, 9)
LONG_SINK_IDS = tuple(range(100, 175))
"""A sink of some blocks and some tokens, longer than a window."""
WRONG = 0.1
"""The minimum difference of log-probabilities if something is wrong."""
IN_SMALL_POOL = CROWD | {"num_gpu_blocks_override": CROWD_POOL_TOKENS // CPU.block_tokens}
PARAMS = {"kvext_exact_tokens", "kvext_reused_tokens", "kvext_recomputed_tokens"}


class Setting(NamedTuple):
    """An engine that reuses segments, and the scenarios that it serves.

    See `support.scenarios.blending`.

    An engine that ``is_main_only`` shows nothing about other versions of vLLM.
    """

    model: str
    scenarios: Sequence[str] = ("orders",)
    heads: Sequence[int] = (16,)
    sink_ids: Sequence[int] | None = None
    has_context: bool = False
    learns: bool = False
    engine: Mapping[str, Any] = {}
    is_main_only: bool = False

    @property
    def window_tokens(self) -> int:
        return 0 if self.model in ("full", "qwen3") else WINDOW_TOKENS

    def plan(self, model: Path) -> Plan:
        connector = processes.blending(
            separator=SEPARATOR,
            learn=self.learns,
            sink=self.sink_ids,
            context=self.has_context,
        )
        options = {"heads": self.heads, "has_context": self.has_context}
        return Plan(model, self.scenarios, "blending", connector | self.engine, options)

    def expected_reuse(
        self, answer: Answer, head_tokens: int = 16, beginning: Sequence[int] | None = None
    ) -> list[Any]:
        return expected_reuse(answer, head_tokens, self.window_tokens, beginning)


TWO_WORKERS, ONE_HEAD = "crowd, two workers", "gemma3, two workers"
SHORT, SHORT_WITH_WRONG_KEYS = "short documents", "short documents, wrong keys"
ALL_SETTINGS = {
    "llama": Setting("full", ("orders", "exact", "controls"), HEADS_TOKENS),
    "qwen3": Setting("qwen3", sink_ids=SINK_IDS, is_main_only=True),
    "gemma3": Setting("one window", ("orders", "exact")),
    "gemma3, long sink": Setting(
        "one window", ("orders", "exact"), sink_ids=LONG_SINK_IDS, is_main_only=True
    ),
    "llama, context": Setting("full", has_context=True),
    "gemma3, context": Setting("one window", has_context=True, is_main_only=True),
    "gpt-oss": Setting("gpt-oss", is_main_only=True),
    "crowd": Setting("full", ("crowd",), engine=IN_SMALL_POOL),
    TWO_WORKERS: Setting(
        "full", ("crowd",), engine={**IN_SMALL_POOL, "tensor_parallel_size": 2}, is_main_only=True
    ),
    # One KV head, which both workers have, so they share host memory.
    ONE_HEAD: Setting(
        "one window", ("orders", "exact"), engine={"tensor_parallel_size": 2}, is_main_only=True
    ),
    SHORT: Setting("full", ("short",), learns=True),
    SHORT_WITH_WRONG_KEYS: Setting("full", ("short_with_wrong_keys",), learns=True),
}
SETTINGS = {
    name: setting
    for name, setting in ALL_SETTINGS.items()
    if not (IS_SAMPLE and setting.is_main_only)
}
CROWDS = [name for name in SETTINGS if "crowd" in SETTINGS[name].scenarios]

Oracles = Callable[[str], Oracle]
Models = Callable[[str], Path]
"""The type of the fixture ``model_folder``."""


@pytest.fixture(scope="module")
def reports(model_folder: Models, tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    """The reports, by setting. Two workers have a process with a CPU for each."""
    plans = {name: setting.plan(model_folder(setting.model)) for name, setting in SETTINGS.items()}
    of_two = {name: plans.pop(name) for name in [*plans] if plans[name].num_devices > 1}
    started = [({}, plans), (TWO_CPUS, of_two)]
    return LazyReports(tmp_path_factory, started)


@pytest.fixture(scope="module")
def references(
    reports: LazyReports, model_folder: Models, tmp_path_factory: pytest.TempPathFactory
) -> Reports:
    """Prompts of which no KV may be approximate, without plugin, connector and prefix caching."""
    plans = {}
    for name, setting in SETTINGS.items():
        prompts = {
            label: (
                [answer.prompt for answer in unblended(reports, name, label)],
                CROWD_REPLY_TOKENS if label == "crowd" else REPLY_TOKENS,
            )
            for label in reports[name].labels
            if label.startswith(("exact", "follows")) or label == "crowd"
        }
        if prompts:
            model, options = model_folder(setting.model), {"prompts": prompts}
            plans[name] = Plan(model, ["plain"], "blending", NO_PREFIX_CACHING, options)
    return processes.serve(tmp_path_factory, plans, PLUGIN_OFF)


@pytest.fixture(scope="module")
def oracles(model_folder: Models, reports: LazyReports) -> Oracles:
    @cache
    def oracle(name: str) -> Oracle:
        sinks = reports[name].report["facts"]["sinks"]
        return Oracle(model_folder(SETTINGS[name].model), sinks, MAX_TOKENS)

    return oracle


def unblended(reports: LazyReports, name: str, label: str) -> list[Answer]:
    """Answers that must equal those of an engine without a connector."""
    found = reports[name].answers(label)
    return [each for each in found if not each.segments or label.startswith("exact")]


def difference(some: Sequence[Answer], others: Sequence[Answer]) -> float:
    """The largest difference of a top-5 log-probability. ``some`` may have the shorter replies."""
    for one, other in zip(some, others, strict=True):
        assert one.prompt == other.prompt
        assert one.reply == other.reply[: len(one.reply)]
    return max(errors(some, others))


OF_HEADS = [
    (name, f"heads {head_tokens}", head_tokens)
    for name, setting in SETTINGS.items()
    if "orders" in setting.scenarios
    for head_tokens in setting.heads
]
EXACT = [name for name, setting in SETTINGS.items() if "exact" in setting.scenarios]


# The approximate answers are marked as approximate.


@pytest.mark.parametrize(("name", "label", "head_tokens"), OF_HEADS)
def test_blended_answers_are_those_of_the_oracle(
    reports: LazyReports, oracles: Oracles, name: str, label: str, head_tokens: int
) -> None:
    setting, found = SETTINGS[name], reports[name].answers(label)
    assert len(found) == len(ORDERS) + 1
    _, beginning = reports[name].report["facts"]["sinks"][0]
    begin = [answer.prompt[: len(beginning)] == beginning for answer in found]
    assert sum(begin) == (3 if setting.has_context else 0)
    for answer in found:
        reused = setting.expected_reuse(answer, head_tokens, beginning)
        assert answer.reused_tokens == num_tokens(reused) > 0
        assert oracle_error(oracles(name), answer, reused) <= ORACLE_TOLERANCE
        # The answer can be told from full recompute.
        assert oracle_error(oracles(name), answer, ()) > WRONG


def test_short_documents_of_different_tokens_are_reused_at_their_third_sighting(
    reports: LazyReports, oracles: Oracles
) -> None:
    """These documents have too few pairs, so the engine compares keys of a text of its own."""
    for label in ("first", "second"):
        (answer,) = reports[SHORT].answers(label)
        assert answer.params is None
    (answer,) = reports[SHORT].answers("third")
    reused = [
        Reused(first + 16, end, (first, end), number)
        for number, (first, end) in enumerate(answer.segments)
    ]
    assert answer.reused_tokens == num_tokens(reused) == 2 * (SHORT_TOKENS - 16)
    assert oracle_error(oracles(SHORT), answer, reused) <= ORACLE_TOLERANCE
    assert oracle_error(oracles(SHORT), answer, ()) > WRONG, "full recompute has the same answer"


def test_of_a_model_with_wrong_keys_short_documents_are_not_learned_or_reused(
    reports: LazyReports, oracles: Oracles
) -> None:
    found = reports[SHORT_WITH_WRONG_KEYS].report
    assert found["facts"]["why no reuse"].startswith("keys of the first layer, token ")
    assert found["own"]["blend_stored_segments"] == 0
    for label in ("first", "second", "third"):
        (answer,) = reports[SHORT_WITH_WRONG_KEYS].answers(label)
        assert answer.params is None
        assert oracle_error(oracles(SHORT_WITH_WRONG_KEYS), answer, ()) <= ORACLE_TOLERANCE


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != SHORT_WITH_WRONG_KEYS])
def test_tokens_of_a_response_add_up(reports: LazyReports, name: str) -> None:
    found = [
        (label, answer)
        for label in reports[name].labels
        for answer in reports[name].answers(label)
        if answer.params is not None
    ]
    assert found
    for label, answer in found:
        assert set(answer.params or ()) == PARAMS
        assert sum((answer.params or {}).values()) == len(answer.prompt)
        assert answer.reused_tokens >= MIN_TOKENS
        if label != "crowd":  # A preempted request may hit more.
            assert answer.hit_tokens == answer.exact_tokens + answer.reused_tokens


@pytest.mark.parametrize(
    "label", ["wrong: not rotated", "wrong: swapped", "wrong: zeroed keys", "right after wrong"]
)
def test_what_is_loaded_wrong_shows(reports: LazyReports, oracles: Oracles, label: str) -> None:
    (answer,) = reports["llama"].answers(label)
    assert (answer.exact_tokens > 0) == (label == "right after wrong")
    reused = SETTINGS["llama"].expected_reuse(answer)
    assert answer.reused_tokens == num_tokens(reused) > 0
    error = oracle_error(oracles("llama"), answer, reused)
    assert error > WRONG if label.startswith("wrong") else error <= ORACLE_TOLERANCE


@pytest.mark.skipif(IS_SAMPLE, reason="a sample has no engine of two workers")
@pytest.mark.parametrize(("name", "num_workers"), [(TWO_WORKERS, 1), (ONE_HEAD, 2)])
def test_workers_with_the_same_head_share_host_memory(
    reports: LazyReports, name: str, num_workers: int
) -> None:
    assert reports[name].report["own"]["host_sharing_workers"] == num_workers


# These answers must be exact.


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("label", ["exact: long heads", "exact: in place"])
def test_with_heads_as_long_as_segments_and_in_place_nothing_is_approximate(
    reports: LazyReports, references: Reports, name: str, label: str
) -> None:
    found = reports[name].answers(label)
    if label == "exact: in place":
        assert all(answer.reused_tokens > 0 for answer in found)
    else:
        assert all(answer.segments and answer.params is None for answer in found)
    assert difference(found, references[name].answers(label)) <= SAME_TOLERANCE


# Requests beside others.


@pytest.mark.parametrize("name", CROWDS)
def test_blended_requests_of_a_crowd_answer_as_alone(
    reports: LazyReports, oracles: Oracles, name: str
) -> None:
    # The end of loads decides which requests are preempted.
    assert reports[name].report["facts"]["preemptions"] > 0
    alone = reports[name].answers("alone")
    crowd = [answer for answer in reports[name].answers("crowd") if answer.segments]
    assert len(crowd) == len(alone) == 8
    assert difference(alone, crowd) <= SAME_TOLERANCE
    for answer in crowd:
        reused = SETTINGS[name].expected_reuse(answer)
        assert answer.reused_tokens == num_tokens(reused) > 0
        assert oracle_error(oracles(name), answer, reused) <= ORACLE_TOLERANCE


@pytest.mark.parametrize("name", CROWDS)
def test_plain_requests_of_a_crowd_answer_as_without_a_connector(
    reports: LazyReports, references: Reports, name: str
) -> None:
    crowd = unblended(reports, name, "crowd")
    assert len(crowd) == 8
    assert all(answer.params is None for answer in crowd)
    assert difference(crowd, references[name].answers("crowd")) <= SAME_TOLERANCE


@pytest.mark.parametrize("label", ["follows", "follows unprotected"])
def test_a_plain_request_sees_nothing_of_a_blended_one(
    reports: LazyReports, references: Reports, label: str
) -> None:
    """The plain request continues the blended one. Without protection, it hits blended blocks."""
    found = reports["llama"].answers(label)
    error = max(errors(found, references["llama"].answers(label)))
    assert error > WRONG if label == "follows unprotected" else error <= SAME_TOLERANCE


@pytest.mark.parametrize("name", SETTINGS)
def test_nothing_is_left_when_all_is_done(reports: LazyReports, name: str) -> None:
    reports[name].check_nothing_is_left()
