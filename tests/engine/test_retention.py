# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Retention on the real engine: reuse, and the same tokens with hits, evictions and hints."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.sample import IS_SAMPLE
from support.scenarios import processes
from support.scenarios.answers import LOGPROB_TOLERANCE, Served
from support.scenarios.processes import (
    ADAPTIVE,
    CPU,
    DENSE,
    INTERVAL,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    LazyReports,
    Plan,
)
from support.scenarios.retention import POOL_TOKENS, SYSTEM_PROMPT_TOKENS

from vllm_ascend_kvext.features import DEFAULTS
from vllm_ascend_kvext.settings import DISABLE_VARIABLE

BLOCK_TOKENS = CPU.block_tokens
RETAINED = {
    "interval 0": {INTERVAL: "0"},
    "adaptive": ADAPTIVE,
    "adaptive and a grid": {**ADAPTIVE, INTERVAL: "128"},
}
SETTINGS = {"stock": PLUGIN_OFF, "unset": {}, **RETAINED}
ON_EVERY_VERSION = ("stock", "interval 0", "adaptive")
"""The settings for every version. The others need two more engines, and show nothing more there."""

SCENARIOS = ("chat", "storm", "corruption", "branches")
ALL_DISABLED = {DISABLE_VARIABLE: ",".join(feature.name for feature in DEFAULTS)}
OWN_PROCESS = {INTERVAL: "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}

UNTOUCHED = ("first turn", "sent again", "second turn", "edited", "storm", "after the storm")
CORRUPTED = ("window corrupted", "full corrupted")


def each_of(settings):
    marks = {
        name: () if name in ON_EVERY_VERSION else pytest.mark.main_version for name in settings
    }
    return [pytest.param(name, marks=mark) for name, mark in marks.items()]


def plan(model: Path, *scenarios: str, **engine: object) -> Plan:
    pool = {"num_gpu_blocks_override": POOL_TOKENS // BLOCK_TOKENS}
    return Plan(model, scenarios or SCENARIOS, "retention", pool | engine)


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> LazyReports:
    """The served engines, by setting.

    ``uncached`` is the reference: no plugin, no prefix caching.
    """
    plans = {name: {name: plan(tiny_model)} for name in SETTINGS}
    plans["stock"] |= {
        "uncached": plan(tiny_model, **NO_PREFIX_CACHING),
        "dense": plan(tiny_model, **DENSE),
    }
    if not IS_SAMPLE:
        asynchronous = {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler"}
        plans["interval 0"]["asynchronous"] = plan(tiny_model, "chat", "storm", **asynchronous)
    return LazyReports(
        tmp_path_factory,
        [
            *((environ, plans[name]) for name, environ in SETTINGS.items()),
            (ALL_DISABLED, {"all disabled": plan(tiny_model)}),
            (OWN_PROCESS, {"own process": plan(tiny_model, "chat")}),
        ],
    )


@pytest.fixture(params=each_of(SETTINGS))
def setting(request: pytest.FixtureRequest, served: LazyReports) -> Served:
    return served[request.param]


@pytest.fixture(params=each_of(RETAINED))
def retained(request: pytest.FixtureRequest, served: LazyReports) -> Served:
    return served[request.param]


@pytest.fixture
def uncached(served: LazyReports) -> Served:
    return served["uncached"]


@pytest.fixture
def dense(served: LazyReports) -> Served:
    """An engine with stock prefix caching of every block."""
    return served["dense"]


@pytest.fixture
def adaptive(served: LazyReports) -> Served:
    return served["adaptive"]


@pytest.fixture
def latest_only(served: LazyReports) -> Served:
    return served["interval 0"]


def test_outputs_are_those_without_prefix_caching(setting: Served, uncached: Served) -> None:
    labels = [label for label in setting.labels if label not in CORRUPTED]
    assert len(labels) > 8
    setting.check_equal(uncached, labels)


@pytest.mark.parametrize("label", CORRUPTED)
def test_a_wrong_cached_block_shows_in_the_outputs(
    setting: Served, uncached: Served, label: str
) -> None:
    """The control of the test above: that test can fail, for both kinds of group."""
    assert setting.hit_tokens(label) == [384]
    assert setting.logprob_error(label, uncached) > 100 * LOGPROB_TOLERANCE


def test_outputs_depend_on_the_prompt(uncached: Served) -> None:
    replies = [tuple(answer.reply) for answer in uncached.answers("first turn")]
    assert len(set(replies)) == len(replies)
    assert all(len(set(reply)) > len(reply) // 2 for reply in replies)


def test_requests_were_preempted_and_chunked(setting: Served) -> None:
    assert setting.report["num_preemptions"] > 0
    assert min(answer.prompt_tokens for answer in setting.answers("first turn")) > 128


def test_checkpoints_were_evicted(adaptive: Served) -> None:
    assert adaptive.report["retention"]["checkpoints_evicted"] > 0


@pytest.mark.parametrize("label", ["sent again", "second turn", "edited", "intact cache"])
def test_hits_at_least_what_dense_caching_hits(retained: Served, dense: Served, label: str) -> None:
    for found, expected in zip(retained.hit_tokens(label), dense.hit_tokens(label), strict=True):
        assert found >= expected >= max(SYSTEM_PROMPT_TOKENS, 320)


def test_keeps_what_dense_caching_keeps_while_there_is_room(
    retained: Served, dense: Served
) -> None:
    kept = retained.kept_blocks("empty cache", "window")
    assert min(kept) > 0
    assert kept == dense.kept_blocks("empty cache", "window")


def test_reset_prefix_cache_forgets_everything(setting: Served) -> None:
    assert setting.report["was_reset"] is True
    assert setting.hit_tokens("empty cache") == setting.hit_tokens("emptied cache") == [0]


def test_metrics_count(adaptive: Served) -> None:
    metrics = adaptive.report["retention"]
    for name in ("checkpoints_kept", "junctions_pinned", "hints_pinned", "lost_tokens"):
        assert metrics[name] > 0, metrics
    assert adaptive.report["prefix_cache_hits"] > 0


def test_unset_means_stock(served: LazyReports) -> None:
    unset = served["all disabled"]
    assert unset.report["wrapped"] == []
    assert unset.report["asked"] == served["stock"].report["asked"]


def test_interval_wraps_the_core_once_asked_for(latest_only: Served) -> None:
    assert latest_only.report["wrapped"]


@pytest.mark.main_version
def test_async_scheduler(served: LazyReports, latest_only: Served, uncached: Served) -> None:
    """The CPU platform turns async scheduling off. But its scheduler can be chosen by name."""
    found = served["asynchronous"]
    for label in UNTOUCHED:
        assert found.logprob_error(label, uncached) <= LOGPROB_TOLERANCE
    for label in ("first turn", "sent again", "second turn", "edited"):
        assert found.hit_tokens(label) == latest_only.hit_tokens(label)


@pytest.mark.main_version
def test_engine_core_in_its_own_process(
    served: LazyReports, latest_only: Served, uncached: Served
) -> None:
    found = served["own process"]
    assert any(
        line.startswith("(EngineCore") and "retention" in line for line in found.log.splitlines()
    )
    for label in found.labels:
        assert found.logprob_error(label, uncached) <= LOGPROB_TOLERANCE
        assert found.hit_tokens(label) == latest_only.hit_tokens(label)


@pytest.mark.main_version
def test_bad_interval_is_refused_at_start_up(tiny_model, tmp_path_factory):
    # tests/unit/retention has every kind of fault.
    text, fault = f"{BLOCK_TOKENS + 1}", f"{BLOCK_TOKENS}"
    nearest = f"{BLOCK_TOKENS} and {2 * BLOCK_TOKENS}"
    plans = {"": Plan(tiny_model, (), "retention")}
    refused = processes.serve(tmp_path_factory, plans, {INTERVAL: text}).get("")
    (message,) = {
        line.partition("Error: ")[2]
        for line in refused.report["error"].splitlines()
        if f"Error: {INTERVAL}" in line
    }
    assert repr(text) in message
    assert fault in message
    assert f"multiple of {BLOCK_TOKENS} tokens" in message
    assert f"nearest valid values are {nearest}" in message
