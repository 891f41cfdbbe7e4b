# SPDX-License-Identifier: Apache-2.0
"""The faster prefix-cache functions decide what upstream's decide.

Random workloads on vLLM's real scheduler, each run twice in this process: as it is, and with the
feature. Compared is all that `support.scheduler.transcript.Step` holds: requests, tokens and block
ids of every step, preemptions, the order of the free queue, reference counts, keys, events and
outputs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import pytest
import vllm
from support.scheduler.block_manager import retention_interval
from support.scheduler.random_workloads import random_workloads, without_upstream_defects
from support.scheduler.run import run
from support.scheduler.transcript import Transcript, first_difference
from support.scheduler.workload import Workload

from vllm_ascend_kvext.activation import survey
from vllm_ascend_kvext.features import FAST_PREFIX_CACHE, FEATURES
from vllm_ascend_kvext.patching.install import BOOK
from vllm_ascend_kvext.patching.plan import FeaturePlan
from vllm_ascend_kvext.settings import Mode, Settings

NUM_SEEDS = 5


@dataclass(frozen=True)
class Setting:
    """What both runs of a workload have in common.

    Attributes:
        name: Id of the test.
        events: Whether KV cache events are on.
        units: The retention interval in units of the layout's hits; None for none.
        retains: Whether retention is this package's, not upstream's.
    """

    name: str
    events: bool
    units: int | None = None
    retains: bool = False


SETTINGS = [
    Setting("dense", events=False),
    Setting("dense-events", events=True),
    Setting("retention-0", events=False, units=0, retains=True),
    Setting("retention-2-events", events=True, units=2, retains=True),
]
if not vllm.__version__.startswith("0.20."):
    SETTINGS += [
        Setting("upstream-0", events=False, units=0),
        Setting("upstream-0-events", events=True, units=0),
        Setting("upstream-2", events=False, units=2),
    ]


@pytest.fixture(autouse=True)
def same_hashes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM derives its block hashes from it
    yield


@functools.cache
def plans() -> dict[str, FeaturePlan]:
    """Made once: checking all fingerprints takes longer than a workload."""
    return {plan.feature: plan for plan in survey(Settings(mode=Mode.STRICT)).plans}


@contextmanager
def in_effect(setting: Setting, is_fast: bool) -> Iterator[None]:
    """The features that a setting wants, in the order of their installation."""
    names = [
        feature.name
        for feature in FEATURES
        if (is_fast if feature is FAST_PREFIX_CACHE else setting.retains)
        and plans()[feature.name].fits
    ]
    assert is_fast == (FAST_PREFIX_CACHE.name in names)
    for name in names:
        BOOK.apply(plans()[name])
    try:
        yield
    finally:
        for name in reversed(names):
            BOOK.revert(name)


def transcript_of(workload: Workload, setting: Setting, is_fast: bool) -> Transcript:
    interval = None if setting.units is None else setting.units * workload.layout.unit_tokens
    if not (setting.retains or workload.layout.has_window):
        interval = None  # upstream refuses it
    with ExitStack() as stack:
        stack.enter_context(in_effect(setting, is_fast))
        stack.enter_context(retention_interval(interval))
        return run(workload).transcript


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_decides_what_upstream_decides(setting: Setting) -> None:
    differences = []
    num_failed = 0
    counts: Counter[str] = Counter()
    for workload in random_workloads(range(NUM_SEEDS)):
        if setting.units is not None:
            workload = without_upstream_defects(workload)
        workload = replace(workload, options=replace(workload.options, events=setting.events))
        try:
            stock = transcript_of(workload, setting, is_fast=False)
        except AssertionError:
            # Upstream's interval gives a block of the second full-attention group out twice.
            assert setting.units is not None and not setting.retains, workload.name
            num_failed += 1
            continue
        difference = first_difference(stock, transcript_of(workload, setting, is_fast=True))
        if difference is not None:
            differences.append(f"{workload.name}: {difference}")
        counts.update(stock.counts)
    assert not differences, f"{len(differences)} workloads differ:\n" + "\n".join(differences[:3])
    assert num_failed < NUM_SEEDS
    for what in ("preemptions", "hits", "accepted drafts", "rejected drafts", "external loads"):
        assert counts[what] >= 10, f"{what}: {counts[what]}"
