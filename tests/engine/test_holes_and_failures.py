# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Holes for which blocks are lacking, and loads that fail in part.

The tests check what is computed, tried again, and reported.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
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
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import blocks_for_longest, offloading, tokens
from support.connector.paged_layouts import (
    DEEPSEEK_V4_LIKE,
    FULL,
    FULL_EAGLE,
    GEMMA,
    UPSTREAM_LAYOUTS,
    PagedLayout,
)
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.scenarios.engine import watch
from support.scheduler.options import Drafter
from support.scheduler.workload import RequestPlan
from vllm.v1.metrics.stats import PrefixCacheStats

from vllm_ascend_kvext.connector.common.scheduler_view import SchedulerView
from vllm_ascend_kvext.connector.scheduler import loads
from vllm_ascend_kvext.holes.eligibility import HoleRefusal
from vllm_ascend_kvext.patches.connector import scheduler as patched_scheduler
from vllm_ascend_kvext.store.counters import Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.lookup import Shortfall

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

PROMPT = tokens(random.Random(4), 400)
SECOND = plan_of("second", PROMPT)
CHUNK_TOKENS = 16
LAYOUTS = (FULL, GEMMA, DEEPSEEK_V4_LIKE)

by_layout = {"ids": lambda layout: layout.name}


@pytest.fixture
def any_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs behind holes are loaded, however short they are."""
    monkeypatch.setattr(loads, "MIN_RUN_TOKENS", 0)


# Blocks run out.


@contextmanager
def engine_with_a_hole() -> Iterator[tuple[SimulatedEngine, RequestPlan]]:
    """An engine of a model with windows, and a request.

    The request's hole needs blocks for windows.
    """
    prompt = tokens(random.Random(5), 40)
    with engine_of(GEMMA, reserve_full_prompt=False) as engine:
        serve(engine, plan_of("short", prompt[:16], max_tokens=1))
        serve(engine, plan_of("first", prompt, max_tokens=1))
        make_holes(engine, (24, 32))
        yield engine, plan_of("second", [*prompt, *tokens(random.Random(6), 20)])
        check_nothing_is_left(engine)


@pytest.mark.parametrize("was_found", [False, True], ids=["at once", "found before"])
@pytest.mark.parametrize("waits_long", [False, True], ids=["for a while", "for long"])
@pytest.mark.usefixtures("any_run")
def test_a_request_waits_for_the_blocks_of_its_holes(waits_long: bool, was_found: bool) -> None:
    """Upstream asks only for the blocks of the request. With one block too few, the load would
    fail.

    The load would also fail if there were enough free blocks at the lookup, but not at the
    admission.
    """
    used_blocks: list[int] = []
    for num_missing in (0, 1):
        with engine_with_a_hole() as (engine, following):
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
            assert not counters.tier.failed_loads, "a load has failed because a block was lacking"
    assert used_blocks[0] and not used_blocks[1]


@pytest.mark.usefixtures("any_run")
def test_a_request_that_lacked_blocks_once_has_its_holes_when_there_are_enough() -> None:
    """The request waits for its turn meanwhile. A full vLLM does not ask about waiting requests."""
    with engine_with_a_hole() as (engine, following):
        pool = engine.block_pool
        held = pool.get_new_blocks(pool.get_num_free_blocks() - 2)
        engine.add_request(following)
        engine.step()
        assert "second" in engine.held.request_ids and not engine.held.pinned_ids
        pool.free_blocks(held)
        engine.clock = lambda: 1e9
        serve(engine)
        assert engine.side.counters.hole_tokens


# Parts of a load fail.


class Again(NamedTuple):
    """The facts about a request whose prompt is stored."""

    computed: list[int]
    hit_tokens: int
    num_loads: int
    num_removed: int
    parts: list[Entry]
    """The parts of its first load, in the order in which they are read."""


def serve_again(
    layout: PagedLayout,
    *failing: int,
    missing: Callable[[Entry], bool] = lambda entry: False,
    is_async: bool = False,
    **options: Any,
) -> Again:
    """Serve a prompt that is stored, except for missing tokens. Some calls of loads fail."""
    values = offloading(layout, chunk_tokens=CHUNK_TOKENS) | options
    with engine_of(layout, offloading=values, is_async=is_async) as engine:
        serve(engine, plan_of("other", PROMPT[: len(PROMPT) // 3], max_tokens=1))
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        engine.tier.evict(missing)
        fail_next(engine, *failing)
        counters = engine.side.counters
        computed = watch_computed(engine)
        before_tokens = counters.hit_tokens
        begin_load = engine.tier.begin_load
        with mock.patch.object(engine.tier, "begin_load", side_effect=begin_load) as begun:
            serve(engine, SECOND)
        (worker,) = engine.workers
        again = Again(
            sorted(t for runs in computed.values() for run in runs for t in range(*run)),
            counters.hit_tokens - before_tokens,
            worker.transfers.counts["loads"],
            counters.tier.removed_entries[Removal.LOAD_FAILED],
            [entry for call in begun.call_args_list[:1] for entry in call.args[2]],
        )
        fail_next(engine)
        num_holes = counters.holes
        serve(engine, plan_of("third", PROMPT))
        assert counters.holes == num_holes, "the computed tokens were not stored again"
        check_nothing_is_left(engine)
        return again


@pytest.mark.parametrize(
    ("is_async", "hole_reuse"),
    [(False, True), (True, True), (False, False)],
    ids=["sync", "async", "without holes"],
)
@pytest.mark.parametrize(
    ("layout", "hole"),
    [*((layout, ()) for layout in LAYOUTS), (FULL, (192, 208))],
    ids=[*(layout.name for layout in LAYOUTS), "beside a hole"],
)
@pytest.mark.usefixtures("any_run")
def test_parts_that_cannot_be_read_cost_as_much_as_if_they_were_missing(
    layout: PagedLayout, hole: tuple[int, ...], is_async: bool, hole_reuse: bool
) -> None:
    """Parts that fail in the middle are the neighbours of a hole, if there is one."""

    def serve_without(gone: set[Piece], *failing: int) -> Again:
        return serve_again(
            layout,
            *failing,
            missing=lambda e: e.piece in gone or e.piece.first_tokens in hole,
            is_async=is_async,
            hole_reuse=hole_reuse,
        )

    whole = serve_without(set())
    last = len(whole.parts) - 1
    assert whole.num_loads == 1 and last > 5
    middle = last // 2
    for places in ([0], [1], [middle, middle + 1], [last - 1], [last], range(1, last + 1)):
        # The first call loads all parts. Each call after it loads one part. After three failures in
        # a row, the other parts are not tried.
        failed = serve_without(set(), 1, *(2 + place for place in places[:3]))
        missing = serve_without({whole.parts[place].piece for place in places})
        assert len(whole.computed) < len(failed.computed)
        assert failed.computed == missing.computed
        assert whole.hit_tokens > failed.hit_tokens == missing.hit_tokens
        assert failed.hit_tokens or not hole_reuse or len(places) > 2
        assert failed.num_removed == len(places)


def test_the_tails_of_a_hole_that_cannot_be_read_are_done_without() -> None:
    def is_of_hole(entry: Entry) -> bool:
        return entry.piece.kind is Kind.ROWS and entry.piece.first_tokens == 240

    with_hole = serve_again(GEMMA, missing=is_of_hole)
    assert with_hole.num_loads == 2
    tails = min(part.piece for part in with_hole.parts if part.piece.kind is Kind.TAILS)
    assert tails.end_tokens < 240
    # The call for all rows succeeds, and the call for the tails fails. Then each part is tried,
    # these tails last.
    failed = serve_again(GEMMA, 2, 2 + len(with_hole.parts), missing=is_of_hole)
    without = serve_again(GEMMA, missing=lambda e: is_of_hole(e) or e.piece == tails)
    assert failed.num_removed == 1
    assert failed.computed == without.computed != with_hole.computed


def test_a_request_whose_load_fails_twice_is_computed() -> None:
    second_load = 2 + len(serve_again(GEMMA).parts)
    failed = serve_again(GEMMA, 1, 4, second_load, second_load + 1)
    assert failed.computed[: len(PROMPT)] == list(range(len(PROMPT)))
    assert failed.hit_tokens == 0
    assert failed.num_removed == 2


def test_load_fails_as_a_whole_where_requests_are_to_fail_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def that_fails_requests(**facts: Any) -> SchedulerView:
        return SchedulerView(**{**facts, "recomputes_failed_loads": False})

    monkeypatch.setattr(patched_scheduler, "SchedulerView", that_fails_requests)
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        fail_next(engine, 1, 3)
        engine.scheduler.recompute_kv_load_failures = False
        engine.add_request(SECOND)
        while engine.scheduler.requests or engine.side.has_work:
            engine.step()
        counters = engine.side.counters
        assert counters.hit_tokens == counters.hole_tokens == 0
        assert counters.tier.removed_entries[Removal.LOAD_FAILED] == 1  # The other rows stay.
        check_nothing_is_left(engine)


def test_a_load_that_covers_too_little_still_fails() -> None:
    """A wrong plan is not tried part by part."""
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        plan_step = engine.side.build_connector_meta

        def plan_too_little(*args: Any) -> Any:
            jobs = plan_step(*args)
            loads = [replace(load, stored=load.stored[:1] + load.stored[2:]) for load in jobs.loads]
            return replace(jobs, loads=tuple(loads))

        with mock.patch.object(engine.side, "build_connector_meta", plan_too_little):
            serve(engine, SECOND)
        assert engine.side.counters.tier.failed_loads == 1
        check_nothing_is_left(engine)


def store_beside_another(engine: SimulatedEngine) -> None:
    """Store the prompt's entries. One of them belongs to a prompt that differs from token 80 on."""
    other = tokens(random.Random(7), 129)
    for number, stored in enumerate((PROMPT[:65], PROMPT[:80] + other[80:], PROMPT[:113], PROMPT)):
        serve(engine, plan_of(f"first-{number}", stored, max_tokens=1))
    pieces = sorted(entry.piece[1:] for entry in engine.entries)
    assert pieces[:4] == [(0, 64), (64, 128), (80, 112), (112, 128)]


