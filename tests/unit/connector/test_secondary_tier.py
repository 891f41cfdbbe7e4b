# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The seam to a tier behind host memory: how a tier is found, and how a worker side uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest

from vllm_ascend_kvext.connector.common import extension_registry
from vllm_ascend_kvext.connector.common.extension_registry import register_secondary_tier
from vllm_ascend_kvext.connector.common.messages import ConnectorMetadata, WorkerOutput
from vllm_ascend_kvext.connector.common.options import ConnectorOptions
from vllm_ascend_kvext.connector.scheduler.secondary_tier import SecondaryTierScheduler
from vllm_ascend_kvext.connector.secondary_tier import SecondaryTier, secondary_tier_of
from vllm_ascend_kvext.connector.worker.extension import RegisteredPages
from vllm_ascend_kvext.connector.worker.secondary_tier import SecondaryTierWorker
from vllm_ascend_kvext.errors import ConnectorError

WITH_TIER = ConnectorOptions(shared_tier="file:///somewhere")


class SomeTier(SecondaryTier):
    def __init__(self, vllm_config: Any, options: ConnectorOptions) -> None:
        self.made_of = vllm_config, options

    def scheduler_side(self, *_: Any) -> SecondaryTierScheduler:
        raise NotImplementedError

    def worker_side(self, kv_cache_config: Any) -> SecondaryTierWorker:
        raise NotImplementedError


@pytest.fixture(autouse=True)
def none_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extension_registry, "_secondary_tiers", [])


def test_a_tier_is_made_where_the_option_asks_for_one() -> None:
    for _ in range(2):
        register_secondary_tier(__name__, "SomeTier")
    tier = secondary_tier_of("config", WITH_TIER)
    assert isinstance(tier, SomeTier) and tier.made_of == ("config", WITH_TIER)


def test_without_the_option_nothing_is_imported() -> None:
    register_secondary_tier("no.such.module", "SomeTier")
    assert secondary_tier_of("config", ConnectorOptions()) is None


def test_an_option_without_a_tier_is_refused() -> None:
    with pytest.raises(ConnectorError, match=r"shared_tier: expected a tier .* VLLM_PLUGINS"):
        secondary_tier_of("config", WITH_TIER)


# The worker side uses the tier.


class Jobs(NamedTuple):
    has_gets: bool = True


@dataclass
class Told:
    number: int = 0

    def add(self, other: Told) -> None:
        self.number += other.number


class Recording(SecondaryTierWorker):
    """A worker side that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.pages: RegisteredPages | None = None
        self.waits = True

    def register(self, pages: RegisteredPages, place_thread: Callable[[], object]) -> None:
        self.calls.append("register")
        self.pages = pages
        place_thread()

    def describe(self) -> str:
        return "what it says"

    def keep_apart(self) -> None:
        self.calls.append("apart")

    def begin_step(self, jobs: Any) -> None:
        self.calls.append(jobs)

    def wait_for_end(self, timeout_s: float) -> bool:
        self.calls.append(timeout_s)
        return self.waits

    def end_step(self) -> WorkerOutput:
        return WorkerOutput(jobs_ended={7: 1}, failed_jobs={7}, secondary=Told(3))

    def shutdown(self) -> None:
        self.calls.append("shutdown")


def test_a_worker_side_passes_on_what_is_the_tiers() -> None:
    pytest.importorskip("torch")
    from support.connector.small_workers import SmallWorker

    tier = Recording()
    worker = SmallWorker(secondary=tier)
    worker.side.register(worker.pages.kv_caches)  # A reset registers pages again.
    assert tier.calls == ["register"], "host memory was registered again after a reset"
    described = worker.side.describe()
    assert tier.pages is not None and described.secondary == "what it says"
    assert tier.pages.layout == described.layout
    assert tier.pages.host.numel() == described.host_bytes
    worker.side.begin_step(ConnectorMetadata(secondary=Jobs()))
    worker.side.begin_step(ConnectorMetadata())
    assert tier.calls[1:] == [Jobs(), None]
    results = worker.side.end_step().results
    assert results.jobs_ended == {7: 1} and results.failed_jobs == {7}
    assert results.secondary == Told(3) and WorkerOutput(secondary=Told())
    worker.side.wait_for_end(0.25)
    worker.side.shutdown()
    assert tier.calls[3:] == [0.25, "shutdown"]


def test_a_tier_is_told_once_and_before_a_step_that_bytes_are_kept_apart() -> None:
    pytest.importorskip("torch")
    from support.connector.small_workers import SmallWorker

    tier = Recording()
    worker = SmallWorker(secondary=tier)
    for _ in range(2):
        jobs = ConnectorMetadata(secondary=Jobs(), keeps_apart=True)
        worker.side.run_before_step(jobs)
        worker.side.begin_step(jobs)
    assert tier.calls == ["register", "apart", Jobs(), Jobs()]
    worker.side.shutdown()


def test_reports_of_workers_are_joined() -> None:
    joined = WorkerOutput()
    for number in (1, 2):
        joined.add(WorkerOutput(secondary=Told(number)))
        joined.add(WorkerOutput())
    assert joined.secondary == Told(3)


def test_a_worker_side_waits_for_its_own_transfers_where_the_tier_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch")
    from support.connector.small_workers import SmallWorker

    tier = Recording()
    worker = SmallWorker(secondary=tier)
    waited: list[float] = []
    monkeypatch.setattr(worker.side._thread, "wait_for_end", waited.append)
    worker.side.wait_for_end(0.5)
    assert waited == []
    tier.waits = False
    worker.side.wait_for_end(0.5)
    assert waited == [0.5]
    worker.side.shutdown()
