# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Single cases of stores and loads, on vLLM's real scheduler, with real pages, but no model.

The cases are rare or invisible in random requests: refusals, waits, counts and logs.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from support.connector.engines import (
    engine_of,
    let_stores_begin,
    plan_of,
    step_without_admissions,
    zeroing,
)
from support.connector.offload_run import check_nothing_is_left, serve
from support.connector.offload_workloads import offloading, tokens
from support.connector.paged_layouts import DEEPSEEK_V4_EAGLE, FULL, GPT_OSS, paged
from support.connector.scripted_transfers import TransferScript
from support.connector.simulated_engine import SimulatedEngine
from support.scenarios.engine import watch
from support.scheduler.layouts import Attention, Group, Layout

from vllm_ascend_kvext.connector.common.messages import ConnectorMetadata
from vllm_ascend_kvext.connector.scheduler.loads import MAX_PATIENCE_S
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost
from vllm_ascend_kvext.errors import ConnectorError
from vllm_ascend_kvext.store.counters import Refusal

pytestmark = pytest.mark.usefixtures("offloading_in_effect")

PROMPT = tokens(random.Random("prompt"), 100)
UNIT_TOKENS = FULL.unit_tokens
HIT_TOKENS = (len(PROMPT) - 1) // UNIT_TOKENS * UNIT_TOKENS
NEVER = TransferScript(max_per_step=0)
"""No transfer ends before `let_go` is called."""


def let_go(engine: SimulatedEngine) -> None:
    for worker in engine.workers:
        worker.transfers.open()


def watch_jobs(engine: SimulatedEngine) -> list[ConnectorMetadata]:
    """The messages to workers, step by step from now on."""
    found: list[ConnectorMetadata] = []
    watch(engine.side, "build_connector_meta", lambda jobs, *_: found.append(jobs))
    return found


def test_pages_are_zeroed_before_what_is_stored_is_loaded_into_them() -> None:
    """A load may fill only parts of a page. The rest may be old bytes of another dtype."""
    with zeroing(), engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        zeroed: list[set[int]] = []
        watch(
            engine.scheduler,
            "schedule",
            lambda output: zeroed.append(set(output.new_block_ids_to_zero or ())),
        )
        jobs = watch_jobs(engine)
        serve(engine, plan_of("second", PROMPT, max_tokens=1))
        (step,) = [number for number, each in enumerate(jobs) if each.loads]
        (load,) = jobs[step].loads
        assert {page for part in load.block_ids for page in part.ids} <= zeroed[step]


