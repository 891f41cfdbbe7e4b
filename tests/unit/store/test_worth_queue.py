# SPDX-License-Identifier: Apache-2.0
"""The queue of an eviction order, where the order of entries changes while it is looked at."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.store.entries import HIT, NEVER_HIT, Entry, EntryState, Piece, Worth
from vllm_ascend_kvext.store.worth_queue import _SLACK, WorthQueue, size_class

EVERYTHING = 1 << 30


def an_entry(number: int, num_bytes: int) -> Entry:
    return Entry(number, Piece.rows(0, 2), (b"",), 0, num_bytes, 0, EntryState.STORED)


def worth_of(entry: Entry) -> Worth:
    return HIT if entry.is_hit else NEVER_HIT, entry.use, 0, 0, entry.number


def test_a_heap_may_be_renewed_while_it_is_looked_at() -> None:
    queue = WorthQueue(worth_of)
    gone, changed, other = (an_entry(number, 64 << number) for number in range(3))
    for entry in (changed, other):
        queue.add(entry)
    while queue.num_items < 2 * 3 + _SLACK:
        gone.use += 1
        queue.add(gone)
    queue.discard(gone)
    # Its turn is first, and it is worth more by now: queued again, it makes the stale items go.
    changed.use = 1 << 20
    assert queue.first(is_hit=False) is other
    queue.move(EVERYTHING)
    assert queue.num_items == queue.num_queued == 2


def test_what_is_worth_less_than_before_is_found_once_all_is_renewed() -> None:
    entries = [an_entry(number, 64 << number % 3) for number in range(100)]
    for entry in entries:
        entry.use = entry.number
    queue = WorthQueue(worth_of)
    for entry in entries:
        queue.add(entry)
    entries[60].use = -1
    assert queue.first(is_hit=False) is entries[0]
    queue.renew()
    for _ in range(10):
        queue.move(10)
    assert queue.first(is_hit=False) is entries[60]
    assert queue.num_items == queue.num_queued == 100


def test_a_move_looks_at_no_more_entries_than_it_is_told() -> None:
    looked_at = []

    def watched(entry: Entry) -> Worth:
        looked_at.append(entry)
        return worth_of(entry)

    queue = WorthQueue(watched)
    for number in range(1000):
        queue.add(an_entry(number, 64))
    looked_at.clear()
    queue.renew()
    assert not looked_at
    queue.move(30)
    assert len(looked_at) == 30
    queue.renew()  # Not the end of it before it has begun.
    for _ in range(100):
        queue.move(30)
    assert queue.num_items == queue.num_queued == 1000


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("use"), st.integers(0, 9), st.integers(0, 5)),
            st.tuples(st.just("hit"), st.integers(0, 9), st.integers(0, 1)),
            st.tuples(st.just("pin"), st.integers(0, 9), st.integers(0, 1)),
            st.tuples(st.sampled_from(["add", "discard"]), st.integers(0, 9), st.just(0)),
            st.tuples(st.sampled_from(["renew", "move"]), st.just(0), st.integers(0, 12)),
            st.tuples(st.just("first"), st.sampled_from([0, 100, 200]), st.integers(0, 1)),
        ),
        max_size=150,
    )
)
def test_first_is_the_least_worthy_of_what_is_queued(calls: list[tuple[str, int, int]]) -> None:
    """Worths rise; what is lowered is added again, as entries that stop to be hits are."""
    entries = [an_entry(number, 64 << number % 4) for number in range(10)]
    queue = WorthQueue(worth_of)
    queued: set[int] = set()
    for name, number, value in calls:
        entry = entries[number % 10]
        if name == "use":
            entry.use += value
        elif name == "hit":
            entry.is_hit = bool(value)
            if number in queued:
                queue.add(entry)
        elif name == "pin":
            entry.num_pins = value
        elif name == "add" and entry.is_evictable:
            queue.add(entry)
            queued.add(number)
        elif name == "discard":
            queue.discard(entry)
            queued.discard(number)
        elif name == "renew":
            queue.renew()
        elif name == "move":
            queue.move(value)
        elif name == "first":
            found = queue.first(bool(value), number)
            # What is pinned is not queued any more once its turn has come.
            queued -= {n for n in queued if entries[n].queued is None}
            there = [
                entries[n]
                for n in queued
                if entries[n].is_evictable
                and entries[n].is_hit == bool(value)
                and size_class(entries[n].num_bytes) >= size_class(number)
            ]
            assert found is min(there, key=worth_of, default=None)
        assert queue.num_items <= 3 * queue.num_queued + 2 * _SLACK
