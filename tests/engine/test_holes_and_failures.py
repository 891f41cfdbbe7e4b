# SPDX-License-Identifier: Apache-2.0
"""Holes where blocks run out, loads fail in part, and requests begin again."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from support.connector import engines
from support.connector.engines import make_holes, plan_of
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA
from support.connector.scripted_transfers import TransferScript
from support.scheduler.workload import RequestPlan
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.connector import loads
from vllm_ascend_kvext.store.entries import EntryState

PROMPT_TOKENS = 400


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@contextmanager
def engine_with_a_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, RequestPlan]]:
    """An engine of a model with windows, and a request whose hole needs blocks for them."""
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", 0)
    prompt = tokens(random.Random(5), 40)
    with engines.engine_of(
        GEMMA, offloading=offloading(GEMMA, hole_reuse=True), reserve_full_prompt=False
    ) as engine:
        serve(engine, plan_of("short", prompt[:16], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        make_holes(engine, (24, 32))
        yield engine, plan_of("second", [*prompt, *tokens(random.Random(6), 20)])


def test_a_hit_that_waits_for_its_admission_still_needs_blocks_for_its_windows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Found with enough free blocks, not admitted in that step; then there are fewer."""
    used_blocks: list[int] = []
    for num_missing in (0, 1):
        with engine_with_a_hole(monkeypatch) as (engine, following):
            pool = engine.block_pool
            num_free = pool.get_num_free_blocks()
            engine.add_request(following)
            held: list[Any] = []
            if num_missing:
                # As when others still need theirs: ``reserved_blocks`` of vLLM 0.23.0.
                manager = engine.scheduler.kv_cache_manager
                with mock.patch.object(manager, "allocate_slots", return_value=None):
                    engine.step()
                assert not engine.parts.loads.num_under_way
                assert engine.parts.loads.num_pinned == 1
                held = pool.get_new_blocks(num_free - used_blocks[0] + 1)
            engine.step()
            used_blocks.append(num_free - len(held) - pool.get_num_free_blocks())
            for _ in range(5):
                engine.step()
            pool.free_blocks(held)
            serve(engine)
            counters = engine.side.counters
            assert not counters.tier.failed_loads, "what is stored is lost for want of a block"
            assert counters.hole_tokens
            check_nothing_is_left(engine)


def test_hits_of_a_request_are_not_negative_after_a_reset() -> None:
    """Its load leaves something out; before the next step, a reset takes its blocks."""
    prompt = tokens(random.Random(8), PROMPT_TOKENS)
    script = TransferScript(failing_load_numbers=frozenset({1, 2}))
    found: list[Any] = []
    with engines.engine_of(
        FULL, script, offloading=offloading(FULL, hole_reuse=True), caching=True
    ) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        assert engine.reset()
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        update = engine.scheduler.update_from_output

        def watch(scheduled: Any, from_model: Any) -> Any:
            results = update(scheduled, from_model)
            for of_client in results.values():
                found.extend(o.prefill_stats for o in of_client.outputs if o.prefill_stats)
            return results

        engine.scheduler.update_from_output = watch  # type: ignore[method-assign]
        engine.add_request(plan_of("second", prompt, max_tokens=3))
        while not engine.side._new_holes or engine.parts.loads.num_under_way:
            engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        serve(engine)
        (stats,) = found
        assert stats.num_external_cached_tokens >= 0, stats
        assert stats.num_cached_tokens >= 0, stats
        assert stats.num_cached_tokens + stats.num_computed_tokens == PROMPT_TOKENS


def test_a_request_that_lacked_blocks_once_has_its_holes_when_there_are_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It waits for its turn since: upstream asks nobody while as many run as may."""
    with engine_with_a_hole(monkeypatch) as (engine, following):
        pool = engine.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
        engine.add_request(following)
        engine.step()
        assert engine.parts.loads._lack_blocks_since_s
        pool.free_blocks(held)
        engine.parts.loads._clock = lambda: 1e9
        serve(engine)
        assert engine.side.counters.hole_tokens
        check_nothing_is_left(engine)


def test_a_load_that_covers_too_little_still_fails() -> None:
    """All or nothing was the net under plans that are wrong: part by part has holes in it."""
    prompt = tokens(random.Random(11), PROMPT_TOKENS)
    with engines.engine_of(FULL, offloading=offloading(FULL, hole_reuse=True)) as engine:
        serve(engine, plan_of("first", prompt))
        jobs = engine.parts.loads._jobs
        plan = jobs.plan

        def plan_too_little(*args: Any) -> Any:
            job = plan(*args)
            return replace(
                job,
                stored=job.stored[:1] + job.stored[2:],
                stored_tokens=job.stored_tokens[:1] + job.stored_tokens[2:],
            )

        with mock.patch.object(type(jobs), "plan", lambda _, *args: plan_too_little(*args)):
            serve(engine, plan_of("second", prompt))
        check_nothing_is_left(engine)


def test_an_entry_that_was_read_well_stays_when_its_neighbour_fails() -> None:
    """Its rows behind the place where the neighbour begins are those of another prompt."""
    rng = random.Random(7)
    prompt, other = tokens(rng, PROMPT_TOKENS), tokens(rng, PROMPT_TOKENS)
    chunk = offloading(FULL, hole_reuse=True, chunk_tokens=128)
    script = TransferScript(failing_load_numbers=frozenset({4, 7}))
    with engines.engine_of(FULL, script, offloading=chunk) as engine:
        for number, stored in enumerate(
            (prompt[:65], prompt[:80] + other[80:129], prompt[:113], prompt)
        ):
            serve(engine, plan_of(f"first-{number}", stored, max_tokens=1))
        (worker,) = engine.workers
        assert worker.transfers.counts["loads"] == 3
        (entry,) = [e for e in engine.tier._entries.values() if e.piece[1:] == (64, 128)]
        serve(engine, plan_of("second", prompt))
        assert engine.side.counters.hole_tokens == 32  # tokens 80 to 111
        assert entry.state is EntryState.STORED
        check_nothing_is_left(engine)
