# SPDX-License-Identifier: Apache-2.0
"""Nothing asked for, nothing changed: every scheduling decision is that of stock vLLM.

Random workloads on vLLM's real scheduler, in fresh processes. What is compared is in
`support.transcript.Step`: requests, tokens and block ids of every step, preemptions, the order of
the free queue, reference counts and hashes of all blocks, every KV cache event, and the outputs.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from support.random_workloads import workload_of
from support.worlds import Outcome, World, explain_difference, run_world

NUM_SEEDS = 8
SHOWN = 3


@pytest.fixture(scope="module")
def outcomes() -> dict[World, Outcome]:
    with ThreadPoolExecutor(max_workers=2) as threads:
        return dict(zip(World, threads.map(lambda w: run_world(w, NUM_SEEDS), World), strict=True))


def differing(outcomes: dict[World, Outcome], one: World, other: World) -> list[str]:
    assert outcomes[one].digests.keys() == outcomes[other].digests.keys()
    return [
        name
        for name, digest in outcomes[one].digests.items()
        if outcomes[other].digests[name] != digest
    ]


def test_worlds_are_what_they_claim(outcomes: dict[World, Outcome]) -> None:
    assert not outcomes[World.STOCK].plugin_loaded
    assert outcomes[World.PLUGIN].plugin_loaded
    assert not outcomes[World.PLUGIN].patches
    assert outcomes[World.INSTALLED].patches
    assert outcomes[World.INSTALLED].patches == outcomes[World.INTERVAL_0].patches


def test_workloads_exercise_what_they_should(outcomes: dict[World, Outcome]) -> None:
    counts = outcomes[World.STOCK].counts
    for what in (
        "preemptions",
        "hits",
        "aborts",
        "resets",
        "accepted drafts",
        "rejected drafts",
        "external loads",
        "encoder inputs",
        "finished by stop",
        "finished by length",
        "BlockStored",
        "BlockRemoved",
        "AllBlocksCleared",
    ):
        assert counts[what] >= 20, f"{what}: {counts[what]} in {sum(counts.values())}"
    num_workloads = len(outcomes[World.STOCK].digests)
    print(f"{num_workloads} workloads: {dict(counts)}")


@pytest.mark.parametrize("world", [World.PLUGIN, World.INSTALLED], ids=lambda world: world.value)
def test_decides_what_stock_decides(outcomes: dict[World, Outcome], world: World) -> None:
    names = differing(outcomes, World.STOCK, world)
    explained = [explain_difference(name, World.STOCK, world) for name in names[:SHOWN]]
    assert not names, f"{len(names)} workloads differ:\n" + "\n".join(explained)


def test_sees_a_world_that_decides_differently(outcomes: dict[World, Outcome]) -> None:
    names = differing(outcomes, World.STOCK, World.INTERVAL_0)
    layouts = {workload_of(name).layout for name in names}
    assert {layout.name for layout in layouts if not layout.has_window} == set()
    with_window = {
        name for name in outcomes[World.STOCK].digests if workload_of(name).layout.has_window
    }
    assert len(names) > 0.9 * len(with_window)
