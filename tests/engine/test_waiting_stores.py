# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Stores that have not begun give way to requests, on vLLM's real scheduler, with real pages.

An engine whose copies are slow takes about as many steps as an engine without the connector.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
from support.connector.engines import engine_of, make_holes, plan_of
from support.connector.offload_run import check_blocks, check_nothing_is_left, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import FULL, GEMMA, GPT_OSS, PagedLayout
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.connector.step_clock import StepClock
from support.sample import IS_LONG
from support.scheduler.engine import SchedulerEngine
from support.scheduler.options import EngineOptions
from support.scheduler.workload import RequestPlan
from vllm.v1.core.sched.interface import PauseState

from vllm_ascend_kvext.connector.scheduler.store_queue import PlannedStore
from vllm_ascend_kvext.patches.connector.kv_cache_manager import GivingWay
from vllm_ascend_kvext.store.counters import Refusal

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

NEVER = TransferScript(max_per_step=0)
"""No transfer ends."""

MAX_STEPS_OF_STOCK = 1.1
MAX_STEPS = 4000


class Case(NamedTuple):
    """A pool that is small for its requests."""

    layout: PagedLayout
    num_blocks: int
    is_async: bool
    prompt_tokens: range
    num_requests: int
    steps_between: int


CASES = {
    "full": Case(FULL, 30, False, range(30, 60), 60, 4),
    "full, asynchronous": Case(FULL, 30, True, range(30, 60), 60, 4),
    "long prompts": Case(FULL, 121, False, range(100, 250), 40, 2),
    "a window": Case(GPT_OSS, 34, True, range(30, 60), 60, 4),
    "five windows": Case(GEMMA, 220, True, range(30, 60), 60, 4),
}


def chats(rng: random.Random, case: Case) -> list[RequestPlan]:
    """Requests of which half continue another one."""
    plans: list[RequestPlan] = []
    answered: list[list[int]] = []
    for number in range(case.num_requests):
        prompt = tokens(rng, rng.choice(case.prompt_tokens))
        if answered and rng.random() < 0.5:
            before = rng.choice(answered[-6:])
            if len(before) <= 2 * case.prompt_tokens.stop:
                prompt = before + tokens(rng, rng.randrange(1, 12))
        plan = RequestPlan(
            request_id=f"request-{number}",
            arrival_step=number * case.steps_between,
            prompt=tuple(prompt),
            max_tokens=rng.randrange(4, 20),
        )
        plans.append(plan)
        answered.append([*plan.prompt, *plan.expected_output()])
    return plans


def answer(engine: SchedulerEngine, plans: Sequence[RequestPlan]) -> Counter[str]:
    """Serve requests, and check their answers. Return the steps, and those that computed nothing.

    Steps after the last answer do not count.
    """
    counts: Counter[str] = Counter()
    outputs: dict[str, list[int]] = {}
    arrivals = list(reversed(plans))
    while arrivals or engine.scheduler.requests:
        while arrivals and arrivals[-1].arrival_step <= counts["steps"]:
            engine.add_request(arrivals.pop())
        assert counts["steps"] < MAX_STEPS, "the requests do not end"
        step = engine.step()
        counts["steps"] += 1
        counts["empty"] += not step.scheduled and bool(engine.scheduler.requests)
        for request_id, token_ids, _ in step.outputs:
            outputs.setdefault(request_id, []).extend(token_ids)
    assert outputs == {plan.request_id: plan.expected_output() for plan in plans}
    return counts


def options_of(case: Case, **options: Any) -> EngineOptions:
    return EngineOptions(
        num_blocks=case.num_blocks,
        max_num_batched_tokens=64,
        is_async=case.is_async,
        events=False,
        **options,
    )