def test_an_entry_that_was_read_well_stays_when_its_neighbour_fails() -> None:
    """From the neighbour's beginning on, the entry's rows belong to another prompt."""
    with engine_of(FULL, offloading=offloading(FULL, chunk_tokens=128)) as engine:
        store_beside_another(engine)
        (entry,) = [each for each in engine.entries if each.piece[1:] == (64, 128)]
        fail_next(engine, 1, 4)
        serve(engine, SECOND)
        assert engine.side.counters.hole_tokens == 32  # tokens 80 to 111
        assert entry.state is EntryState.STORED
        check_nothing_is_left(engine)


def test_a_load_writes_no_rows_of_others_into_a_hole_that_is_computed_beside_it() -> None:
    """The entry of another prompt also has a row of this prompt. This run is too short to load."""
    with engine_of(FULL, offloading=offloading(FULL, chunk_tokens=128)) as engine:
        store_beside_another(engine)
        engine.tier.evict(lambda entry: entry.piece[1:] in [(0, 64), (80, 112)])
        engine.add_request(SECOND)
        (worker,) = engine.workers
        with mock.patch.object(worker.transfers, "end_some"):
            engine.step()
            engine.step()
        assert engine.side.counters.hole_tokens == 112
        serve(engine)


def test_hits_of_a_request_are_not_negative_after_a_reset() -> None:
    """A part of the load fails. Before the next step, a reset takes the request's blocks."""
    found: list[Any] = []

    def note(results: Any, *_: Any) -> None:
        for of_client in results.values():
            found.extend(o.prefill_stats for o in of_client.outputs if o.prefill_stats)

    with engine_of(FULL, caching=True) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        assert engine.reset()
        fail_next(engine, 1, 2)
        engine.scheduler.connector_prefix_cache_stats = PrefixCacheStats()
        watch(engine.scheduler, "update_from_output", note)
        engine.add_request(SECOND)
        while not engine.held.hole_ids or engine.held.loading_ids:
            engine.step()
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        serve(engine)
        (stats,) = found
        assert stats.num_external_cached_tokens >= 0, stats
        assert stats.num_cached_tokens >= 0, stats
        assert stats.num_cached_tokens + stats.num_computed_tokens == len(PROMPT)


