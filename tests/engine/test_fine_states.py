# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""States whose blocks have several units: prompts hit in host memory at every unit.

The engines are those of ``test_connector_scheduler``. Pages are real tensors, and every state that
a step reads is compared with the state of exactly the request's tokens.
"""

from __future__ import annotations

import random
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
from support.connector.engines import engine_of, fail_next, plan_of
from support.connector.offload_run import check_nothing_is_left, run_offloading, serve
from support.connector.offload_workloads import EngineKind, offloading, random_offload, tokens
from support.connector.paged_layouts import WIDE_STATE_LAYOUTS, WIDE_STATES, PagedLayout
from support.connector.simulated_engine import SimulatedEngine
from support.sample import sampled
from support.scheduler.options import Drafter
from support.upstream_version import IS_SINCE_0_30

from vllm_ascend_kvext.connector.common import host_layout
from vllm_ascend_kvext.connector.scheduler import step_budget
from vllm_ascend_kvext.connector.scheduler.stores import Stores
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.settings import DISABLE_VARIABLE
from vllm_ascend_kvext.store.entries import Kind, Piece

pytestmark = pytest.mark.usefixtures("offloading_in_effect", "fine_units")

UNIT = 8
BLOCK = WIDE_STATES.unit_tokens
LAYOUTS = WIDE_STATE_LAYOUTS if IS_SINCE_0_30 else WIDE_STATE_LAYOUTS[:-1]
"""vLLM 0.23 hashes whole states if blocks of rows are smaller."""

NUM_SEEDS = sampled(6)
by_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)


@pytest.fixture
def fine_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys at units of a few tokens, so that small blocks have several units. Hits of so few tokens
    earn no steps, so steps may end wherever a state is to be stored."""
    monkeypatch.setattr(host_layout, "MAX_HASH_TOKENS", UNIT)
    monkeypatch.setattr(host_layout, "MAX_FINE_TOKENS", UNIT)
    monkeypatch.setattr(step_budget, "FIRST_STEPS", 1e9)
    monkeypatch.setattr(step_budget, "MAX_LEFT_STEPS", 1e9)


@pytest.fixture(scope="module")
def soaked() -> Counter[str]:
    return Counter()


@pytest.mark.parametrize("kind", EngineKind, ids=lambda kind: kind.value)
@by_layout
def test_random_requests(layout: PagedLayout, kind: EngineKind, soaked: Counter[str]) -> None:
    """Bytes and outputs are right, and nothing is left, whatever happens to requests."""
    take = Stores.take_fleeting_jobs

    def counted(stores: Stores) -> Any:
        soaked["fleeting"] += len(stores.fleeting)
        return take(stores)

    with mock.patch.object(Stores, "take_fleeting_jobs", counted):
        for seed in range(NUM_SEEDS):
            soaked.update(run_offloading(random_offload(layout, seed, 20, kind)).counts)
    soaked["runs"] += NUM_SEEDS


def test_soak_has_met_everything(soaked: Counter[str]) -> None:
    if soaked["runs"] < len(LAYOUTS) * len(EngineKind) * NUM_SEEDS:
        pytest.skip("only a part of the soak has run")
    names = ("fleeting", "aborts", "preemptions", "swaps", "failed stores", "failed loads")
    names += ("resets of running requests", "removed: evicted", "hit requests")
    assert {name for name in names if not soaked[name]} == set()
    assert soaked["fleeting"] > 100


@by_layout
@pytest.mark.parametrize("max_batched_tokens", [12, 20, 4 * BLOCK])
def test_a_prompt_hits_up_to_its_last_unit_whatever_its_length(
    layout: PagedLayout, max_batched_tokens: int
) -> None:
    rng = random.Random(layout.name)
    with engine_of(layout, max_num_batched_tokens=max_batched_tokens) as engine:
        assert engine.side._stores.planner.min_prompt_tokens == UNIT + 1
        for num_tokens in range(1, 3 * BLOCK + 2):
            prompt = tokens(rng, num_tokens)
            serve(engine, plan_of(f"first-{num_tokens}", prompt))
            found = serve_and_count(engine, plan_of(f"second-{num_tokens}", prompt))
            assert found == (num_tokens - 1) // UNIT * UNIT, num_tokens
        check_nothing_is_left(engine)


