# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Engines and requests for tests of single cases."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from vllm.v1.kv_cache_interface import KVCacheConfig

from support.connector.lost_rows import holds_rows_of
from support.connector.offload_workloads import offloading
from support.connector.paged_layouts import PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan


@contextmanager
def engine_of(
    layout: PagedLayout,
    script: TransferScript | None = None,
    num_contents: Sequence[int] | None = None,
    hosts: Sequence[str] | None = None,
    **options: Any,
) -> Iterator[SimulatedEngine]:
    """An engine. By default, it stores everything, evicts nothing, and hits only in host memory.

    Args:
        num_contents: See `SimulatedEngine`, as for ``hosts``.
    """
    values: dict[str, Any] = {
        "num_blocks": 1200,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 256,
        "caching": False,
        "events": False,
        "offloading": offloading(layout),
    }
    chosen = EngineOptions(**values | options)
    engine = SimulatedEngine(layout, chosen, script or TransferScript(), num_contents, hosts)
    try:
        yield engine
    finally:
        engine.shutdown()


@contextmanager
def zeroing() -> Iterator[None]:
    """Let engines that are made in the block zero new pages, as if caches had different dtypes."""
    with mock.patch.object(KVCacheConfig, "needs_kv_cache_zeroing", True):
        yield


def make_holes(engine: SimulatedEngine, *holes: tuple[int, int]) -> None:
    """Remove the entries with rows of these tokens from the tier."""
    engine.tier.evict(lambda entry: holds_rows_of(entry, holes))


def plan_of(request_id: str, prompt: Iterable[int], max_tokens: int = 3) -> RequestPlan:
    return RequestPlan(
        request_id=request_id, arrival_step=0, prompt=tuple(prompt), max_tokens=max_tokens
    )


def watch_computed(engine: SimulatedEngine) -> dict[str, list[tuple[int, int]]]:
    """Record the tokens that steps compute from now on, by request or by row of a hole."""
    computed: dict[str, list[tuple[int, int]]] = {}
    execute = engine.runner.execute

    def watched(output: Any) -> Any:
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id, num_tokens in output.num_scheduled_tokens.items():
            first = starts[request_id]
            computed.setdefault(request_id, []).append((first, first + num_tokens))
        assert sum(output.num_scheduled_tokens.values()) == output.total_num_scheduled_tokens
        assert output.total_num_scheduled_tokens <= engine.scheduler.max_num_scheduled_tokens
        jobs = output.kv_connector_metadata.jobs
        assert jobs.has_forward == bool(output.total_num_scheduled_tokens)
        return execute(output)

    engine.runner.execute = watched  # type: ignore[method-assign]
    return computed


def step_without_admissions(engine: SimulatedEngine, num_steps: int = 1) -> None:
    """Let no request get blocks, as if other requests needed all free blocks."""
    manager = engine.scheduler.kv_cache_manager
    with mock.patch.object(manager, "allocate_slots", return_value=None):
        for _ in range(num_steps):
            engine.step()


def let_stores_begin(engine: SimulatedEngine) -> None:
    """Let the scheduler side believe that copies are fast, so that no store waits to begin."""
    engine.side._cost.note_copies("store", 1 << 40, 1e-6)


def fail_next(engine: Any, *numbers: int) -> None:
    """Let some loads of each worker fail. Their numbers are counted from now on."""
    for worker in engine.workers:
        worker.transfers.counts.clear()
        worker.transfers._script = TransferScript(failing_load_numbers=frozenset(numbers))