@pytest.mark.parametrize("seed", range(4 if IS_LONG else 1))
@pytest.mark.parametrize("name", CASES)
def test_slow_stores_cost_few_steps(name: str, seed: int) -> None:
    case = CASES[name]
    plans = chats(random.Random(f"slow stores/{name}/{seed}"), case)
    stock = SchedulerEngine(case.layout, options_of(case))
    stock_steps = answer(stock, plans)["steps"]
    stock.shutdown()
    for steps_per_transfer in (1, 2, 10, 50):
        script = TransferScript(steps_per_transfer=steps_per_transfer)
        connector = offloading(case.layout, store_policy="second_touch", load_if_slower=False)
        engine = SimulatedEngine(case.layout, options_of(case, offloading=connector), script)
        StepClock(engine)
        try:
            counts = answer(engine, plans)
            assert counts["steps"] <= MAX_STEPS_OF_STOCK * stock_steps, counts
            stored = engine.tier.counters.stored_entries
            assert sum(stored.values()) >= (20 if steps_per_transfer == 1 else 1)
            engine.finish(max_steps=MAX_STEPS)
            check_nothing_is_left(engine)
        finally:
            engine.shutdown()


@contextmanager
def full_of_stores(
    layout: PagedLayout = FULL, script: TransferScript = NEVER, **options: Any
) -> Iterator[SimulatedEngine]:
    """An engine in which one store has begun, and another one holds most blocks.

    The first store is of 5 pages, and the second of 12. The pool has 24 pages.
    """
    values = {"num_blocks": 25, "offloading": offloading(layout, chunk_tokens=512)}
    with engine_of(layout, script, **values | options) as engine:
        for request_id, num_tokens in (("begun", 41), ("waiting", 97)):
            engine.add_request(plan_of(request_id, prompt_of(num_tokens), max_tokens=1))
            while request_id in engine.scheduler.requests:
                engine.step()
            engine.step()
        assert engine.held.num_stores == engine.held.num_planned_stores == 1
        assert engine.block_pool.get_num_free_blocks() == 24 - 5 - 12
        yield engine


def prompt_of(num_tokens: int) -> list[int]:
    return tokens(random.Random(num_tokens), num_tokens)


def let_go(engine: SimulatedEngine) -> None:
    for worker in engine.workers:
        worker.transfers.open()


def is_patched(engine: SimulatedEngine) -> bool:
    """Whether the block manager asks stores to give way."""
    function = getattr(engine.scheduler.kv_cache_manager.allocate_slots, "func", None)
    return isinstance(getattr(function, "__self__", None), GivingWay)


def test_a_store_gives_way_in_the_step_in_which_a_request_lacks_blocks() -> None:
    with full_of_stores() as engine:
        engine.add_request(plan_of("next", prompt_of(140), max_tokens=3))
        step = engine.step()
        assert [each.request_id for each in step.scheduled] == ["next"]
        counters = engine.side.counters.tier
        assert counters.refused_stores[Refusal.BUSY] == 1 and not counters.failed_stores
        check_blocks(engine)
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


def test_a_store_stays_where_a_request_has_blocks_without_it() -> None:
    with full_of_stores() as engine:
        engine.add_request(plan_of("next", prompt_of(50), max_tokens=3))
        assert engine.step().scheduled
        assert engine.held.num_planned_stores == 1
        assert not engine.side.counters.tier.refused_stores[Refusal.BUSY]
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


def test_a_store_gives_way_to_a_request_with_holes() -> None:
    """Before its load, a request is kept waiting until there are blocks for windows of holes."""
    prompt = prompt_of(201)
    connector = offloading(GPT_OSS, chunk_tokens=16)
    with engine_of(
        GPT_OSS, num_blocks=44, max_num_batched_tokens=64, offloading=connector
    ) as engine:
        for number, num_tokens in enumerate((33, 201)):  # The hole reads the tails of the first.
            serve(engine, plan_of(f"stored {number}", prompt[:num_tokens], max_tokens=1))
        make_holes(engine, (32, 48))
        for worker in engine.workers:
            worker.transfers._script = NEVER
        engine.side._cost._s_per_byte.clear()
        for request_id, num_tokens in (("begun", 41), ("waiting", 301)):
            engine.add_request(plan_of(request_id, prompt_of(num_tokens), max_tokens=1))
            while request_id in engine.scheduler.requests:
                engine.step()
        engine.step()
        assert engine.held.num_planned_stores
        pool = engine.block_pool
        taken = pool.get_new_blocks(pool.get_num_free_blocks() - 6)
        engine.add_request(plan_of("again", prompt, max_tokens=1))
        engine.step()
        assert engine.held.loading_ids == {"again"}
        pool.free_blocks(taken)
        assert engine.side.counters.tier.refused_stores[Refusal.BUSY]
        let_go(engine)
        serve(engine)
        assert engine.side.counters.hole_tokens == 16
        check_nothing_is_left(engine)


