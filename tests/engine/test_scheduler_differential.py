# SPDX-License-Identifier: Apache-2.0
"""Nothing asked for, nothing changed: every scheduling decision is that of stock vLLM.

With the repairs switched off, all of them; with the repairs, all of those in workloads that run
into none of the defects.

Random workloads on vLLM's real scheduler, in fresh processes. What is compared is in
`support.scheduler.transcript.Step`: requests, tokens and block ids of every step, preemptions, the
order of the free queue, reference counts and hashes of all blocks, every KV cache event, and the
outputs.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
import vllm
from support.sample import sampled
from support.scheduler.random_workloads import workload_of
from support.scheduler.worlds import Outcome, World, explain_difference, run_world

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.features import DEFAULTS
from vllm_ascend_kvext.patches import PATCHES

DEFAULT_IDS = tuple(
    patch.id
    for feature in DEFAULTS
    for patch in PATCHES
    if patch.feature == feature.name
    and not patch.is_for_vllm_ascend
    and any(version_in(vllm.__version__, versions) for versions in patch.vllm)
)
NUM_SEEDS = sampled(8)
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
    assert all(outcomes[world].plugin_loaded for world in World if world is not World.STOCK)
    assert not outcomes[World.DISABLED].patches
    assert outcomes[World.DEFAULT].patches == DEFAULT_IDS
    assert set(outcomes[World.DEFAULT].patches) < set(outcomes[World.INSTALLED].patches)
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
        assert counts[what] >= sampled(20), f"{what}: {counts[what]} in {sum(counts.values())}"
    num_workloads = len(outcomes[World.STOCK].digests)
    print(f"{num_workloads} workloads: {dict(counts)}")


def test_decides_what_stock_decides(outcomes: dict[World, Outcome]) -> None:
    check_nothing_differs(
        differing(outcomes, World.STOCK, World.DISABLED), World.STOCK, World.DISABLED
    )


def test_repairs_change_nothing_where_there_is_no_defect(outcomes: dict[World, Outcome]) -> None:
    defects = outcomes[World.STOCK].defects
    differ = differing(outcomes, World.STOCK, World.DEFAULT)
    spotless = [name for name in defects if not defects[name]]
    assert len(spotless) > 0.5 * len(defects)
    check_nothing_differs(
        [name for name in differ if not defects[name]], World.STOCK, World.DEFAULT
    )
    shown = Counter(defect for name in differ for defect in defects[name])
    print(f"{len(defects) - len(spotless)} of {len(defects)} workloads show a defect: {shown}")
    assert shown["trim-full-groups"]
    assert shown["drafts-in-flight"]
    assert shown["discarded-frames"]


def test_patches_that_nobody_asked_for_decide_what_the_defaults_decide(
    outcomes: dict[World, Outcome],
) -> None:
    names = differing(outcomes, World.DEFAULT, World.INSTALLED)
    check_nothing_differs(names, World.DEFAULT, World.INSTALLED)


def check_nothing_differs(names: list[str], one: World, other: World) -> None:
    explained = [explain_difference(name, one, other) for name in names[:SHOWN]]
    assert not names, f"{len(names)} workloads differ:\n" + "\n".join(explained)


def test_sees_a_world_that_decides_differently(outcomes: dict[World, Outcome]) -> None:
    names = differing(outcomes, World.DEFAULT, World.INTERVAL_0)
    layouts = {workload_of(name).layout for name in names}
    dense = {layout.name for layout in layouts if not layout.has_window and not layout.has_mamba}
    assert dense == set()
    with_window = {
        name for name in outcomes[World.DEFAULT].digests if workload_of(name).layout.has_window
    }
    assert len(names) > 0.9 * len(with_window)
