# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Models with states on the real engine: stock answers wrong, and does not with the repairs.

The answers are compared with those of an engine without prefix caching and drafts. ``KVEXT_RUNNER``
chooses the runner, see `support.scenarios.processes`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.sample import IS_LONG
from support.scenarios.answers import LOGPROB_TOLERANCE, Served, errors
from support.scenarios.processes import (
    IS_V2_RUNNER,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)
from support.scenarios.states import MTP, RUNNER_ENVIRON, plan
from support.states import state_models
from support.upstream_version import IS_SINCE_0_30

pytestmark = [pytest.mark.timeout(1200), pytest.mark.vllm(">=0.30")]

NUM_REQUESTS = 200 if IS_LONG else 8 if IS_V2_RUNNER else 40
"""Triton's interpreter, in which the kernels of the V2 runner run, takes seconds for a prompt."""
NUM_JOINING = 200 if IS_LONG else 60
VISIBLE = 20 * LOGPROB_TOLERANCE
"""A difference of a log-probability that is wrong. Rounding makes less than the tolerance."""


class Case(NamedTuple):
    """A defect of stock, and the repair that mends it.

    Attributes:
        repair: The name of the repair.
        label: The answers that are compared.
        engine: Further arguments of the engines.
    """

    repair: str
    model: str
    scenario: str
    label: str
    unit_tokens: int
    engine: dict[str, Any]
    has_drafts: bool = False
    is_async: bool = False
    attention_block_tokens: int = 0
    num_requests: int = NUM_REQUESTS


CASES: dict[str, Case] = {}
if IS_SINCE_0_30:
    CASES["hits inside blocks"] = Case(
        "block-copies",
        "qwen3-next, two layers per group",
        "seen_twice",
        "again",
        32,
        {"block_size": 128, "prefix_match_unit": 32, "max_num_batched_tokens": 512},
    )
# The CPU runner of 0.23 has no streams, so its engine schedules nothing asynchronously.
if IS_SINCE_0_30 and not IS_V2_RUNNER:
    CASES["counts of accepted drafts"] = Case(
        "accepted-drafts",
        "qwen3-next",
        "joining",
        "joining",
        32,
        {"max_num_batched_tokens": 512},
        has_drafts=True,
        is_async=True,
        num_requests=NUM_JOINING,
    )
if IS_V2_RUNNER:
    CASES["columns of states"] = Case(
        "state-columns",
        "falcon-h1",
        "behind_whole_blocks",
        "again",
        96,
        {"block_size": 32, "max_num_batched_tokens": 512},
        attention_block_tokens=32,
    )


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    @cache
    def folder_of(model: str, has_drafts: bool) -> Path:
        return state_models.write(tmp_path_factory.mktemp("model"), model, has_drafts)

    def plan_of(case: Case, is_reference: bool) -> Plan:
        made = plan(
            lambda: folder_of(case.model, case.has_drafts),
            [case.scenario],
            MTP if case.has_drafts and not is_reference else "",
            case.is_async and not is_reference,
            case.unit_tokens,
            **(NO_PREFIX_CACHING if is_reference else case.engine),
        )
        options = {
            **made.options,
            "attention_block_tokens": 0 if is_reference else case.attention_block_tokens,
            "num_requests": case.num_requests,
        }
        return Plan(made.model, made.scenarios, "repaired_states", made.engine, options)

    off = PLUGIN_OFF | RUNNER_ENVIRON
    started = []
    for name, case in CASES.items():
        without = {"VLLM_ASCEND_KVEXT_DISABLE": case.repair}
        started += [
            (off, {f"reference, {name}": plan_of(case, True)}),
            (off, {f"stock, {name}": plan_of(case, False)}),
            (without | RUNNER_ENVIRON, {f"without, {name}": plan_of(case, False)}),
            (RUNNER_ENVIRON, {f"repaired, {name}": plan_of(case, False)}),
        ]
    return LazyReports(tmp_path_factory, started)


@pytest.fixture(params=CASES)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def wrong(reports: LazyReports, kind: str, name: str) -> list[float]:
    """The differences of the answers that are wrong."""
    label = CASES[name].label
    found: Served = reports[f"{kind}, {name}"]
    reference = reports[f"reference, {name}"].answers(label)
    answers = found.answers(label)
    assert sum(answer.hit_tokens for answer in answers) > 0
    return [error for error in errors(answers, reference) if not error <= VISIBLE]


def test_stock_answers_wrong(reports: LazyReports, name: str) -> None:
    assert len(wrong(reports, "stock", name)) >= CASES[name].num_requests / 40


def test_only_the_repair_makes_the_difference(reports: LazyReports, name: str) -> None:
    assert wrong(reports, "without", name)


def test_answers_are_right_with_the_repair(reports: LazyReports, name: str) -> None:
    assert not wrong(reports, "repaired", name)


def test_the_case_meets_what_it_is_for(reports: LazyReports, name: str) -> None:
    case, report = CASES[name], reports[f"repaired, {name}"].report
    assert report["is_async"] is case.is_async
    hits = reports[f"repaired, {name}"].hit_tokens(case.label)
    if name == "hits inside blocks":
        assert sum(tokens % report["state block tokens"] > 0 for tokens in hits) > len(hits) / 2
    elif name == "counts of accepted drafts":
        assert report["state copies"]["after a step"] > len(hits) / 4
    else:
        assert report["state block tokens"] > case.attention_block_tokens
        assert sum(tokens > report["state block tokens"] for tokens in hits) > len(hits) / 2
