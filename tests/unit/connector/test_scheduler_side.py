# SPDX-License-Identifier: Apache-2.0
"""The scheduler side: what is stored, found, loaded, and given back."""

from __future__ import annotations

from string import ascii_lowercase

import pytest
from support.connector.small_engine import (
    PAGE_TOKENS,
    SmallEngine,
    Status,
    full_only,
)

from vllm_ascend_kvext.connector.counters import is_gauge
from vllm_ascend_kvext.connector.messages import Direction, JobResults, Traffic
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Kind
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.store_policy import StorePolicy

LETTERS = ascii_lowercase + ascii_lowercase.upper()
"""52 tokens, 13 pages."""


@pytest.fixture
def engine() -> SmallEngine:
    return SmallEngine()


def test_same_prompt_resumes_at_the_last_unit_below_its_length(engine: SmallEngine) -> None:
    for length, hit_tokens in ((50, 48), (52, 48), (49, 48), (48, 44), (4, 0), (5, 4)):
        engine = SmallEngine()
        engine.serve("a", LETTERS[:length])
        assert engine.side.match(engine.add("b", LETTERS[:length]), 0) == hit_tokens


def test_the_log_names_the_shortest_prompt_that_hits(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "vllm.ascend_kvext")
    SmallEngine()
    assert "hits: prompts of 5 tokens or more, in multiples of 4;" in caplog.text


@pytest.mark.parametrize(
    ("caches_prefixes", "remedy"),
    [(False, "Add --enable-prefix-caching"), (True, "Raise --max-model-len")],
)
def test_an_engine_whose_prompts_are_too_short_to_hit_is_warned(
    caches_prefixes: bool, remedy: str, caplog: pytest.LogCaptureFixture
) -> None:
    SmallEngine(caches_prefixes=caches_prefixes, most_request_tokens=4)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert "A prompt needs 5 tokens to hit, and a request has at most 4" in record.message
    assert remedy in record.message


def test_an_engine_with_one_prompt_that_hits_is_not_warned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    SmallEngine(most_request_tokens=5)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_next_turn_resumes_at_the_last_unit_of_the_answer(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS[:20], answer=LETTERS[20:31])
    assert engine.side.match(engine.add("b", LETTERS), 0) == 28


def test_other_prompt_is_found_up_to_where_it_parts(engine: SmallEngine) -> None:
    engine = SmallEngine(full_only)
    engine.serve("a", LETTERS)
    assert engine.side.match(engine.add("b", LETTERS[:26] + "?" * 20), 0) == 24


