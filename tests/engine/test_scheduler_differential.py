# SPDX-License-Identifier: Apache-2.0
"""Nothing asked for, nothing changed: every scheduling decision is that of stock vLLM.

With the defaults, in workloads that run into none of the defects that they repair; with all
features installed and nothing configured, what the defaults decide. Random workloads on vLLM's
real scheduler. What is compared is in `support.scheduler.transcript.Step`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from support.installed import installed
from support.sample import sampled
from support.scheduler.block_manager import retention_interval
from support.scheduler.defects import observed_defects
from support.scheduler.random_workloads import random_workloads
from support.scheduler.run import run
from support.scheduler.transcript import Transcript, first_difference
from support.scheduler.workload import Workload

from vllm_ascend_kvext.features import DEFAULTS, FEATURES

STOCK: tuple[str, ...] = ()
DEFAULT = tuple(feature.name for feature in DEFAULTS)
ALL = tuple(feature.name for feature in FEATURES)
WORKLOADS = list(random_workloads(range(sampled(8))))


@pytest.fixture(autouse=True)
def same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM derives its block hashes from it


def decided(workload: Workload) -> Transcript | str:
    try:
        return run(workload).transcript
    except (AssertionError, RuntimeError) as error:
        # What a defect has come to: the schedule is no longer one that can be executed.
        return f"{type(error).__name__}: {error}"


def differing(ones: list[Transcript | str], others: list[Transcript | str]) -> dict[str, str]:
    """By name of workload, the first decision that differs."""
    found = {}
    for workload, one, other in zip(WORKLOADS, ones, others, strict=True):
        if isinstance(one, str) or isinstance(other, str):
            difference = None if one == other else f"{one!r:.200} != {other!r:.200}"
        else:
            difference = first_difference(one, other)
        if difference is not None:
            found[workload.name] = difference
    return found


def test_nothing_asked_for_nothing_changed() -> None:
    stock, defects = [], {}
    for workload in WORKLOADS:
        with observed_defects() as defects[workload.name]:
            stock.append(decided(workload))
    with installed(*DEFAULT):
        default = [decided(workload) for workload in WORKLOADS]
    with installed(*ALL):
        everything = [decided(workload) for workload in WORKLOADS]
    assert not differing(default, everything)
    repaired = differing(stock, default)
    assert not {name: repaired[name] for name in repaired if not defects[name]}
    shown = Counter(defect for name in repaired for defect in defects[name])
    for defect in ("trim-full-groups", "drafts-in-flight", "discarded-frames"):
        assert shown[defect], f"no decision shows {defect}"
    assert sum(not found for found in defects.values()) > 0.5 * len(defects)
    check_counts(stock)
    with installed(*ALL):
        check_sees_an_interval(default, list(with_interval()))


def check_counts(stock: list[Transcript | str]) -> None:
    """The workloads exercise what they should."""
    counts = sum((one.counts for one in stock if isinstance(one, Transcript)), Counter())
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


def with_interval() -> Iterator[Transcript | str]:
    with retention_interval(0):
        yield from map(decided, WORKLOADS)


def check_sees_an_interval(default: list[Transcript | str], sparse: list[Transcript | str]) -> None:
    """The control: with retention asked for, windows and states are cached differently."""
    names = differing(default, sparse).keys()
    windows = {workload.name for workload in WORKLOADS if workload.layout.has_window}
    states = {workload.name for workload in WORKLOADS if workload.layout.has_mamba}
    assert not names - windows - states
    assert len(names) > 0.9 * len(windows)
