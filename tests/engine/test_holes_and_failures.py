# SPDX-License-Identifier: Apache-2.0
"""Holes where blocks run out, loads fail in part, and requests begin again."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from support.connector import engines
from support.connector.engines import fail_next, make_holes, plan_of, watch_computed
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import blocks_for_longest, offloading, tokens
from support.connector.paged_layouts import DEEPSEEK_V4_LIKE, FULL, GEMMA, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.scheduler.workload import RequestPlan
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.connector import loads
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.lookup import Hit

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
    """A plan that is wrong is not tried part by part."""
    prompt = tokens(random.Random(11), PROMPT_TOKENS)
    with engines.engine_of(FULL, offloading=offloading(FULL, hole_reuse=True)) as engine:
        serve(engine, plan_of("first", prompt))
        jobs = engine.parts.loads._jobs
        plan = jobs.plan

        def plan_too_little(*args: Any) -> Any:
            job = plan(*args)
            return replace(job, stored=job.stored[:1] + job.stored[2:])

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


HYBRIDS = (GEMMA, DEEPSEEK_V4_LIKE)
CHUNK_TOKENS = 16


@dataclass
class AfterFailures:
    """What became of a request.

    Attributes:
        computed: Tokens that it and its holes have computed, ascending.
        hit_tokens: That it has loaded, in the end.
        num_loads: Calls that workers have made for it.
        removed: Entries that are not offered again.
    """

    computed: list[int]
    hit_tokens: int
    num_loads: int
    removed: int


def serve_again(
    layout: PagedLayout,
    *,
    failing: frozenset[int] = frozenset(),
    missing: Callable[[Entry], bool] | None = None,
    is_async: bool = False,
    **options: Any,
) -> tuple[AfterFailures, tuple[Entry, ...]]:
    """Serve a prompt that is stored, and return what its first load read as well.

    Args:
        failing: See `TransferScript`; from when all is stored.
        missing: Which entries are not there.
    """
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(layout, hole_reuse=True, chunk_tokens=CHUNK_TOKENS) | options
    with engines.engine_of(layout, offloading=values, is_async=is_async) as engine:
        serve(engine, plan_of("other", prompt[: PROMPT_TOKENS // 3], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        for entry in list(engine.tier._entries.values()):
            if missing is not None and missing(entry):
                engine.tier._remove(entry, Removal.EVICTED)
        (worker,) = engine.workers
        fail_next(engine, *failing)
        counters = engine.side.counters
        before_tokens = counters.hit_tokens
        computed = watch_computed(engine)
        read: list[tuple[Entry, ...]] = []
        begin_load = engine.tier.begin_load

        def watch(hit: Hit, use: int) -> Any:
            read.append((*hit.entries, *filter(None, hit.hole_tails)))
            return begin_load(hit, use)

        engine.tier.begin_load = watch  # type: ignore[method-assign]
        serve(engine, plan_of("second", prompt))
        check_nothing_is_left(engine)
        found = AfterFailures(
            sorted(
                t for runs in computed.values() for first, end in runs for t in range(first, end)
            ),
            counters.hit_tokens - before_tokens,
            worker.transfers.counts["loads"],
            counters.tier.removed_entries[Removal.LOAD_FAILED],
        )
        return found, read[0] if read else ()


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layout", HYBRIDS, ids=lambda layout: layout.name)
def test_a_part_that_cannot_be_read_costs_as_much_as_one_that_is_missing(
    layout: PagedLayout, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, the first or the last of them, or tails."""
    monkeypatch.setattr(loads, "LEAST_RUN_TOKENS", 0)
    whole, parts = serve_again(layout, is_async=is_async)
    assert whole.num_loads == 1 and len(parts) > 5
    dearest = 0
    for number in (0, 1, len(parts) // 2, len(parts) - 2, len(parts) - 1):
        part = parts[number]
        # The first load is that of all parts, and those that follow are of one part each.
        failed, _ = serve_again(layout, failing=frozenset({1, 2 + number}), is_async=is_async)
        missing, _ = serve_again(
            layout,
            missing=lambda entry, part=part: entry.piece == part.piece,  # type: ignore[misc]
            is_async=is_async,
        )
        assert failed.computed == missing.computed
        assert failed.hit_tokens == missing.hit_tokens
        assert failed.removed == 1
        dearest = max(dearest, len(failed.computed))
    assert len(whole.computed) < dearest < PROMPT_TOKENS


def test_the_tails_of_a_hole_that_cannot_be_read_are_done_without() -> None:
    def is_of_hole(entry: Entry) -> bool:
        return entry.piece.kind is Kind.ROWS and entry.piece.first_tokens == 240

    with_hole, parts = serve_again(GEMMA, missing=is_of_hole)
    assert with_hole.num_loads == 2
    assert parts[-1].piece.kind is Kind.TAILS and parts[-1].piece.end_tokens < 240
    # One call for all rows, which is well; one for the tails; then each part.
    failed, _ = serve_again(GEMMA, missing=is_of_hole, failing=frozenset({2, 2 + len(parts)}))
    without, _ = serve_again(
        GEMMA, missing=lambda entry: is_of_hole(entry) or entry.piece == parts[-1].piece
    )
    assert failed.removed == 1
    assert failed.computed == without.computed != with_hole.computed


def test_a_request_whose_load_fails_twice_is_computed() -> None:
    _, parts = serve_again(GEMMA)
    second_load = 2 + len(parts)
    failed, _ = serve_again(GEMMA, failing=frozenset({1, 4, second_load, second_load + 1}))
    assert failed.computed[:PROMPT_TOKENS] == list(range(PROMPT_TOKENS))
    assert failed.hit_tokens == 0
    assert failed.removed == 2


@pytest.mark.parametrize("layout", [FULL, *HYBRIDS], ids=lambda layout: layout.name)
def test_without_holes_what_lies_before_a_failure_is_loaded(layout: PagedLayout) -> None:
    whole, parts = serve_again(layout)
    place = len(parts) // 2
    failed, _ = serve_again(layout, failing=frozenset({1, 2 + place}), hole_reuse=False)
    missing, _ = serve_again(
        layout, missing=lambda entry: entry.piece == parts[place].piece, hole_reuse=False
    )
    assert failed.computed == missing.computed
    assert 0 < failed.hit_tokens == missing.hit_tokens < whole.hit_tokens


@pytest.mark.parametrize("layout", [FULL, *HYBRIDS], ids=lambda layout: layout.name)
def test_a_second_load_does_not_wait_for_the_blocks_of_the_first(layout: PagedLayout) -> None:
    """In a pool that has room for one of them: vLLM 0.23.0 counts both."""
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    following = plan_of("second", prompt)
    values = offloading(layout, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    num_blocks = blocks_for_longest(layout, (following,), 256)
    with engines.engine_of(layout, offloading=values, num_blocks=num_blocks) as engine:
        serve(engine, plan_of("other", prompt[: PROMPT_TOKENS // 3], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        (worker,) = engine.workers
        fail_next(engine, 1, 12)
        serve(engine, following)
        assert worker.transfers.counts["failed loads"] == 2
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        check_nothing_is_left(engine)