def test_only_what_the_device_lacks_is_loaded(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    assert engine.admit(request, local_tokens=20) == 28
    (load,) = engine.step().loads
    assert (load.tokens.first, load.tokens.end) == (20, 48)
    engine.output()


def test_load_reads_the_rows_and_tails_that_were_stored(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    engine.admit(engine.add("b", LETTERS))
    (load,) = engine.step().loads
    groups_and_rows = sorted(
        (rows.group, rows.first_row, rows.end_row) for part in load.stored for rows in part.rows
    )
    # Twelve pages of full attention in three chunks; of the window 9 tokens: three pages.
    assert groups_and_rows == [(0, 0, 4), (0, 4, 8), (0, 8, 12), (1, 9, 12)]
    assert {part.host_offset_bytes % 64 for part in load.stored} == {0}


def test_rows_of_another_prompt_in_a_shared_entry_are_not_loaded() -> None:
    """The first chunk of "a" has four rows, of which "b" shares two."""
    engine = SmallEngine(full_only)
    engine.serve("a", LETTERS[:16] + "!")
    text = LETTERS[:8] + LETTERS[20:40]
    engine.serve("b", text)
    engine.admit(engine.add("c", text + "?"))
    (load,) = engine.step().loads
    rows = [(part.host_offset_bytes, row[1], row[2]) for part in load.stored for row in part.rows]
    assert [(first, end) for _, first, end in rows] == [(0, 2), (2, 4), (4, 7)]


def test_pins_last_until_the_load_has_ended(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    engine.admit(request)
    assert engine.side.num_pinned == 1
    engine.step()
    assert engine.side.num_pinned == 1
    engine.output()
    assert engine.side.num_pinned == 0


def test_request_that_is_not_admitted_gives_its_pins_back(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    assert engine.side.match(request, 0) == 48
    assert engine.side.match(request, 0) == 48
    assert engine.side.num_pinned == 1
    engine.side.finish(request, is_end_of_turn=False)
    assert engine.side.num_pinned == 0


def test_match_follows_what_the_device_has(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    assert engine.side.match(request, 0) == 48
    assert engine.side.match(request, 40) == 8
    assert engine.side.match(request, 48) == 0
    assert engine.side.num_pinned == 0


def test_request_that_skips_the_cache_is_not_matched(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    request.skip_reading_prefix_cache = True
    assert engine.side.match(request, 0) == 0


def test_every_page_is_given_back(engine: SmallEngine) -> None:
    for number in range(5):
        engine.serve(str(number), LETTERS[number:], answer="answer")
    engine.assert_idle()


def test_stores_keep_their_pages_from_being_reallocated(engine: SmallEngine) -> None:
    request = engine.add("a", LETTERS)
    engine.admit(request)
    jobs = engine.step(request)
    engine.output(jobs=type(jobs)(has_forward=True))  # the stores have not ended
    engine.finish(request)
    last = engine.step()
    read = {
        block_id
        for job in (*jobs.stores, *last.stores)
        for part in job.block_ids
        for block_id in part.ids
        if block_id
    }
    assert read
    assert not read & {block.block_id for block in engine.pool.free}
    engine.output(jobs)
    engine.output(last)
    engine.assert_idle()


def test_tails_are_stored_where_a_step_passes_a_boundary(engine: SmallEngine) -> None:
    """Windows have moved on when the next step is planned."""
    request = engine.add("a", LETTERS)
    engine.admit(request)
    num_tails = 0
    while request.num_computed_tokens < request.num_tokens:
        engine.step(request, num_tokens=7)
        engine.output()
        num_tails = engine.side.counters.tier.stored_entries[Kind.TAILS]
    assert num_tails >= 1
    assert not engine.side.counters.tier.refused_stores[Refusal.PAGES_GONE]
    engine.finish(request)
    engine.step()
    engine.output()
    assert engine.side.match(engine.add("b", LETTERS), 0) == 48


def test_end_of_an_answer_keeps_the_tails_of_its_last_unit(engine: SmallEngine) -> None:
    """At 11 + 4 k tokens the window of the last unit has partly left the block table."""
    for answer_tokens in range(1, 12):
        engine = SmallEngine()
        text = LETTERS[: 30 + answer_tokens]
        engine.serve("a", LETTERS[:30], answer=text[30:])
        expected = len(text) // PAGE_TOKENS * PAGE_TOKENS
        assert engine.side.match(engine.add("b", text + "????"), 0) == expected


def test_aborted_request_stores_nothing_of_its_end() -> None:
    engine = SmallEngine()
    request = engine.add("a", LETTERS)
    engine.admit(request)
    engine.step(request, num_tokens=9)
    engine.output()
    engine.finish(request, Status.FINISHED_ABORTED)
    engine.step()
    engine.output()
    assert engine.side.counters.tier.stored_entries[Kind.ROWS] <= 1
    engine.assert_idle()


def test_request_aborted_while_it_loads_stores_nothing() -> None:
    """Its pages do not hold yet what its count of computed tokens says."""
    engine = SmallEngine()
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS + "????????")
    engine.admit(request)
    jobs = engine.step()
    stored = sum(engine.side.counters.tier.stored_entries.values())
    request.status = Status.FINISHED_STOPPED
    engine.side.finish(request, is_end_of_turn=True)
    assert not engine.step().stores
    engine.output(jobs)
    engine.output()
    assert sum(engine.side.counters.tier.stored_entries.values()) == stored
    assert not engine.side.num_pinned


def test_nothing_is_stored_with_policy_never() -> None:
    engine = SmallEngine(store_policy=StorePolicy.NEVER)
    engine.serve("a", LETTERS, answer="answer")
    assert not sum(engine.side.counters.tier.stored_entries.values())
    engine.assert_idle()


def test_policy_all_stores_chunks_of_a_request_that_is_aborted() -> None:
    engine = SmallEngine(full_only, store_policy=StorePolicy.ALL)
    request = engine.add("a", LETTERS)
    engine.admit(request)
    engine.step(request, num_tokens=35)
    engine.output()
    engine.finish(request, Status.FINISHED_ABORTED)
    assert engine.side.match(engine.add("b", LETTERS), 0) == 32


def test_second_touch_stores_chunks_before_the_prompt_is_complete() -> None:
    engine = SmallEngine(full_only)
    found = []
    for number in range(3):
        request = engine.add(str(number), LETTERS)
        found.append(engine.admit(request))
        engine.step()
        engine.output()
        engine.step(request, num_tokens=35)
        engine.output()
        engine.finish(request, Status.FINISHED_ABORTED)
        engine.step()
        engine.output()
    assert found == [0, 0, 32]


def test_store_that_fails_on_one_worker_counts_for_none(engine: SmallEngine) -> None:
    engine = SmallEngine(num_workers=2)
    request = engine.add("a", LETTERS)
    engine.admit(request)
    jobs = engine.step(request)
    held = engine.side.counters.tier.entries_held
    assert held
    engine.output(jobs, failed_stores=[job.number for job in jobs.stores], num_workers=1)
    # The other worker still writes to these places.
    assert engine.side.counters.tier.entries_held == held
    engine.output(jobs, num_workers=1)
    assert engine.side.counters.tier.entries_held == 0
    assert engine.side.counters.tier.failed_stores == held
    assert engine.side.match(engine.add("b", LETTERS), 0) == 0


def test_store_is_found_when_all_workers_have_made_it() -> None:
    engine = SmallEngine(num_workers=2)
    request = engine.add("a", LETTERS)
    engine.admit(request)
    jobs = engine.step(request)
    engine.output(jobs, num_workers=1)
    assert engine.side.match(engine.add("b", LETTERS), 0) == 0
    engine.output(jobs, num_workers=1)
    assert engine.side.match(engine.add("c", LETTERS), 0) == 48


def test_failed_load_is_not_tried_again(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", LETTERS)
    engine.admit(request)
    engine.step()
    engine.output(failed_loads=["b"])
    assert engine.side.match(request, 0) == 0
    assert engine.side.match(engine.add("c", LETTERS), 0) == 0
    assert engine.side.counters.tier.failed_loads == 1
    assert not engine.side.num_pinned


def test_failure_on_an_earlier_step_than_the_end_counts(engine: SmallEngine) -> None:
    """One worker has failed, another is still loading."""
    engine.serve("a", LETTERS)
    engine.admit(engine.add("b", LETTERS))
    jobs = engine.step()
    engine.output(type(jobs)(), failed_loads=["b"])
    assert engine.side.num_pinned == 1
    engine.output(jobs)
    assert not engine.side.num_pinned
    assert engine.side.match(engine.add("c", LETTERS), 0) == 0


def test_requests_with_the_same_prefix_load_it_once() -> None:
    engine = SmallEngine(caches_prefixes=True)
    engine.serve("a", LETTERS)
    first, second = engine.add("b", LETTERS), engine.add("c", LETTERS)
    assert engine.admit(first) == 48
    assert engine.admit(second) is None
    engine.step()
    assert engine.admit(second) is None
    engine.output()
    # The load is there; its request has not been seen since.
    assert engine.admit(second) is None
    engine.side.allocated(first, ((), ()), 0)
    assert engine.side.match(second, 48) == 0
    assert engine.side.counters.joined_loads == 1


def test_request_does_not_wait_forever_for_the_load_of_another() -> None:
    engine = SmallEngine(caches_prefixes=True)
    engine.serve("a", LETTERS)
    engine.admit(engine.add("b", LETTERS))
    second = engine.add("c", LETTERS)
    assert engine.side.match(second, 0) is None
    engine.clock.now_s += 11
    assert engine.side.match(second, 0) == 48


def test_requests_load_for_themselves_without_a_local_prefix_cache(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    assert engine.admit(engine.add("b", LETTERS)) == 48
    assert engine.admit(engine.add("c", LETTERS)) == 48


def test_load_that_costs_more_than_computing_is_not_made() -> None:
    engine = SmallEngine(load_if_slower=False)
    engine.serve("a", LETTERS * 3)
    assert engine.side.match(engine.add("b", LETTERS * 3), 0) == 152  # nothing is measured yet
    other = engine.add("other", "?" * 100)
    engine.admit(other)
    engine.step(other)
    engine.clock.now_s += 0.001
    engine.output()
    traffic: dict[Direction, Traffic] = {"store": Traffic(), "load": Traffic(1, 1.0, 1)}
    engine.side.note_output(JobResults(traffic=traffic), [])
    request = engine.add("c", LETTERS * 3)
    assert engine.side.match(request, 0) == 0
    assert engine.side.match(request, 0) == 0
    assert engine.side.counters.too_dear_loads == 1


def test_an_engine_that_begins_anew_has_measured_and_counted_nothing() -> None:
    """What takes long before the first client would make every load look cheap, or dear."""
    engine = SmallEngine(load_if_slower=False)
    first = engine.add("first", "?" * 100)
    engine.admit(first)
    engine.step(first)
    engine.clock.now_s += 0.001
    engine.output()
    traffic: dict[Direction, Traffic] = {"store": Traffic(), "load": Traffic(1, 1.0, 1)}
    engine.side.note_output(JobResults(traffic=traffic), [])
    engine.serve("a", LETTERS * 3)
    engine.side.begin_anew()
    assert engine.side.match(engine.add("b", LETTERS * 3), 0) == 0  # nothing is stored
    assert not any(
        value for key, value in engine.side.counters.totals().items() if not is_gauge(key)
    )
    engine.serve("c", LETTERS * 3)
    assert engine.side.match(engine.add("d", LETTERS * 3), 0) == 152
    assert engine.side.counters.too_dear_loads == 0


def test_reason_for_a_shorter_hit_is_counted_once_per_request(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    request = engine.add("b", "?" * 30)
    engine.side.match(request, 0)
    engine.side.match(request, 0)
    engine.admit(request)
    shortfalls = engine.side.counters.tier.shortfalls
    assert shortfalls[Shortfall.NEVER_STORED] == 2  # "a" itself, and "b"


def test_swapped_request_resumes_where_it_was() -> None:
    engine = SmallEngine(swap_on_preemption=True)
    request = engine.add("a", LETTERS[:50])
    engine.admit(request)
    engine.step(request, num_tokens=30)  # where no tails are stored otherwise
    engine.output()
    engine.preempt(request)
    jobs = engine.step()
    assert jobs.stores_before
    engine.output()
    assert engine.admit(request) == 28
    assert engine.side.counters.swapped_requests == 1


def test_swap_holds_no_pages() -> None:
    engine = SmallEngine(swap_on_preemption=True)
    request = engine.add("a", LETTERS[:50])
    engine.admit(request)
    engine.step(request, num_tokens=30)
    engine.output()
    engine.preempt(request)
    assert engine.num_free_blocks == len(engine.pool.blocks) - 1


def test_preempted_request_stores_nothing_without_swap(engine: SmallEngine) -> None:
    request = engine.add("a", LETTERS[:40])
    engine.admit(request)
    engine.step(request, num_tokens=22)
    engine.output()
    engine.preempt(request)
    assert not engine.step().stores_before
    engine.output()
    engine.assert_idle()


def test_stores_leave_blocks_for_others(engine: SmallEngine) -> None:
    """Jobs that do not end hold three quarters of the pool at most."""
    for number in range(40):
        request = engine.add(str(number), chr(100 + number) * 40)
        engine.admit(request)
        engine.step(request)
        engine.finish(request)
    assert engine.side.num_references <= 0.75 * len(engine.pool.blocks)
    assert engine.side.counters.tier.refused_stores[Refusal.BUSY]


def test_what_nobody_asked_for_holds_less_and_goes_last() -> None:
    """Stores have not ended, and hold a quarter of the pool: the end of the prompt is stored."""
    engine = SmallEngine()
    for number in range(3):
        request = engine.add(str(number), chr(100 + number) * 60)
        engine.admit(request)
        jobs = engine.step(request)
        tails = [
            chunk.tokens.end for job in jobs.stores for chunk in job.chunks if 1 in chunk.groups
        ]
        assert tails[0] == 56
    assert tails == [56]
    assert engine.side.counters.tier.refused_stores[Refusal.BUSY]


def test_cleared_tier_is_empty_and_ends_what_is_under_way(engine: SmallEngine) -> None:
    request = engine.add("a", LETTERS)
    engine.admit(request)
    jobs = engine.step(request)
    engine.side.clear()
    engine.output(jobs)
    assert engine.side.counters.tier.entries_held == 0
    assert engine.side.match(engine.add("b", LETTERS), 0) == 0


def test_evicted_and_cleared_entries_are_reported(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    stored = {entry.number for what, entry in engine.events.log if what == "stored"}
    engine.side.clear()
    removed = {entry.number for what, entry in engine.events.log if what == "removed"}
    assert stored
    assert stored <= removed


def test_pages_held_for_the_end_of_an_answer_can_be_released(engine: SmallEngine) -> None:
    request = engine.add("a", LETTERS[:30])
    engine.admit(request)
    engine.step(request)
    engine.output()
    engine.grow(request, LETTERS[30:36])
    assert engine.side.num_references
    engine.side.release_pages()
    assert not engine.side.num_references


def test_small_arena_refuses_and_loses_nothing() -> None:
    engine = SmallEngine(host_bytes=6 * 1024)
    for number in range(20):
        engine.serve(str(number), chr(100 + number) * 40)
        engine.assert_idle()
    tier = engine.side.counters.tier
    assert tier.bytes_held <= 6 * 1024
    assert sum(tier.refused_stores.values()) + sum(tier.removed_entries.values())


def test_abandoned_stores_release_their_pages_and_are_worth_nothing(engine: SmallEngine) -> None:
    request = engine.add("a", LETTERS)
    engine.admit(request)
    jobs = engine.step(request)
    engine.finish(request)
    engine.side.abandon_stores()
    assert not engine.side.num_references
    assert engine.side.has_work
    engine.output(jobs)
    engine.assert_idle()
    assert not engine.side.counters.tier.entries_held
    assert engine.side.match(engine.add("b", LETTERS), 0) == 0


def test_end_of_the_last_transfer_is_reported_in_one_more_step(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    assert engine.side.has_work
    jobs = engine.step()
    assert jobs.wants_stats
    assert not engine.side.has_work
    engine.output()
    assert not engine.side.has_work


def test_tokens_are_hit_once_they_are_loaded(engine: SmallEngine) -> None:
    engine.serve("a", LETTERS)
    counters = engine.side.counters
    for request_id, failed, hit_tokens in (("b", ["b"], 0), ("c", [], 0)):
        engine.admit(engine.add(request_id, LETTERS))
        engine.step()
        engine.output(failed_loads=failed)
        assert counters.hit_tokens == hit_tokens
    engine.serve("d", LETTERS)  # The failed load has dropped what "a" had stored.
    engine.serve("e", LETTERS)
    assert (counters.hit_tokens, counters.hit_requests) == (48, 1)


def test_swap_need_not_leave_blocks_for_others() -> None:
    """Its pages are given away at once, so that it holds none of them."""
    engine = SmallEngine(swap_on_preemption=True)
    for number in range(40):  # Stores that do not end hold what they may.
        request = engine.add(str(number), chr(100 + number) * 40)
        engine.admit(request)
        engine.step(request)
        engine.finish(request)
    engine.step()
    assert engine.side.counters.tier.refused_stores[Refusal.BUSY]
    request = engine.add("swapped", LETTERS[:38])
    engine.admit(request)
    engine.step(request, num_tokens=30)
    engine.preempt(request)
    assert engine.step().stores_before
    assert engine.side.counters.swapped_requests == 1


def test_nobody_waits_for_a_load_that_cannot_be_hit_whole() -> None:
    """With EAGLE a local hit drops its last block: who waited would have to load all the same."""
    engine = SmallEngine(caches_prefixes=True, looks_ahead=True)
    engine.serve("a", LETTERS)
    assert engine.admit(engine.add("b", LETTERS)) == 48
    assert engine.admit(engine.add("c", LETTERS)) == 48


def test_request_that_waits_for_room_is_not_looked_up_in_every_step(
    engine: SmallEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "x" * 384  # Two of them leave too few of the 199 blocks.
    engine = SmallEngine(host_bytes=1 << 22)
    engine.serve("a", text)
    lookups = []
    tier = engine.side._parts.tier  # type: ignore[union-attr]
    look_up = tier.look_up
    monkeypatch.setattr(tier, "look_up", lambda *args: lookups.append(args) or look_up(*args))
    parked, waiting = engine.add("b", text), engine.add("c", text)
    assert engine.admit(parked)
    assert engine.side.match(waiting, 0) is None
    num_lookups = len(lookups)
    for _ in range(5):
        engine.step()
        assert engine.side.match(waiting, 0) is None
    assert len(lookups) == num_lookups
    engine.output()
    engine.step(parked)
    assert engine.side.match(waiting, 0)