def test_a_store_that_has_begun_keeps_its_pages() -> None:
    """Workers may read them until they have answered."""
    with full_of_stores() as engine:
        engine.add_request(plan_of("next", prompt_of(23 * 8), max_tokens=1))
        for _ in range(3):
            assert not engine.step().scheduled
            assert engine.held.num_stores == 1 and not engine.held.num_planned_stores
            assert engine.held.num_referenced_blocks == 5
            assert engine.side._stores.queue.lacks_blocks
        let_go(engine)
        serve(engine)
        assert not engine.side._stores.queue.lacks_blocks
        check_nothing_is_left(engine)


def test_a_request_that_waits_for_a_budget_lacks_no_blocks() -> None:
    """Without chunked prefill, vLLM admits a prompt only in a step that has room for all of it."""
    with full_of_stores() as engine:
        engine.scheduler.scheduler_config.enable_chunked_prefill = False
        engine.scheduler.max_num_scheduled_tokens = 32
        engine.add_request(plan_of("next", prompt_of(40), max_tokens=1))
        assert not engine.step().scheduled
        assert engine.held.num_planned_stores == 1
        assert not engine.side._stores.queue.lacks_blocks
        engine.scheduler.max_num_scheduled_tokens = 64
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_worth_a_wait", [False, True])
def test_a_running_request_is_not_preempted_for_a_store(is_worth_a_wait: bool) -> None:
    with full_of_stores(reserve_full_prompt=False) as engine:
        queue = engine.side._stores.queue
        request = engine.add_request(plan_of("running", prompt_of(50), max_tokens=12))
        with (
            mock.patch.object(queue, "_is_worth_a_wait", return_value=is_worth_a_wait),
            mock.patch.object(queue, "begin", return_value=()),
        ):
            while not request.is_finished():
                engine.step()
        assert not request.num_preemptions
        assert engine.side.counters.tier.refused_stores[Refusal.BUSY]
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("name", ["full, asynchronous", "long prompts"])
def test_stores_of_a_preempted_request_do_not_give_way_where_it_is_stored(name: str) -> None:
    """When its own blocks are free, only these stores would hold blocks."""
    case = CASES[name]
    connector = offloading(case.layout, store_policy="all", load_if_slower=True)
    options = options_of(case, offloading=connector, reserve_full_prompt=False)
    engine = SimulatedEngine(case.layout, options, TransferScript(steps_per_transfer=10))
    StepClock(engine)
    queue = engine.side._stores.queue
    give_way = queue.give_way
    gave_way: Counter[str] = Counter()

    def watched(to_running: bool) -> list[PlannedStore]:
        stores: list[PlannedStore] = give_way(to_running)
        gave_way.update(store.stored[0].request.status.name for store in stores)
        return stores

    try:
        with mock.patch.object(queue, "give_way", watched):
            answer(engine, chats(random.Random(name), case))
        assert engine.side.counters.swapped_requests and gave_way
        assert not gave_way["PREEMPTED"], gave_way
        engine.finish(max_steps=MAX_STEPS)
        check_nothing_is_left(engine)
    finally:
        engine.shutdown()