@pytest.mark.vllm(">=0.30")
def test_what_drafts_keep_before_a_window_is_loaded_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MTP of several modules reads tokens before a window (``extra_retained_tokens``).

    vLLM has blocks for these tokens, and caches them. The third request's window is the second
    request's blocks.
    """
    to_spec = Group.to_spec

    def keeping_two_tokens(group: Group, **fields: Any) -> Any:
        keeps = {"extra_retained_tokens": 2} if group.has_window else {}
        return to_spec(group, **fields, **keeps)

    monkeypatch.setattr(Group, "to_spec", keeping_two_tokens)
    groups = (Group(Attention.FULL, 16), Group(Attention.WINDOW, 16, 17))
    with engine_of(paged(Layout("full-window", groups)), caching=True) as engine:
        serve(engine, plan_of("first", PROMPT[:70], max_tokens=1))
        assert engine.reset()
        for worker in engine.workers:
            worker.contents.overwrite(range(1, engine.block_pool.num_gpu_blocks))
        serve(engine, plan_of("second", PROMPT[:70], max_tokens=1))
        assert engine.side.counters.hit_tokens == 64
        serve(engine, plan_of("third", PROMPT[:50], max_tokens=1))


@pytest.mark.parametrize(
    ("caching", "max_model_len", "remedy"),
    [
        (False, UNIT_TOKENS, "Add --enable-prefix-caching"),
        (True, UNIT_TOKENS, "Raise --max-model-len"),
        (True, UNIT_TOKENS + 1, None),
    ],
)
def test_an_engine_whose_prompts_are_too_short_to_hit_is_warned(
    caching: bool,
    max_model_len: int,
    remedy: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    caplog.set_level(logging.INFO, "vllm.ascend_kvext")
    with engine_of(FULL, caching=caching, max_model_len=max_model_len):
        pass
    assert "hits: prompts of 9 tokens or more, in multiples of 8;" in caplog.text
    warnings = {each for each in caplog.messages if "nothing will be reused" in each}
    assert len(warnings) == (remedy is not None)
    for message in warnings:
        assert "needs 9 tokens to hit, and a request has at most 8" in message and remedy in message


# Stores.


@pytest.mark.parametrize(("policy", "hits"), [("all", [0, 1, 1]), ("second_touch", [0, 0, 1])])
def test_whole_chunks_of_what_is_aborted_are_stored(policy: str, hits: list[int]) -> None:
    """Computed chunks are stored if another request has had them, or if all chunks are stored."""
    connector = offloading(FULL, store_policy=policy, chunk_tokens=16)
    found = []
    with engine_of(FULL, offloading=connector, max_num_batched_tokens=24) as engine:
        for number, num_hits in enumerate(hits):
            before = engine.side.counters.hit_tokens
            engine.add_request(plan_of(str(number), PROMPT))
            for _ in range(2 + 2 * num_hits):
                engine.step()
            engine.abort(str(number))
            serve(engine)
            found.append((engine.side.counters.hit_tokens - before) / 48)
        assert found[:2] == hits[:2]
        assert found[2] >= 1
        check_nothing_is_left(engine)


def test_stores_leave_blocks_for_others() -> None:
    """Together, stores that do not end hold at most three quarters of the pool.

    A swap holds none.
    """
    rng = random.Random(1)
    with engine_of(FULL, NEVER, num_blocks=200) as engine:
        let_stores_begin(engine)
        for number in range(12):
            plan = plan_of(str(number), tokens(rng, 160), max_tokens=1)
            engine.add_request(plan)
            while plan.request_id in engine.scheduler.requests:
                engine.step()
        refused = engine.side.counters.tier.refused_stores
        assert refused[Refusal.BUSY]
        held = engine.held.num_referenced_blocks
        assert 0.5 * 200 < held <= 0.75 * 200
        request = engine.add_request(plan_of("swapped", PROMPT, max_tokens=20))
        while not request.num_output_tokens:
            engine.step()
        in_steps = referenced_in_steps(engine)
        preempt(engine)
        assert request.num_preemptions == 1
        assert in_steps[0] == held
        assert engine.side.counters.swapped_requests == 1
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


def referenced_in_steps(engine: SimulatedEngine) -> list[int]:
    """Record the blocks that are kept for transfers, while steps are computed."""
    found: list[int] = []
    watch(engine.runner, "execute", lambda *_: found.append(engine.held.num_referenced_blocks))
    return found


def preempt(engine: SimulatedEngine) -> None:
    """Other requests take all free blocks in a step in which a request needs a block."""
    pool = engine.block_pool
    taken = pool.get_new_blocks(pool.get_num_free_blocks())
    (request,) = engine.scheduler.running
    while not request.num_preemptions:
        engine.step()
    pool.free_blocks(taken)


@pytest.mark.parametrize("num_answered", [0, 10], ids=["prompt", "answer"])
def test_a_preempted_request_goes_on_where_it_was(num_answered: int) -> None:
    connector = offloading(GPT_OSS, chunk_tokens=128)
    small = {"max_num_batched_tokens": 40, "reserve_full_prompt": False}
    with engine_of(GPT_OSS, offloading=connector, **small) as engine:
        request = engine.add_request(plan_of("first", PROMPT[:95], max_tokens=40))
        engine.step()
        while request.num_output_tokens < num_answered or engine.side.has_transfers:
            engine.step()
        jobs, in_steps = watch_jobs(engine), referenced_in_steps(engine)
        preempt(engine)
        assert jobs[-1].stores_before
        assert not in_steps[-1]
        computed_tokens = request.num_tokens - 1 if num_answered else 40
        last_boundary = computed_tokens // GPT_OSS.unit_tokens * GPT_OSS.unit_tokens
        serve(engine)
        assert engine.side.counters.hit_tokens == last_boundary
        assert engine.side.counters.swapped_requests == 1
        check_nothing_is_left(engine)


@pytest.mark.parametrize("pays", [False, True])
def test_a_preempted_request_goes_out_where_that_pays(pays: bool) -> None:
    with engine_of(GPT_OSS, reserve_full_prompt=False) as engine:
        request = engine.add_request(plan_of("first", PROMPT, max_tokens=40))
        while request.num_output_tokens < 10:
            engine.step()
        with mock.patch.object(TransferCost, "pays_out_and_back", return_value=pays):
            preempt(engine)
        assert engine.side._stores.queue.lacks_blocks
        serve(engine)
        assert engine.side.counters.swapped_requests == pays


@pytest.mark.parametrize("keeps", [False, True])
def test_a_recompute_scheduler_hears_whether_a_request_can_go_on(keeps: bool) -> None:
    """vLLM-Ascend's recompute scheduler asks before it preempts. It ends what cannot go on."""
    with engine_of(GPT_OSS, reserve_full_prompt=False) as engine:
        request = engine.add_request(plan_of("first", PROMPT, max_tokens=40))
        while request.num_output_tokens < 10 or engine.side.has_transfers:
            engine.step()
        engine.side.keeps_preempted = keeps
        connector = engine.scheduler.connector
        with mock.patch.object(TransferCost, "pays_out_and_back", return_value=False):
            answer = connector.update_state_before_preempt(request, (), request.num_computed_tokens)
        assert answer is keeps
        assert engine.side.counters.swapped_requests == keeps
        engine.scheduler.running.remove(request)
        type(engine.scheduler)._preempt_request(engine.scheduler, request, 0.0)
        serve(engine)
        check_nothing_is_left(engine)