@by_layout
def test_prompts_that_part_within_a_block_hit_up_to_the_last_unit_before(
    layout: PagedLayout,
) -> None:
    rng = random.Random(layout.name)
    with engine_of(layout) as engine:
        for shared_tokens in range(UNIT, 2 * BLOCK, UNIT + 3):
            shared = tokens(rng, shared_tokens)
            hits = []
            for number in range(3):
                prompt = [*shared, 60 + number, *tokens(rng, BLOCK)]
                plan = plan_of(f"{shared_tokens}-{number}", prompt, max_tokens=1)
                hits.append(serve_and_count(engine, plan))
            assert hits[2] == shared_tokens // UNIT * UNIT
        check_nothing_is_left(engine)


def test_steps_end_early_only_while_the_engine_may_add_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(step_budget, "FIRST_STEPS", 3.0)
    monkeypatch.setattr(step_budget, "ADDED_PER_STEP", 1e-6)
    rng = random.Random(0)
    with engine_of(WIDE_STATES) as engine:
        runs = watched_runs(engine)
        nums_of_runs = []
        for number in range(6):
            runs.clear()
            prompt = tokens(rng, 2 * UNIT + 3)  # It ends within a block, and its last unit before.
            serve(engine, plan_of(f"{number}", prompt, max_tokens=1))
            nums_of_runs.append(len(runs))
        assert nums_of_runs == [2, 2, 2, 2, 1, 1]
        assert engine.side.counters.added_steps == 4
        check_nothing_is_left(engine)


@by_layout
def test_a_longer_prompt_goes_on_at_the_end_of_a_shorter_one(layout: PagedLayout) -> None:
    """Each turn resumes within a block, and ends within a block."""
    rng = random.Random(layout.name)
    with engine_of(layout) as engine:
        prompt = tokens(rng, BLOCK + UNIT + 3)
        before_tokens = 0
        for number in range(12):
            before_steps = engine.side.counters.state_steps
            found = serve_and_count(engine, plan_of(f"{number}", prompt, max_tokens=2))
            num_steps = engine.side.counters.state_steps - before_steps
            # The end of the prompt, where it parts from others, the block before, and rungs.
            assert (len(prompt) - 1) // UNIT * UNIT == found or 0 < num_steps <= 8
            assert found >= before_tokens // UNIT * UNIT
            before_tokens = len(prompt) - 1
            prompt = [*prompt, *tokens(rng, rng.randrange(1, 20))]
        check_nothing_is_left(engine)


@by_layout
def test_a_state_waits_for_no_other_store(layout: PagedLayout) -> None:
    """The step behind a boundary overwrites the state. So workers store the state before it."""
    prompt = tokens(random.Random(layout.name), BLOCK + 2 * UNIT + 1)
    with engine_of(layout) as engine:
        engine.side._stores.queue.begin = lambda: iter(())  # No other store begins.
        engine.add_request(plan_of("first", prompt, max_tokens=20))
        for _ in range(8):
            engine.step()
        stored = {
            entry.piece.end_tokens for entry in engine.entries if entry.piece.kind is Kind.TAILS
        }
        assert BLOCK + 2 * UNIT in stored
        assert all(not store.stored for store in engine.side._stores.fleeting)
        engine.side.abandon_stores()


@by_layout
def test_a_turn_whose_last_state_was_not_stored_has_tails_at_its_end(layout: PagedLayout) -> None:
    prompt = tokens(random.Random(layout.name), BLOCK + 2 * UNIT + 1)
    with engine_of(layout) as engine:
        engine.add_request(plan_of("first", prompt, max_tokens=2))
        while not engine.side._stores.fleeting:
            engine.step()
        stores = engine.side._stores
        ((entry, _, request, progress),) = stores.fleeting[0].stored
        end_tokens = entry.piece.end_tokens
        stores.abandon()
        pieces: list[Any] = []
        with mock.patch.object(stores, "_store", lambda *args: pieces.append(args[2])):
            stores._store_end(request, progress, end_tokens)
        assert pieces[-1] == Piece.tails(end_tokens)
        serve(engine)