def test_a_request_stores_later_what_gave_way() -> None:
    """Its windows have moved on, so that only stores hold pages of them."""
    connector = offloading(GPT_OSS, chunk_tokens=16)
    with engine_of(
        GPT_OSS, NEVER, num_blocks=90, max_num_batched_tokens=32, offloading=connector
    ) as engine:
        engine.add_request(plan_of("begun", prompt_of(41), max_tokens=1))
        engine.add_request(plan_of("running", prompt_of(200), max_tokens=60))
        for _ in range(30):
            engine.step()
        progress = engine.side._states["running"].progress
        assert progress is not None and progress.rows_tokens > 200
        while engine.side.give_way(to_running=False):
            pass
        assert progress.rows_tokens < 100
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_async", [False, True])
def test_fast_stores_do_not_give_way(is_async: bool) -> None:
    """Requests lack blocks in nearly every step. The next turn of each chat still hits."""
    with engine_of(FULL, num_blocks=30, is_async=is_async, max_num_batched_tokens=256) as engine:
        StepClock(engine)
        prompts = {f"{number}": prompt_of(100 + number) for number in range(8)}
        for request_id, prompt in prompts.items():
            engine.add_request(plan_of(request_id, prompt, max_tokens=1))
        engine.finish()
        hits = engine.side.counters.hit_tokens
        assert not hits
        for request_id, prompt in prompts.items():
            engine.add_request(plan_of(f"again {request_id}", prompt, max_tokens=1))
        engine.finish()
        assert engine.side.counters.hit_tokens >= 6 * 96
        check_nothing_is_left(engine)


def test_an_engine_without_requests_makes_steps_for_stores_that_wait() -> None:
    connector = offloading(FULL, chunk_tokens=512)
    with engine_of(FULL, offloading=connector) as engine:
        clock = StepClock(engine)
        engine.add_request(plan_of("first", prompt_of(41), max_tokens=1))
        while engine.scheduler.requests:
            engine.step()
        assert engine.held.num_planned_stores and not engine.held.num_stores
        assert engine.side.has_transfers
        assert engine.side._stores.queue.step_s == pytest.approx(clock.now_s() / clock.num_steps)
        serve(engine)
        check_nothing_is_left(engine)


def test_a_paused_engine_ends_its_stores_while_a_request_holds_most_blocks() -> None:
    """``pause_generation("keep")`` returns when the engine has no more work."""
    connector = offloading(FULL, store_policy="second_touch", chunk_tokens=16)
    with engine_of(FULL, num_blocks=41, caching=True, offloading=connector) as engine:
        StepClock(engine)
        engine.side._cost.note_copies("store", 1, 1.0)  # No store is worth a wait.
        engine.add_request(plan_of("running", prompt_of(150), max_tokens=60))
        engine.step()
        engine.add_request(plan_of("ended", prompt_of(100), max_tokens=1))
        while "ended" in engine.scheduler.requests:
            engine.step()
        engine.step()
        assert engine.held.num_planned_stores and not engine.held.num_stores
        engine.scheduler.set_pause_state(PauseState.PAUSED_ALL)
        for _ in range(20):
            engine.step()
        assert not engine.side.has_work
        engine.scheduler.set_pause_state(PauseState.UNPAUSED)
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_async", [False, True])
def test_a_request_with_the_id_of_one_that_has_just_ended_has_its_own_stores(
    is_async: bool,
) -> None:
    """Both store the same page of their tables in one step."""
    connector = offloading(FULL, chunk_tokens=16)
    with engine_of(FULL, caching=True, is_async=is_async, offloading=connector) as engine:
        prompts = [prompt_of(60), prompt_of(70)]
        for prompt in prompts:
            engine.add_request(plan_of("same", prompt, max_tokens=1))
            while "same" in engine.scheduler.requests:
                engine.step()
                check_blocks(engine)
        serve(engine)
        assert engine.reset()
        serve(engine, *(plan_of(str(len(each)), each) for each in prompts))
        assert engine.side.counters.hit_tokens == 56 + 64
        check_nothing_is_left(engine)


def test_vllms_own_function_allocates_unless_stores_wait() -> None:
    with full_of_stores() as engine:
        assert is_patched(engine)
        let_go(engine)
        serve(engine)
        assert not is_patched(engine)