def test_what_a_prefill_node_sends_is_left_to_another_connector() -> None:
    """The other connector sets the parameter to False. From then on, the request is looked up."""
    with engine_of(FULL) as engine:
        engine.add_request(plan_of("first", PROMPT, max_tokens=1))
        serve(engine)
        engine.scheduler.reset_prefix_cache()
        request = engine.add_request(plan_of("second", PROMPT, max_tokens=1))
        request.kv_transfer_params = {"do_remote_prefill": True}
        side = engine.side
        side._view = replace(side._view, has_other_connectors=True)
        assert side.get_num_new_matched_tokens(request, 0) == 0
        request.kv_transfer_params["do_remote_prefill"] = False
        assert side.get_num_new_matched_tokens(request, 0) == HIT_TOKENS
        serve(engine)
        check_nothing_is_left(engine)


def test_what_nobody_asked_for_holds_less_and_goes_last() -> None:
    """Stores do not end. Once they hold a quarter of the pool, only ends of prompts are stored."""
    rng = random.Random(2)
    num_tokens, boundary_tokens = 257, 256
    stored: list[list[int]] = []
    with engine_of(GPT_OSS, NEVER, num_blocks=400, max_num_batched_tokens=512) as engine:
        let_stores_begin(engine)
        jobs = watch_jobs(engine)
        while not stored or len(stored[-1]) != 1:
            jobs.clear()
            plan = plan_of(str(len(stored)), tokens(rng, num_tokens), max_tokens=1)
            engine.add_request(plan)
            engine.step()
            chunks = [chunk for job in jobs[-1].stores for chunk in job.chunks]
            stored.append(
                [chunk.tokens.end_tokens for chunk in chunks if 1 in (chunk.groups or ())]
            )
            while plan.request_id in engine.scheduler.requests:
                engine.step()
        assert len(stored) > 1
        assert {tails[0] for tails in stored} == {boundary_tokens}
        assert engine.side.counters.tier.refused_stores[Refusal.BUSY]
        assert engine.held.num_referenced_blocks < 0.5 * 400
        let_go(engine)
        serve(engine)
        check_nothing_is_left(engine)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_store_that_fails_on_one_worker_is_worth_nothing(failing: int) -> None:
    with engine_of(FULL, NEVER, num_workers=2) as engine:
        engine.workers[failing].transfers._script = TransferScript(failing_stores=1.0)
        engine.add_request(plan_of("first", PROMPT, max_tokens=1))
        while engine.scheduler.requests:
            engine.step()
        num_entries = len(engine.entries)
        assert num_entries, "a place was freed while the other worker writes to it"
        let_go(engine)
        serve(engine)
        assert not engine.entries
        assert engine.side.counters.tier.failed_stores == num_entries
        check_nothing_is_left(engine)