@by_layout
def test_a_reset_drops_states_that_are_not_stored_yet(layout: PagedLayout) -> None:
    prompt = tokens(random.Random(layout.name), BLOCK + 2 * UNIT + 1)
    with engine_of(layout, caching=True) as engine:
        engine.add_request(plan_of("first", prompt, max_tokens=5))
        while not engine.side._stores.fleeting:
            engine.step()
        assert engine.side.has_transfers
        assert engine.reset(reset_running_requests=True, reset_connector=True)
        assert not engine.side._stores.fleeting
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("has_drafts", [False, True])
def test_what_ends_in_a_step_with_drafts_is_held_and_stored_one_step_later(
    has_drafts: bool,
) -> None:
    """States of accepted drafts are copied to their blocks when the drafts are verified."""
    prompt = tokens(random.Random(3), BLOCK + 1)
    with engine_of(WIDE_STATES) as engine:
        engine.add_request(plan_of("first", prompt, max_tokens=BLOCK))
        engine.step()
        engine.step()
        request = engine.scheduler.requests["first"]
        stores = engine.side._stores
        progress = engine.side._states["first"].progress
        assert progress is not None
        with (
            mock.patch.object(stores, "_store_boundaries") as stored,
            mock.patch.object(stores, "_hold_tails") as held,
        ):
            stores._advance(request, progress, 2 * BLOCK, has_drafts)
        assert stored.call_args.args[2] == 2 * BLOCK - has_drafts
        assert held.call_args.args[2] == 2 * BLOCK
        serve(engine)


@by_layout
def test_a_load_that_fails_at_its_state_goes_back_to_an_earlier_one(layout: PagedLayout) -> None:
    """The load is made again part by part, and the part with the state fails."""
    prompt = tokens(random.Random(layout.name), 2 * BLOCK + 2 * UNIT + 1)
    found = []
    for failing in range(2, 8):
        with engine_of(layout) as engine:
            serve(engine, plan_of("first", prompt, max_tokens=1))
            fail_next(engine, 1, failing)
            hit_tokens = serve_and_count(engine, plan_of("second", prompt, max_tokens=1))
            if engine.side.counters.shortened_loads:
                found.append(hit_tokens)
            check_nothing_is_left(engine)
    # With smaller blocks of rows, vLLM ends no step with the last whole block of a state.
    assert found and set(found) <= {BLOCK, 2 * BLOCK}
    assert 0 not in found


def test_each_step_of_a_prompt_gets_tokens() -> None:
    """No step of a lone request is empty, and steps are few, whatever a step may compute at most.

    A step that begins within a block ends with the block at the latest.
    """
    rng = random.Random(0)
    for max_tokens in (*range(9, 40, 5), 64, 200):
        with engine_of(WIDE_STATES, max_num_batched_tokens=max_tokens) as engine:
            runs = watched_runs(engine)
            shared = tokens(rng, 5 * UNIT + 1)
            for number in range(6):
                prompt = [*shared, *tokens(rng, rng.randrange(1, 120))]
                runs.clear()
                steps = engine_steps(engine, plan_of(f"{number}", prompt, max_tokens=1))
                assert all(
                    first % BLOCK == 0 or end <= first - first % BLOCK + BLOCK
                    for first, end in runs
                )
                # All steps but those that bring the last report compute something.
                assert steps <= len(runs) + 8
                # Blocks, budget, junction, rungs, the prompt's last unit.
                assert len(runs) <= len(prompt) // BLOCK + -(-len(prompt) // max_tokens) + 8


