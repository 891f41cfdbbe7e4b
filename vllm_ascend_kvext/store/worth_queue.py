# SPDX-License-Identifier: Apache-2.0
"""Entries by what they are worth, those that were loaded apart from the others.

Worth mostly rises while an entry is queued; that is seen when its turn comes. Whoever lowers it
calls `add` again, or `renew` where that is so of many. Entries are queued by size as well, so that
the least worthy of the large ones is found without looking at the small ones: there is a heap for
each quarter of a power of two.

Heaps are renewed a few items at a time, for a tier may have a hundred thousand entries, and the
engine waits meanwhile. Until then, an entry whose worth is lower than when it was queued may be
found late, and of what is not renewed, only some are looked at for one answer. Items are moved from
the end of a heap's list, which leaves it a heap.

Calls take O(log n), amortised, and look at one entry per heap; `move` takes that for each item.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from vllm_ascend_kvext.store.entries import HIT, Entry, Worth

_HeapKey = tuple[bool, int]
"""Whether its entries have rank `HIT`, and their size class."""

_Heap = list[tuple[Worth, int, Entry]]
"""The number tells apart what was queued twice with one worth."""

_SLACK = 64
"""Stale items that a queue may have besides one for each entry."""

_MOVED_PER_ADD = 4
"""Items that `add` moves; two would do to be done before as many have become stale again."""

_MOST_CHANGED = 32
"""For one answer, so many entries are queued anew because they are worth something else by now."""


class WorthQueue:
    """Each entry is queued once; what is queued and must not go is dropped when its turn comes.

    Args:
        worth_of: Of an entry; what gives way first is least.
    """

    __slots__ = ("_heaps", "_num_items", "_num_pushed", "_num_queued", "_old_heaps", "_worth_of")

    def __init__(self, worth_of: Callable[[Entry], Worth]) -> None:
        self._worth_of = worth_of
        self._heaps: dict[_HeapKey, _Heap] = {}
        self._old_heaps: list[tuple[_HeapKey, _Heap]] = []
        self._num_queued = self._num_items = self._num_pushed = 0

    @property
    def num_items(self) -> int:
        """Stale ones included."""
        return self._num_items

    @property
    def num_queued(self) -> int:
        return self._num_queued

    def add(self, entry: Entry) -> None:
        """An entry that may go, or whose worth has changed."""
        worth = self._worth_of(entry)
        if entry.queued == worth:
            return
        self._num_queued += entry.queued is None
        self._push(entry, worth)
        if self._num_items > 2 * self._num_queued + _SLACK and not self._old_heaps:
            self.renew()
        if self._old_heaps:
            self.move(_MOVED_PER_ADD)

    def renew(self) -> None:
        """Queue all entries anew, as they are moved."""
        self._old_heaps += self._heaps.items()
        self._heaps = {}

    def move(self, most_items: int) -> None:
        """Go on with what `renew` has begun."""
        while most_items > 0 and self._old_heaps:
            _, heap = self._old_heaps[-1]
            if not heap:
                self._old_heaps.pop()
                continue
            most_items -= 1
            worth, _, entry = heap.pop()
            self._num_items -= 1
            if entry.queued is not worth:
                continue
            if entry.is_evictable:
                self._push(entry, self._worth_of(entry))
            else:
                self.discard(entry)

    def discard(self, entry: Entry) -> None:
        """An entry that must not go, if it is queued."""
        if entry.queued is not None:
            entry.queued = None
            self._num_queued -= 1

    def first(self, is_hit: bool, at_least_bytes: int = 0) -> Entry | None:
        """The least worthy entry.

        Args:
            is_hit: Of those of rank `HIT`, or of the others.
            at_least_bytes: Smaller ones are left out, but for those of nearly that size.
        """
        least_class = size_class(at_least_bytes)
        num_changed = 0
        while heaps := self._heaps_of(is_hit, least_class, num_changed < _MOST_CHANGED):
            # What is on top of a heap is worth no more than anything in it, stale or not.
            heap = min(heaps, key=_top)
            worth, _, entry = heap[0]
            if entry.queued is worth:
                if entry.is_evictable and self._worth_of(entry) == worth:
                    return entry
                self.discard(entry)
                self._pop(heap)
                if entry.is_evictable:
                    self.add(entry)
                    num_changed += 1
            else:
                self._pop(heap)
        return None

    def _heaps_of(self, is_hit: bool, least_class: int, wants_old: bool) -> list[_Heap]:
        """Those that are not empty; with old ones if they are wanted, or if there are no others."""
        found: list[_Heap] = []
        for heaps in (self._heaps.items(), self._old_heaps):
            found += [
                heap
                for (of_hit, of_class), heap in heaps
                if heap and of_hit == is_hit and of_class >= least_class
            ]
            if found and not wants_old:
                break
        return found

    def _push(self, entry: Entry, worth: Worth) -> None:
        entry.queued = worth
        heap = self._heaps.setdefault((worth[0] == HIT, size_class(entry.num_bytes)), [])
        self._num_pushed += 1
        self._num_items += 1
        heapq.heappush(heap, (worth, self._num_pushed, entry))

    def _pop(self, heap: _Heap) -> None:
        heapq.heappop(heap)
        self._num_items -= 1


def size_class(num_bytes: int) -> int:
    """Quarters of powers of two: what is in a higher class is larger."""
    num_bits = num_bytes.bit_length()
    return num_bits * 4 + (num_bytes >> max(0, num_bits - 3)) % 4


def _top(heap: _Heap) -> tuple[Worth, int]:
    return heap[0][:2]