@pytest.mark.parametrize("is_under_way", [False, True], ids=["planned", "under way"])
def test_stores_that_are_abandoned_hold_nothing_and_are_worth_nothing(is_under_way: bool) -> None:
    # Such a large chunk is stored only at the end.
    chunk = offloading(FULL, chunk_tokens=512)
    with engine_of(FULL, NEVER, offloading=chunk) as engine:
        engine.add_request(plan_of("first", PROMPT, max_tokens=1))
        while engine.scheduler.requests:
            engine.step()
        assert engine.held.num_planned_stores
        if is_under_way:
            engine.step()
            assert engine.held.num_stores
        engine.side.abandon_stores()
        assert not engine.held.num_referenced_blocks and not engine.held.num_planned_stores
        let_go(engine)
        serve(engine)
        assert not engine.entries
        check_nothing_is_left(engine)


def test_the_end_of_the_last_transfer_is_reported_in_one_more_step() -> None:
    """Counts are sent with a step. The next step may be far away."""
    with engine_of(FULL, NEVER) as engine:
        jobs = watch_jobs(engine)
        engine.add_request(plan_of("first", PROMPT, max_tokens=1))
        while engine.scheduler.requests or engine.held.num_planned_stores:
            engine.step()
        engine.step()
        let_go(engine)
        while engine.held.num_stores:
            engine.step()
        num_steps = len(jobs)
        serve(engine)
        assert len(jobs) == num_steps + 1
        assert jobs[-1].wants_stats and not jobs[-1].has_forward


# Loads.


@pytest.mark.parametrize(
    ("num_tokens", "hit_tokens"), [(95, 88), (96, 88), (97, 96), (98, 96), (8, 0), (9, 8)]
)
def test_the_same_prompt_resumes_at_the_last_unit_below_its_length(
    num_tokens: int, hit_tokens: int
) -> None:
    """The last token of a prompt is always computed."""
    with engine_of(FULL) as engine:
        for request_id in ("first", "second"):
            serve(engine, plan_of(request_id, PROMPT[:num_tokens], max_tokens=1))
        assert engine.side.counters.hit_tokens == hit_tokens


def test_a_request_that_skips_the_cache_loads_nothing() -> None:
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        engine.add_request(plan_of("second", PROMPT)).skip_reading_prefix_cache = True
        serve(engine)
        assert not engine.side.counters.hit_tokens


def test_a_load_of_other_tokens_than_were_found_is_refused() -> None:
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        request = engine.add_request(plan_of("second", PROMPT))
        step_without_admissions(engine, 1)
        assert engine.held.pinned_ids == {"second"}
        with pytest.raises(ConnectorError, match=r"expected to load \d+ tokens, .*, found 8"):
            engine.side.update_state_after_alloc(request, ([],), 8)
        assert not engine.held.pinned_ids


def test_pins_last_until_the_load_has_ended_or_the_request_goes() -> None:
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        engine.add_request(plan_of("second", PROMPT))
        step_without_admissions(engine, 3)
        assert engine.held.pinned_ids == {"second"} and not engine.held.loading_ids
        engine.abort("second")
        assert not engine.held.pinned_ids
        engine.add_request(plan_of("third", PROMPT))
        with mock.patch.object(engine.workers[0].transfers, "end_some"):
            for _ in range(3):
                engine.step()
                assert engine.held.pinned_ids == engine.held.loading_ids == {"third"}
        serve(engine)
        check_nothing_is_left(engine)


def test_what_was_found_follows_what_the_device_has() -> None:
    """At the lookup, the device had the beginning. It has lost the beginning since."""
    with engine_of(FULL, caching=True) as engine:
        serve(engine, plan_of("first", PROMPT, max_tokens=1))
        assert engine.reset()
        with mock.patch.object(engine.side, "get_num_new_matched_tokens", return_value=0):
            serve(engine, plan_of("beginning", PROMPT[:41], max_tokens=1))
        engine.add_request(plan_of("second", PROMPT))
        step_without_admissions(engine)
        assert engine.held.pinned_ids == {"second"}
        pool = engine.block_pool
        pool.evict_blocks({block.block_id for block in pool.blocks if block.block_hash})
        serve(engine)
        assert engine.side.counters.hit_tokens == HIT_TOKENS
        check_nothing_is_left(engine)


