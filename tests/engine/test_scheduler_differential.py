# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""If nothing is asked for, nothing changes: every scheduling decision is that of stock vLLM.

With the defaults, this holds in workloads that run into none of the repaired defects. If all
features are installed and nothing is configured, every decision is that of the defaults. Random
workloads run on vLLM's real scheduler. `support.scheduler.transcript.Step` has the compared facts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
from support.installed import installed
from support.sample import IS_SAMPLE, sampled
from support.scheduler.block_manager import retention_interval
from support.scheduler.random_workloads import random_workloads
from support.scheduler.run import run
from support.scheduler.transcript import Transcript, first_difference
from support.scheduler.workload import Workload
from support.upstream_version import VLLM
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request, RequestStatus

from vllm_ascend_kvext.compat import version_in
from vllm_ascend_kvext.features import DEFAULTS, FEATURES
from vllm_ascend_kvext.patches import PATCHES

STOCK: tuple[str, ...] = ()
DEFAULT = tuple(feature.name for feature in DEFAULTS)
ALL = tuple(feature.name for feature in FEATURES)
REPAIRED = {
    patch.feature for patch in PATCHES if any(version_in(VLLM, versions) for versions in patch.vllm)
}
"""The repairs of this version. Defects that upstream has fixed do not show."""

# Fewer workloads do not show every defect that is repaired in the main version.
WORKLOADS = list(random_workloads(range(4 if IS_SAMPLE else 8)))


@pytest.fixture(autouse=True)
def same_hashes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "0")  # vLLM derives its block hashes from this seed.


def hits_less_than_it_hands_out(manager: KVCacheManager, _: Request, found: Any) -> bool:
    blocks, hit_tokens, *_ = found
    return any(
        isinstance(each.kv_cache_spec, FullAttentionSpec)
        and len(group) * each.block_size > hit_tokens
        for each, group in zip(manager.coordinator.single_type_managers, blocks.blocks, strict=True)
    )


def holds_a_block_twice(coordinator: KVCacheCoordinator, request_id: str, _: None) -> bool:
    groups = coordinator.get_blocks(request_id)
    held = [block.block_id for group in groups for block in group if not block.is_null]
    return len(held) != len(set(held))


def windows_move_with_drafts(manager: KVCacheManager, request: Request) -> bool:
    # The harness has at most one step in flight. The step yields one token and its drafts.
    num_drafts = max(0, request.num_output_placeholders - 1)
    computed = request.num_computed_tokens
    return any(
        each.get_num_skipped_tokens(computed - num_drafts) // each.block_size
        != each.get_num_skipped_tokens(computed) // each.block_size
        for each in manager.coordinator.single_type_managers
        if isinstance(each.kv_cache_spec, (ChunkedLocalAttentionSpec, SlidingWindowSpec))
    )


def has_cached_what_it_has_not_computed(manager: KVCacheManager, request: Request) -> bool:
    return request.status == RequestStatus.RUNNING and any(
        block.block_hash
        for each in manager.coordinator.single_type_managers
        for block in each.req_to_blocks.get(request.request_id, [])[
            request.num_computed_tokens // each.block_size :
        ]
    )


def resets_with_drafts_in_flight(scheduler: Scheduler, reset_running_requests: bool) -> bool:
    # At most one step is in flight, so one placeholder belongs to one step.
    placeholders = (request.num_output_placeholders for request in scheduler.running)
    return reset_running_requests and max(placeholders, default=0) > 1


BEFORE = {
    "drafts-in-flight": (KVCacheManager, "allocate_slots", windows_move_with_drafts),
    "preempted-in-step": (KVCacheManager, "free", has_cached_what_it_has_not_computed),
    "discarded-frames": (Scheduler, "reset_prefix_cache", resets_with_drafts_in_flight),
}
AFTER = {
    "trim-full-groups": (KVCacheManager, "get_computed_blocks", hits_less_than_it_hands_out),
    "two-phase-allocation": (
        KVCacheCoordinator,
        "allocate_new_computed_blocks",
        holds_a_block_twice,
    ),
}
"""By repair: a function of upstream, and a check of whether a defect shows.

The check runs before or after each call of the function. It gets the function's first argument, and
then the second or the result.
"""


@contextmanager
def observed_defects() -> Iterator[set[str]]:
    """Collect the defects that stock vLLM runs into. No decision changes."""
    defects: set[str] = set()

    def watched(repair: str, original: Any, shows: Callable[..., bool]) -> Callable[..., Any]:
        def watch(self: Any, *args: Any, **kwargs: Any) -> Any:
            first = next(iter((*args, *kwargs.values())))
            if repair in BEFORE and shows(self, first):
                defects.add(repair)
            result = original(self, *args, **kwargs)
            if repair in AFTER and shows(self, first, result):
                defects.add(repair)
            return result

        return watch

    with ExitStack() as stack:
        for repair, (owner, name, shows) in (BEFORE | AFTER).items():
            watch = watched(repair, vars(owner)[name], shows)
            stack.enter_context(mock.patch.object(owner, name, watch))
        yield defects


def decided(workload: Workload) -> Transcript | str:
    try:
        return run(workload).transcript
    except (AssertionError, RuntimeError) as error:
        # This is the result of a defect: the schedule can no longer be executed.
        return f"{type(error).__name__}: {error}"


def differing(ones: list[Transcript | str], others: list[Transcript | str]) -> dict[str, str]:
    """The first decision that differs, by name of workload."""
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
    assert not {name: repaired[name] for name in repaired if not defects[name] & REPAIRED}
    shown = Counter(defect for name in repaired for defect in defects[name])
    for defect in {"trim-full-groups", "drafts-in-flight", "discarded-frames"} & REPAIRED:
        assert shown[defect], f"no decision shows {defect}"
    assert sum(not found for found in defects.values()) > 0.5 * len(defects)
    check_counts(stock)
    with installed(*ALL):
        check_sees_an_interval(default, list(with_interval()))


def check_counts(stock: list[Transcript | str]) -> None:
    """The workloads exercise the intended features."""
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
    """The control: with retention, windows and states are cached differently."""
    names = differing(default, sparse).keys()
    windows = {workload.name for workload in WORKLOADS if workload.layout.has_window}
    states = {workload.name for workload in WORKLOADS if workload.layout.has_mamba}
    assert not names - windows - states
    assert len(names) > 0.9 * len(windows)
