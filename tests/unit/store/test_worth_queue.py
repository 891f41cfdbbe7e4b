# SPDX-License-Identifier: Apache-2.0
"""The queue of an eviction order, where the order of entries changes while it is looked at."""

from __future__ import annotations

from vllm_ascend_kvext.store.entries import NEVER_HIT, Entry, EntryState, Piece, Worth
from vllm_ascend_kvext.store.worth_queue import _SLACK, WorthQueue


def an_entry(number: int, num_bytes: int) -> Entry:
    return Entry(number, Piece.rows(0, 2), (b"",), 0, num_bytes, 0, EntryState.STORED)


def worth_of(entry: Entry) -> Worth:
    return NEVER_HIT, entry.use, 0, 0, entry.number


def test_a_heap_of_stale_items_may_be_emptied_while_it_is_looked_at() -> None:
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
    assert queue.num_items == queue.num_queued == 2