def test_a_hint_within_a_block_leaves_a_state() -> None:
    rng = random.Random(1)
    shared = tokens(rng, BLOCK + 2 * UNIT)
    with engine_of(WIDE_STATES) as engine:
        plan = plan_of("first", [*shared, *tokens(rng, 50)], max_tokens=1)
        request = engine.make_request(plan)
        request.sampling_params.extra_args = {HINT_ARGUMENT: [len(shared)]}
        with mock.patch.object(engine, "make_request", return_value=request):
            serve(engine, plan)
        found = serve_and_count(engine, plan_of("second", [*shared, *tokens(rng, 50)], 1))
    assert found == len(shared)


def test_host_memory_for_one_state_keeps_the_engine_going() -> None:
    rng = random.Random(2)
    options = offloading(WIDE_STATES, host_memory_gib=WIDE_STATES.host_bytes[0] / (1 << 30))
    with engine_of(WIDE_STATES, offloading=options) as engine:
        for number in range(10):
            serve(engine, plan_of(f"{number}", tokens(rng, 50)))
        check_nothing_is_left(engine)


@pytest.mark.skipif(not IS_SINCE_0_30, reason="--prefix-match-unit")
@pytest.mark.parametrize("drafter", [None, Drafter.NGRAM], ids=["plain", "drafts"])
def test_with_a_match_unit_both_sides_have_the_same_unit(
    drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_layout, "MAX_HASH_TOKENS", 16)
    with engine_of(WIDE_STATES, match_unit_tokens=16, caching=True, drafter=drafter) as engine:
        assert engine.tier.geometry.unit_tokens == 16
        assert engine.side._view.fine_keys is None


@pytest.mark.parametrize("drafter", [None, Drafter.NGRAM], ids=["plain", "drafts"])
def test_states_of_drafts_are_not_kept_without_the_repair(
    drafter: Drafter | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DISABLE_VARIABLE, "accepted-drafts")
    found = pytest.raises(ConnectorError, match="expected the repair accepted-drafts, found it in")
    with found if drafter else nullcontext(), engine_of(WIDE_STATES, drafter=drafter):
        pass


@pytest.mark.parametrize("drafter", Drafter, ids=lambda each: each.value)
def test_no_rest_of_a_prompt_is_as_long_as_a_decode_with_drafts(drafter: Drafter) -> None:
    """Neither a step that ends for a state leaves such a rest, nor a hit. See `leaves_a_decode`.

    Upstream's steps end with blocks, whatever they leave.
    """
    rng = random.Random(drafter.value)
    with engine_of(WIDE_STATES, drafter=drafter) as engine:
        decode_tokens = engine.scheduler.num_spec_tokens + 1
        runs = watched_runs(engine)
        hit_tokens = 0
        for num_tokens in range(decode_tokens, 3 * BLOCK + 2):
            prompt = tokens(rng, num_tokens)
            # A shorter prompt leaves a state where the other would resume.
            for end in (num_tokens - decode_tokens + 1, num_tokens):
                runs.clear()
                plan = plan_of(f"{num_tokens}-{end}", prompt[:end], max_tokens=1)
                hit_tokens += serve_and_count(engine, plan)
                rests = {last - first for first, last in runs if first % BLOCK and last == end}
                assert decode_tokens not in rests, num_tokens
        assert decode_tokens > 1 and hit_tokens > BLOCK * BLOCK
        check_nothing_is_left(engine)


def watched_runs(engine: SimulatedEngine) -> list[tuple[int, int]]:
    """The first and the end token of each run that steps compute from now on."""
    runs: list[tuple[int, int]] = []
    note_step = engine.side._stores.note_step

    def watched(request: Any, state: Any, num_tokens: int) -> None:
        first = request.num_computed_tokens
        runs.append((first, first + num_tokens))
        note_step(request, state, num_tokens)

    engine.side._stores.note_step = watched  # type: ignore[method-assign]
    return runs


def engine_steps(engine: SimulatedEngine, plan: Any) -> int:
    engine.add_request(plan)
    steps = 0
    while engine.scheduler.requests:
        engine.step()
        steps += 1
    serve(engine)
    return steps


def serve_and_count(engine: SimulatedEngine, plan: Any) -> int:
    """The number of tokens that a request has loaded."""
    before = engine.side.counters.hit_tokens
    serve(engine, plan)
    return engine.side.counters.hit_tokens - before
