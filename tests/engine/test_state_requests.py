# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Random requests to a model with states and drafts: no answer is wrong, and nothing is held.

Requests join and leave, are aborted and preempted, and the cache is emptied while they run. The
model is Qwen3-Next with drafts of its own layer. The engine has adaptive retention and a small host
memory, in a pool that is too small for all requests. ``KVEXT_CASES=all`` serves 10,000 requests.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from support.sample import IS_LONG
from support.scenarios import processes
from support.scenarios.answers import Served
from support.scenarios.processes import (
    ADAPTIVE,
    IS_V2_RUNNER,
    NO_PREFIX_CACHING,
    PLUGIN_OFF,
    LazyReports,
    Plan,
    serve,
)
from support.scenarios.states import MTP, NO_DRAFTS, RUNNER_ENVIRON, plan
from support.states import state_models
from support.upstream_version import IS_SINCE_0_30

pytestmark = pytest.mark.timeout(7200)

UNIT_TOKENS = 32 if IS_SINCE_0_30 else 16
POOL_BLOCKS = 100
MAX_TOKENS = 1024
"""The longest request that the engine accepts. It fits into the pool."""
NUM_REQUESTS = 10_000 if IS_LONG else 60
NUM_CONTROL_REQUESTS = 60
HOST_MEMORY_GIB = 1 / 512
DRAFTS = MTP if IS_SINCE_0_30 else NO_DRAFTS
"""With drafts, the CPU engine of release 0.23 answers hits wrong, without this package as well."""

SETTINGS = {"synchronous": False}
"""Whether a step is scheduled before the one before it has ended, by name."""
if IS_SINCE_0_30:  # The runner of release 0.23 for CPUs has no streams for it.
    SETTINGS["asynchronous"] = True


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    @cache
    def folder() -> Path:
        return state_models.write(tmp_path_factory.mktemp("model"), "qwen3-next", has_drafts=True)

    return folder


def requests_plan(folder: Callable[[], Path], scenario: str, **more: Any) -> Plan:
    made = plan(folder, [scenario], unit_tokens=UNIT_TOKENS, max_model_len=MAX_TOKENS, **more)
    return replace(made, module="state_requests")


@pytest.fixture(scope="module")
def known(folder_of: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file with the answers of an engine without plugin, prefix caching and drafts."""
    reference = requests_plan(folder_of, "conversations", **NO_PREFIX_CACHING)
    served = serve(tmp_path_factory, {"": reference}, PLUGIN_OFF | RUNNER_ENVIRON)[""]
    file = tmp_path_factory.mktemp("known") / "answers.json"
    file.write_text(json.dumps(served.report["asked"]["turns"]["answers"]))
    return file


@pytest.fixture(scope="module")
def reports(
    folder_of: Callable[[], Path], known: Path, tmp_path_factory: pytest.TempPathFactory
) -> LazyReports:
    def plan_of(is_async: bool, num_requests: int, moves_nothing: bool = False) -> Plan:
        made = requests_plan(
            folder_of,
            "random_requests",
            drafts=DRAFTS,
            is_async=is_async,
            num_gpu_blocks_override=POOL_BLOCKS,
            **processes.connector(host_memory_gib=HOST_MEMORY_GIB),
        )
        asked = {"known": str(known), "num_requests": num_requests, "moves_nothing": moves_nothing}
        return replace(made, options={**made.options, **asked})

    plans = {name: plan_of(is_async, NUM_REQUESTS) for name, is_async in SETTINGS.items()}
    plans["moves nothing"] = plan_of(False, NUM_CONTROL_REQUESTS, moves_nothing=True)
    each = [(ADAPTIVE | RUNNER_ENVIRON, {name: plan}) for name, plan in plans.items()]
    return LazyReports(tmp_path_factory, each)


@pytest.fixture(params=SETTINGS)
def served(request: pytest.FixtureRequest, reports: LazyReports) -> Served:
    return reports[request.param]


def test_no_answer_of_random_requests_is_wrong(
    served: Served, record_property: Callable[[str, Any], None]
) -> None:
    facts = served.report["facts"]
    record_property("counts, largest error", (facts["counts"], facts["largest"]))
    print(f"\n{facts['counts']}, largest error {facts['largest']:.1e}")
    assert facts["wrong"] == []
    counts = facts["counts"]
    assert counts["answers"] + counts["aborts"] == counts["requests"] == NUM_REQUESTS


def test_random_requests_met_what_they_are_for(served: Served) -> None:
    report = served.report
    counts = report["facts"]["counts"]
    met = ["aborts", "resets", "preemptions", "hit tokens", "connector"]
    met += ["accepted draft tokens"] if DRAFTS else []
    assert all(counts.get(name, 0) for name in met), counts
    assert report["own"]["host_hit_requests"] > 0
    assert report["is_v2_runner"] is IS_V2_RUNNER


def test_nothing_is_held_at_the_end(served: Served) -> None:
    served.check_nothing_is_left()


def test_loads_that_move_nothing_show(reports: LazyReports) -> None:
    facts = reports["moves nothing"].report["facts"]
    assert facts["counts"]["connector"] > 0
    assert len(facts["wrong"]) > 0
