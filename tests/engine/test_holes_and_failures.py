# SPDX-License-Identifier: Apache-2.0
"""Holes where blocks run out, and loads that fail in part: what is computed, tried and said."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
from support.connector import offload_run
from support.connector.engines import (
    engine_of,
    fail_next,
    make_holes,
    plan_of,
    step_without_admissions,
    watch_computed,
)
from support.connector.offload_run import check_nothing_is_left, offloading_installed, serve
from support.connector.offload_workloads import blocks_for_longest, offloading, tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_LIKE,
    FULL,
    GEMMA,
    UPSTREAM_LAYOUTS,
    PagedLayout,
)
from support.connector.scripted_transfers import TransferScript
from support.scheduler.workload import RequestPlan
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind

PROMPT_TOKENS = 400


@pytest.fixture(scope="module", autouse=True)
def patches_installed() -> Iterator[None]:
    with offloading_installed():
        yield


@contextmanager
def engine_with_a_hole(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Any, RequestPlan]]:
    """An engine of a model with windows, and a request whose hole needs blocks for them."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
    prompt = tokens(random.Random(5), 40)
    with engine_of(GEMMA, reserve_full_prompt=False) as engine:
        serve(engine, plan_of("short", prompt[:16], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        make_holes(engine, (24, 32))
        yield engine, plan_of("second", [*prompt, *tokens(random.Random(6), 20)])


@pytest.mark.parametrize("was_found", [False, True], ids=["at once", "found before"])
@pytest.mark.parametrize("waits_long", [False, True], ids=["for a while", "for long"])
def test_a_request_waits_for_the_blocks_of_its_holes(
    waits_long: bool, was_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upstream asks only for those of the request: with one too few, the load would fail.

    Also where it was found with enough free blocks, and then not admitted.
    """
    used_blocks: list[int] = []
    for num_missing in (0, 1):
        with engine_with_a_hole(monkeypatch) as (engine, following):
            pool = engine.block_pool
            num_free = pool.get_num_free_blocks()
            engine.add_request(following)
            if num_missing and was_found:
                step_without_admissions(engine)
                assert engine.held.pinned_ids == {"second"}
                assert not engine.held.loading_ids
            held = pool.get_new_blocks(num_free - used_blocks[0] + 1) if num_missing else []
            engine.step()
            used_blocks.append(num_free - len(held) - pool.get_num_free_blocks())
            if num_missing and waits_long:
                engine.clock = lambda: 1e9
            for _ in range(5):
                engine.step()
            goes_without = bool(num_missing) and waits_long
            if num_missing:
                computed_tokens = engine.scheduler.requests["second"].num_computed_tokens
                assert bool(computed_tokens) is goes_without
            pool.free_blocks(held)
            serve(engine)
            counters = engine.side.counters
            assert bool(counters.hole_tokens) is not goes_without
            assert counters.hole_refusals[HoleRefusal.ROOM] == goes_without
            assert not counters.tier.failed_loads, "what is stored is lost for want of a block"
            check_nothing_is_left(engine)
    assert used_blocks[0] and not used_blocks[1]


def test_hits_of_a_request_are_not_negative_after_a_reset() -> None:
    """Its load leaves something out; before the next step, a reset takes its blocks."""
    prompt = tokens(random.Random(8), PROMPT_TOKENS)
    script = TransferScript(failing_load_numbers=frozenset({1, 2}))
    found: list[Any] = []
    with engine_of(FULL, script, caching=True) as engine:
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
        while not engine.held.hole_ids or engine.held.loading_ids:
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
        assert "second" in engine.held.request_ids and not engine.held.pinned_ids
        pool.free_blocks(held)
        engine.clock = lambda: 1e9
        serve(engine)
        assert engine.side.counters.hole_tokens
        check_nothing_is_left(engine)


def test_a_load_that_covers_too_little_still_fails() -> None:
    """A plan that is wrong is not tried part by part."""
    prompt = tokens(random.Random(11), PROMPT_TOKENS)
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", prompt))
        plan_step = engine.side.build_connector_meta

        def plan_too_little(*args: Any) -> Any:
            jobs = plan_step(*args)
            loads = [replace(load, stored=load.stored[:1] + load.stored[2:]) for load in jobs.loads]
            return replace(jobs, loads=tuple(loads))

        with mock.patch.object(engine.side, "build_connector_meta", plan_too_little):
            serve(engine, plan_of("second", prompt))
        assert engine.side.counters.tier.failed_loads == 1
        check_nothing_is_left(engine)


def test_an_entry_that_was_read_well_stays_when_its_neighbour_fails() -> None:
    """Its rows behind the place where the neighbour begins are those of another prompt."""
    rng = random.Random(7)
    prompt, other = tokens(rng, PROMPT_TOKENS), tokens(rng, PROMPT_TOKENS)
    chunk = offloading(FULL, chunk_tokens=128)
    script = TransferScript(failing_load_numbers=frozenset({4, 7}))
    with engine_of(FULL, script, offloading=chunk) as engine:
        for number, stored in enumerate(
            (prompt[:65], prompt[:80] + other[80:129], prompt[:113], prompt)
        ):
            serve(engine, plan_of(f"first-{number}", stored, max_tokens=1))
        (worker,) = engine.workers
        assert worker.transfers.counts["loads"] == 3
        (entry,) = [e for e in engine.entries if e.piece[1:] == (64, 128)]
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
) -> tuple[AfterFailures, list[Entry]]:
    """Serve a prompt that is stored, and return what its first load read as well.

    Args:
        failing: See `TransferScript`; from when all is stored.
        missing: Which entries are not there.
    """
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(layout, chunk_tokens=CHUNK_TOKENS) | options
    with engine_of(layout, offloading=values, is_async=is_async) as engine:
        serve(engine, plan_of("other", prompt[: PROMPT_TOKENS // 3], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        if missing is not None:
            engine.evict(missing)
        (worker,) = engine.workers
        fail_next(engine, *failing)
        counters = engine.side.counters
        before_tokens = counters.hit_tokens
        computed = watch_computed(engine)
        read: list[list[Entry]] = []
        plan_step = engine.side.build_connector_meta

        def watch(*args: Any) -> Any:
            jobs = plan_step(*args)
            by_place = {entry.offset_bytes: entry for entry in engine.entries}
            for load in jobs.loads:
                parts = (*load.stored, *(tails.stored for tails in load.hole_tails))
                read.append([by_place[part.host_offset_bytes] for part in parts])
            return jobs

        engine.side.build_connector_meta = watch  # type: ignore[method-assign]
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
        return found, read[0] if read else []


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("layout", HYBRIDS, ids=lambda layout: layout.name)
def test_a_part_that_cannot_be_read_costs_as_much_as_one_that_is_missing(
    layout: PagedLayout, is_async: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, the first or the last of them, or tails."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)
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
    with engine_of(layout, offloading=values, num_blocks=num_blocks) as engine:
        serve(engine, plan_of("other", prompt[: PROMPT_TOKENS // 3], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        (worker,) = engine.workers
        fail_next(engine, 1, 12)
        serve(engine, following)
        assert worker.transfers.counts["failed loads"] == 2
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        check_nothing_is_left(engine)


def test_a_full_model_without_holes_is_looked_up_again_behind_a_local_hit() -> None:
    """The device has the beginning, and only what is missing is computed."""
    local_tokens = 32
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(FULL, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engine_of(FULL, offloading=values, caching=True) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        assert engine.reset()
        serve(engine, plan_of("local", prompt[: local_tokens + 1], max_tokens=1))
        kept = {b.block_id for b in engine.block_pool.blocks if b.block_hash is not None}
        assert len(kept) == local_tokens // FULL.groups[0].block_tokens
        computed = watch_computed(engine)
        num_parts = (PROMPT_TOKENS - local_tokens) // CHUNK_TOKENS
        fail_next(engine, 1, num_parts)  # The whole, and the last part but one.
        serve(engine, plan_of("second", prompt))
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        num_computed = sum(end - first for first, end in computed["second"])
        assert num_computed < 100, f"computed {num_computed} of {PROMPT_TOKENS} tokens"
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", [FULL, GEMMA], ids=lambda layout: layout.name)
def test_a_load_that_fails_as_a_whole_and_not_in_parts_is_reported(
    layout: PagedLayout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts can be read: nothing is lost, but each load is made twice."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(layout, chunk_tokens=CHUNK_TOKENS)
    with engine_of(layout, offloading=values) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        fail_next(engine, 1)
        with caplog.at_level(logging.DEBUG, "vllm.ascend_kvext"):
            serve(engine, plan_of("second", prompt))
        (worker,) = engine.workers
        assert worker.transfers.counts["failed loads"] == 1
        said = {record.message for record in caplog.records if "failed" in record.message}
        assert len(said) == 1 and "made again without 0 of its" in said.pop()


def test_shortfalls_are_counted_once_for_each_request() -> None:
    """``HostTier.count_shortfall``: "once for each request"."""
    prompt = tokens(random.Random(4), PROMPT_TOKENS)
    values = offloading(GEMMA, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engine_of(GEMMA, offloading=values) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        shortfalls = engine.tier.counters.shortfalls
        before = sum(shortfalls.values())
        fail_next(engine, 1, 20)
        serve(engine, plan_of("second", [*prompt, *tokens(random.Random(6), 100)]))
        assert sum(shortfalls.values()) - before <= 1, dict(shortfalls)


def test_calls_to_a_dead_device_are_few() -> None:
    """Each call may last until a timeout, and all other transfers wait behind it."""
    rng = random.Random(4)
    prompts = [tokens(rng, PROMPT_TOKENS) for _ in range(8)]
    values = offloading(GEMMA, chunk_tokens=CHUNK_TOKENS)
    with engine_of(GEMMA, offloading=values) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        fail_next(engine, *range(1, 10_000))
        serve(engine, *(plan_of(f"second-{n}", prompt) for n, prompt in enumerate(prompts)))
        (worker,) = engine.workers
        num_calls = worker.transfers.counts["failed loads"]
        assert num_calls <= 4 * len(prompts), f"{num_calls} calls for {len(prompts)} loads"


@pytest.mark.skipif(not UPSTREAM_LAYOUTS, reason="vLLM's own DeepSeek V4 is in 0.23.0")
@pytest.mark.parametrize("num_requests", [2, 3])
def test_a_failed_load_behind_a_request_that_does_not_fit_gives_its_blocks_back(
    num_requests: int,
) -> None:
    """The first request, which is computed, needs what the second holds until vLLM comes to it.

    vLLM comes to nobody behind a request that does not fit: nothing would run any more.
    """
    (layout,) = UPSTREAM_LAYOUTS
    rng = random.Random(4)
    num_tokens = min(960, 3 * layout.unit_tokens + 40)
    shared = tokens(rng, num_tokens * 2 // 5)
    prompts = [[*shared, *tokens(rng, num_tokens - len(shared))] for _ in range(num_requests)]
    plans = [plan_of(f"second-{number}", prompt) for number, prompt in enumerate(prompts)]
    room = 1.0 if num_requests == 2 else 1.3
    num_blocks = int(blocks_for_longest(layout, tuple(plans), 256) * room) + 1
    values = offloading(layout, hole_reuse=False)
    with engine_of(layout, offloading=values, num_blocks=num_blocks) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        (worker,) = engine.workers
        worker.transfers._script = TransferScript(failing_loads=1.0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(offload_run, "MAX_STEPS", 400)
            serve(engine, *plans)
