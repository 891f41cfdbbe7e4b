# SPDX-License-Identifier: Apache-2.0
"""Entries by what they are worth, those that were loaded apart from the others.

Worth mostly rises while an entry is queued; that is seen when its turn comes. Whoever lowers it
calls `add` again. Entries are queued by size as well, so that the least worthy of the large ones is
found without looking at the small ones: there is a heap for each quarter of a power of two.

Calls take O(log n), amortised, and look at one entry per heap.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

from vllm_ascend_kvext.store.entries import HIT, Entry, Worth

_Heap = list[tuple[Worth, int, Entry]]
"""The number tells apart what was queued twice with one worth."""

_SLACK = 64
"""Stale items that a queue may have besides one for each entry."""


class WorthQueue:
    """Each entry is queued once; what is queued and must not go is dropped when its turn comes.

    Args:
        worth_of: Of an entry; what gives way first is least.
    """

    __slots__ = ("_heaps", "_num_items", "_num_pushed", "_num_queued", "_worth_of")

    def __init__(self, worth_of: Callable[[Entry], Worth]) -> None:
        self._worth_of = worth_of
        self._heaps: dict[tuple[bool, int], _Heap] = {}
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
        entry.queued = worth
        heap = self._heaps.setdefault((worth[0] == HIT, size_class(entry.num_bytes)), [])
        self._num_pushed += 1
        self._num_items += 1
        heapq.heappush(heap, (worth, self._num_pushed, entry))
        if self._num_items > 2 * self._num_queued + _SLACK:
            self._drop_stale()

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
        heaps = [
            heap
            for (of_hit, of_class), heap in self._heaps.items()
            if heap and of_hit == is_hit and of_class >= least_class
        ]
        while heaps := [heap for heap in heaps if heap]:
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
            else:
                self._pop(heap)
        return None

    def _pop(self, heap: _Heap) -> None:
        heapq.heappop(heap)
        self._num_items -= 1

    def _drop_stale(self) -> None:
        # Empty heaps stay: `first` may be looking at them, and there are few sizes.
        for heap in self._heaps.values():
            heap[:] = [item for item in heap if item[2].queued is item[0]]
            heapq.heapify(heap)
        self._num_items = sum(len(heap) for heap in self._heaps.values())


def size_class(num_bytes: int) -> int:
    """Quarters of powers of two: what is in a higher class is larger."""
    num_bits = num_bytes.bit_length()
    return num_bits * 4 + (num_bytes >> max(0, num_bits - 3)) % 4


def _top(heap: _Heap) -> tuple[Worth, int]:
    return heap[0][:2]