# A request whose load has failed is looked up again.


@pytest.mark.parametrize("layout", LAYOUTS, **by_layout)
def test_a_second_load_does_not_wait_for_the_blocks_of_the_first(layout: PagedLayout) -> None:
    """The pool has room for one of the two loads: vLLM 0.23.0 counts both."""
    values = offloading(layout, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    num_blocks = blocks_for_longest(layout, (SECOND,), 256)
    with engine_of(layout, offloading=values, num_blocks=num_blocks) as engine:
        serve(engine, plan_of("other", PROMPT[: len(PROMPT) // 3], max_tokens=1))
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        fail_next(engine, 1, 12)
        serve(engine, SECOND)
        (worker,) = engine.workers
        assert worker.transfers.counts["failed loads"] == 2
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        check_nothing_is_left(engine)


def test_what_fails_to_load_beside_draft_layers_is_looked_up_again() -> None:
    """A hole at the end of the load would end where the blocks of its request do."""
    options = {"drafter": Drafter.EAGLE, "num_draft_tokens": 4}
    values = offloading(FULL_EAGLE, chunk_tokens=CHUNK_TOKENS)
    with engine_of(FULL_EAGLE, offloading=values, **options) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        fail_next(engine, 1, len(PROMPT) // CHUNK_TOKENS - 1)
        computed = watch_computed(engine)
        serve(engine, SECOND)
        assert engine.side.computes_holes
        assert engine.side.counters.tier.failed_loads == 1
        assert not engine.side.counters.hole_tokens
        assert not any("hole" in row for row in computed)
        check_nothing_is_left(engine)


def test_a_full_model_without_holes_is_looked_up_again_behind_a_local_hit() -> None:
    """The device has the beginning, so only the missing tokens behind it are computed."""
    local_tokens = 32
    values = offloading(FULL, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engine_of(FULL, offloading=values, caching=True) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        assert engine.reset()
        serve(engine, plan_of("local", PROMPT[: local_tokens + 1], max_tokens=1))
        kept = {b.block_id for b in engine.block_pool.blocks if b.block_hash is not None}
        assert len(kept) == local_tokens // FULL.groups[0].block_tokens
        computed = watch_computed(engine)
        num_parts = (len(PROMPT) - local_tokens) // CHUNK_TOKENS
        fail_next(engine, 1, num_parts)  # The whole load, and the last part but one.
        serve(engine, SECOND)
        assert engine.side.counters.tier.removed_entries[Removal.LOAD_FAILED] == 1
        num_computed = sum(end - first for first, end in computed["second"])
        assert num_computed < 100, f"computed {num_computed} of {len(PROMPT)} tokens"
        check_nothing_is_left(engine)


@pytest.mark.parametrize("layout", [FULL, GEMMA], **by_layout)
def test_a_load_that_fails_as_a_whole_and_not_in_parts_is_reported(
    layout: PagedLayout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts can be read. No KV is lost, but each load is made twice."""
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    with caplog.at_level(logging.DEBUG, "vllm.ascend_kvext"):
        assert serve_again(layout, 1).num_removed == 0
    said = {record.message for record in caplog.records if "failed" in record.message}
    assert len(said) == 1 and "made again without 0 of its" in said.pop()


def test_the_reason_for_a_shorter_hit_is_counted_once_for_each_request() -> None:
    """Neither the number of questions about a request matters, nor where its load fails."""
    values = offloading(GEMMA, hole_reuse=False, chunk_tokens=CHUNK_TOKENS)
    with engine_of(GEMMA, offloading=values) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        fail_next(engine, 1, 20)
        engine.add_request(plan_of("second", [*PROMPT, *tokens(random.Random(6), 100)]))
        step_without_admissions(engine, 3)
        serve(engine)
        assert engine.side.counters.tier.failed_loads == 1
        assert engine.tier.counters.shortfalls[Shortfall.NEVER_STORED] == 2


def test_calls_to_a_dead_device_are_few() -> None:
    """Each call may last until a timeout, and all other transfers wait behind it."""
    rng = random.Random(4)
    prompts = [tokens(rng, len(PROMPT)) for _ in range(8)]
    values = offloading(GEMMA, chunk_tokens=CHUNK_TOKENS)
    with engine_of(GEMMA, offloading=values) as engine:
        for number, prompt in enumerate(prompts):
            serve(engine, plan_of(f"first-{number}", prompt, max_tokens=1))
        fail_next(engine, *range(1, 10_000))
        serve(engine, *(plan_of(f"second-{n}", prompt) for n, prompt in enumerate(prompts)))
        (worker,) = engine.workers
        num_calls = worker.transfers.counts["failed loads"]
        assert num_calls <= 4 * len(prompts), f"{num_calls} calls for {len(prompts)} loads"


@pytest.mark.parametrize("num_requests", [2, 3])
def test_a_failed_load_behind_a_request_that_does_not_fit_gives_its_blocks_back(
    num_requests: int,
) -> None:
    """The first request is computed, and needs the second's blocks before vLLM comes to the second.

    vLLM tries no request behind one that does not fit. So no request would run any more.
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
