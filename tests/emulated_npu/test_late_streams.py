# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Late kernels and copies, in orders that seeds choose, change no answer.

One engine has stores, loads, holes, segments, preemption, aborts and failed copies.
``late_streams.py`` replays a seed, and runs any number of seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from support.sample import IS_SAMPLE

NUM_SEEDS = 20 if IS_SAMPLE else 200
REPLAYED_SEED = 7
SHOWN = {
    "stores wait": 20,
    "arrays held": 20,
    "stores behind the forward": 20,
    "pages of stores": 20,
    "pages of segments": 20,
    "windows of segments": 40,
    "segments wait": 20,
    "no transfers in sleep": 20,
}
"""Protections, and the number of seeds after which the absence of each is detected.

Unit tests detect the absence of the fence, of tails, of pins and of held windows. Of some hundred
seeds, a few also detected loads that do not wait, and loads that do not arrive.
"""

TAKEN_AWAY = ("stores wait",) if IS_SAMPLE else tuple(SHOWN)

NUM_SEEDS_OF_OTHERS = 40

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(run_late_streams: Run) -> Run:
    return cache(run_late_streams)


@pytest.fixture(scope="module")
def report(run: Run) -> dict[str, Any]:
    return run("--seeds", str(NUM_SEEDS))


def test_no_order_changes_an_answer(report: dict[str, Any]) -> None:
    assert not report["failed"]
    assert len(report["seeds"]) == NUM_SEEDS


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
@pytest.mark.parametrize("kind", ["latents", "states"])
def test_no_order_changes_an_answer_of_other_models(run: Run, kind: str) -> None:
    report = run("--seeds", str(NUM_SEEDS_OF_OTHERS), kind=kind)
    assert not report["failed"]
    assert len(report["seeds"]) == NUM_SEEDS_OF_OTHERS
    for name in ("batched copies", "failed copies", "connector", "preemptions", "aborts"):
        assert report["counted"].get(name, 0) > 0, name


@pytest.mark.skipif(IS_SAMPLE, reason="not in the sample")
def test_states_are_wrong_without_the_repair_of_their_copies(run_late_streams: Run) -> None:
    environ = {"VLLM_ASCEND_KVEXT_DISABLE": "state-copies"}
    assert run_late_streams("--seeds", "20", kind="states", environ=environ)["failed"]


def test_seeds_meet_what_they_are_for(report: dict[str, Any]) -> None:
    counted = report["counted"]
    for name in (
        "batched copies",
        "failed copies",
        "connector",
        "hole tokens",
        "segment tokens",
        "preemptions",
        "aborts",
        "sleeps with copies",
    ):
        assert counted.get(name, 0) > 0, name


@pytest.fixture(scope="module")
def alone(run: Run) -> dict[str, Any]:
    """Run one seed in its own process. Then take away each protection alone, and run some seeds."""
    num_seeds = str(max(SHOWN[name] for name in TAKEN_AWAY))
    options = ("--without-seeds", num_seeds, "--without", *TAKEN_AWAY)
    return run("--first", str(REPLAYED_SEED), "--seeds", "1", *options)


def test_a_seed_can_be_replayed(alone: dict[str, Any], report: dict[str, Any]) -> None:
    key = str(REPLAYED_SEED)
    assert alone["seeds"][key]["digest"] == report["seeds"][key]["digest"]


@pytest.mark.parametrize("name", TAKEN_AWAY)
def test_a_protection_that_is_gone_is_seen(alone: dict[str, Any], name: str) -> None:
    (seed,) = alone["without"][name]
    assert int(seed) < SHOWN[name]
