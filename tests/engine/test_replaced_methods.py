# SPDX-License-Identifier: Apache-2.0
"""Two features replace methods of one scheduler: each is taken back by itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from support.connector.offload_run import offloading_installed
from support.connector.offload_workloads import offloading
from support.connector.paged_layouts import GEMMA
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.options import EngineOptions

from vllm_ascend_kvext.patches.connector.scheduler import ConnectedScheduler
from vllm_ascend_kvext.patches.repairs.scheduler import LoadRecovery
from vllm_ascend_kvext.patching.install import BOOK


@contextmanager
def calls_of_schedule() -> Iterator[list[str]]:
    """Which features have been asked to schedule a step, outermost first."""
    calls: list[str] = []

    def noting(feature: str, owner: type) -> Any:
        replaced = owner.schedule  # type: ignore[attr-defined]

        def schedule(self: Any, *args: Any) -> Any:
            calls.append(feature)
            return replaced(self, *args)

        return mock.patch.object(owner, "schedule", schedule)

    with noting("failed-loads", LoadRecovery), noting("connector", ConnectedScheduler):
        yield calls


def replaced_in(engine: SimulatedEngine) -> list[str]:
    """Methods of upstream that an engine's own objects have replaced."""
    scheduler = engine.scheduler
    manager = scheduler.kv_cache_manager
    return [
        name
        for owner in (scheduler, scheduler.connector, manager, manager.coordinator)
        for name, value in vars(owner).items()
        if callable(value) and hasattr(type(owner), name)
    ]


@pytest.mark.parametrize("first", ["failed-loads", "connector"])
def test_a_feature_that_is_taken_back_leaves_the_methods_of_the_other(first: str) -> None:
    options = EngineOptions(
        num_blocks=400, offloading=offloading(GEMMA, hole_reuse=True, swap_on_preemption=True)
    )
    with offloading_installed(), calls_of_schedule() as calls:
        engine = SimulatedEngine(GEMMA, options)
        try:
            engine.scheduler.schedule()
            assert calls == ["connector", "failed-loads"]
            calls.clear()
            BOOK.revert(first)
            engine.scheduler.schedule()
            (other,) = {"connector", "failed-loads"} - {first}
            assert calls == [other]
            BOOK.revert(other)
            assert not replaced_in(engine)
        finally:
            engine.shutdown()