def test_an_abort_while_it_loads_stores_nothing() -> None:
    """The request's pages do not have the KV yet that its number of computed tokens claims."""
    with engine_of(FULL) as engine:
        serve(engine, plan_of("first", PROMPT))
        before = len(engine.entries)
        request = engine.add_request(plan_of("second", [*PROMPT, *PROMPT]))
        jobs = watch_jobs(engine)
        with mock.patch.object(engine.workers[0].transfers, "end_some"):
            engine.step()
            assert engine.held.loading_ids == {"second"}
            engine.side.request_finished(request, is_end_of_turn=True)
            engine.step()
            assert not any(each.stores for each in jobs)
        assert len(engine.entries) == before
        engine.abort("second")
        serve(engine)


JOINED = {
    "joined": (FULL, True, {"second"}),
    "no local cache": (FULL, False, {"second", "third"}),
    # A local hit drops its last block, so even a waiting request would have to load.
    "drafts": (DEEPSEEK_V4_EAGLE, True, {"second", "third"}),
}


@pytest.mark.parametrize("name", JOINED)
def test_requests_with_the_same_prefix_load_it_once(name: str) -> None:
    layout, caching, loading = JOINED[name]
    prompt = tokens(random.Random(3), 6 * layout.unit_tokens + 1)
    for waits_long in (False, True):
        with engine_of(layout, caching=caching) as engine:
            serve(engine, plan_of("first", prompt, max_tokens=1))
            assert engine.reset()
            now_s = 100.0
            engine.clock = lambda: now_s  # noqa: B023
            for request_id in ("second", "third"):
                engine.add_request(plan_of(request_id, prompt))
            with mock.patch.object(engine.workers[0].transfers, "end_some"):
                for _ in range(3):
                    engine.step()
                    assert engine.held.loading_ids == loading
                now_s += MAX_PATIENCE_S * waits_long
                engine.step()
                assert engine.held.loading_ids == (loading | {"third"} if waits_long else loading)
            serve(engine)
            is_joined = len(loading) == 1
            assert engine.side.counters.joined_loads == is_joined
            assert engine.side.counters.hit_requests == 2 - (is_joined and not waits_long)
            check_nothing_is_left(engine)


@pytest.mark.parametrize("hole_reuse", [False, True])
def test_a_load_that_costs_more_than_computing_is_not_made(hole_reuse: bool) -> None:
    """The scheduler's clock stands still. So computing costs nothing, but copies do."""
    connector = offloading(FULL, load_if_slower=False, hole_reuse=hole_reuse)
    with engine_of(FULL, offloading=connector) as engine:
        engine.clock = lambda: 100.0
        counters = engine.side.counters
        for request_id in ("first", "second"):  # No copy was measured before.
            serve(engine, plan_of(request_id, PROMPT, max_tokens=1))
        assert counters.hit_requests == 1
        engine.add_request(plan_of("last", PROMPT))
        step_without_admissions(engine, 3)
        serve(engine)
        assert counters.hit_requests == 1
        assert counters.too_dear_loads == 1
        check_nothing_is_left(engine)


def test_a_request_that_waits_for_room_is_not_looked_up_in_every_step() -> None:
    """Loads of two such requests would leave too few blocks for either to continue."""
    prompt = tokens(random.Random(5), 384)
    with engine_of(FULL, num_blocks=1 + 384 // UNIT_TOKENS * 3 // 2) as engine:
        serve(engine, plan_of("first", prompt, max_tokens=1))
        for request_id in ("second", "third"):
            engine.add_request(plan_of(request_id, prompt))
        look_up = engine.tier.look_up
        with (
            mock.patch.object(engine.tier, "look_up", side_effect=look_up) as looked_up,
            mock.patch.object(engine.workers[0].transfers, "end_some"),
        ):
            for _ in range(6):
                engine.step()
                assert engine.held.loading_ids == {"second"}
            assert looked_up.call_count == 2
        serve(engine)
        assert engine.side.counters.hit_requests == 2
        check_nothing_is_left(engine)
