# SPDX-License-Identifier: Apache-2.0
"""What gives way when a place is needed.

The order, what gives way first first:

1. Tails whose rows are gone: nothing can resume there until the rows are stored again.
2. Entries that were never loaded: most of what is stored never is.
3. Entries that were loaded. They keep this rank while all of them together take no more than a
   share of the tier; beyond it, the least recently used of them count as never loaded. Without the
   share, what was of use long ago would fill the tier for good (the segmented LRU of R. Karedla,
   J. S. Love and B. G. Wherry, "Caching strategies to improve disk system performance", 1994).

Within a rank, the least recently used goes first. Of one use, the end of the prefix goes before its
beginning, which more prompts share, and a boundary's tails before its rows. An entry that is being
stored or loaded never gives way. Rows behind a gap stay where they are in the order, for holes can
be filled.

A new entry may push out what is worth less than itself, as it will be worth when it is stored. So
it never takes the place of an entry of rank 3, or of its own prefix.

Entries differ in size, so the first in the order need not make a hole that is large enough. The
order is followed until some entry, with holes and earlier entries beside it, does; only what lies
in that hole goes. After `MOST_TRIED` entries without one, any lesser neighbour may go with one of
these: where thousands of small entries lie among large ones, the order alone would take as many
steps.

Nothing is changed before a hole is found: all or nothing. Costs O(log n) for each entry that is
tried, amortised, and the neighbours looked at. More than `MOST_TRIED` are tried only where entries
stand in the way that must stay.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece, Worth

MOST_TRIED = 64
"""Entries that are tried in order before neighbours may go out of order."""

_ORPHAN, _NEVER_HIT, _HIT = range(3)

_Queue = list[tuple[Worth, int, Entry]]
"""Heaps; the number tells apart what was queued twice with one worth."""


class Choice(NamedTuple):
    """What has to go; None if that is not possible.

    Attributes:
        victims: In the order of their places.
        is_outbid: Where nothing can go: whether entries that are worth more are the reason.
    """

    victims: list[Entry] | None
    is_outbid: bool


class EvictionOrder:
    """The entries that may have to go, by worth.

    An entry is queued once. Its worth mostly rises while it is queued; that is seen when its turn
    comes. Whoever lowers it calls `add` again.

    Args:
        protected_bytes: What entries that were loaded may take together and keep their rank.
        has_no_rows: Whether the rows before a boundary, known by its key, are gone, and needed.
    """

    __slots__ = (
        "_common",
        "_has_no_rows",
        "_hit",
        "_num_pushed",
        "_num_queued",
        "_protected_bytes",
        "hit_bytes",
    )

    def __init__(self, protected_bytes: int, has_no_rows: Callable[[bytes], bool]) -> None:
        self._protected_bytes = protected_bytes
        self._has_no_rows = has_no_rows
        self._common: _Queue = []
        self._hit: _Queue = []
        self._num_queued = self._num_pushed = 0
        self.hit_bytes = 0

    def worth(self, piece: Piece, key: bytes, use: int, number: int, is_hit: bool = False) -> Worth:
        """Of an entry that is stored, or going to be; what gives way first is least."""
        rank = _HIT if is_hit else _NEVER_HIT
        if piece.kind is Kind.TAILS and self._has_no_rows(key):
            rank = _ORPHAN
        return rank, use, -piece.end_tokens, piece.kind, number

    def add(self, entry: Entry) -> None:
        """An entry may have to go, or may be worth less than before."""
        if entry.is_evictable:
            self._queue(entry)

    def note_hit(self, entry: Entry) -> None:
        """An entry has been loaded."""
        if entry.state is EntryState.STORED and not entry.is_hit:
            entry.is_hit = True
            self.hit_bytes += entry.num_bytes

    def shrink_hits(self) -> None:
        """See to it that entries of the highest rank take no more than their share."""
        while self.hit_bytes > self._protected_bytes:
            entry = self._first(self._hit)
            if entry is None:
                break  # the others are being loaded, and come here when that ends
            self._forget_hit(entry)
            self._queue(entry)

    def forget(self, entry: Entry) -> None:
        """An entry is not STORED any more."""
        self._forget_hit(entry)
        self._unqueue(entry)

    def choose(
        self, arena: Arena, entries: Mapping[int, Entry], num_bytes: int, below: Worth
    ) -> Choice:
        """What has to go for a place of so many bytes; changes nothing but the queues' order.

        Args:
            entries: By the offset of their place.
            below: What is worth this or more stays.
        """
        tried: list[Entry] = []
        try:
            victims = self._victims(arena, entries, num_bytes, below, tried)
            is_outbid = victims is None and bool(
                self._first(self._common) or self._first(self._hit)
            )
            return Choice(victims, is_outbid)
        finally:
            for entry in tried:
                self.add(entry)

    def _victims(
        self,
        arena: Arena,
        entries: Mapping[int, Entry],
        num_bytes: int,
        below: Worth,
        tried: list[Entry],
    ) -> list[Entry] | None:
        tried_offsets: set[int] = set()

        def is_tried(offset_bytes: int) -> bool:
            return offset_bytes in tried_offsets

        def is_less_worthy(offset_bytes: int) -> bool:
            entry = entries[offset_bytes]
            return entry.is_evictable and self._worth_of(entry) < below

        candidates = self._candidates(below)
        while True:
            batch: list[Entry] = []
            for entry in itertools.islice(candidates, MOST_TRIED):
                batch.append(entry)
                tried.append(entry)
                tried_offsets.add(entry.offset_bytes)
                window = arena.window_around(entry.offset_bytes, num_bytes, is_tried)
                if window is not None:
                    return [entries[offset] for offset in window]
            if not batch:
                return None
            windows = [
                window
                for entry in batch
                if (window := arena.window_around(entry.offset_bytes, num_bytes, is_less_worthy))
            ]
            if windows:
                window = min(
                    windows,
                    key=lambda offsets: sum(
                        entries[offset].num_bytes
                        for offset in offsets
                        if offset not in tried_offsets
                    ),
                )
                return [entries[offset] for offset in window]

    def _candidates(self, below: Worth) -> Iterator[Entry]:
        """Entries in order; they are not queued any more."""
        while (entry := self._first(self._common)) is not None:
            assert entry.queued is not None
            if entry.queued >= below:
                return
            self._unqueue(entry)
            yield entry

    def _first(self, queue: _Queue) -> Entry | None:
        """The first entry of a queue; drops and moves what does not belong there."""
        while queue:
            worth, _, entry = queue[0]
            if entry.queued is worth:
                if entry.is_evictable and self._worth_of(entry) == worth:
                    return entry
                self._unqueue(entry)
                heapq.heappop(queue)
                self.add(entry)
            else:
                heapq.heappop(queue)
        return None

    def _queue(self, entry: Entry) -> None:
        worth = self._worth_of(entry)
        if entry.queued == worth:
            return
        if entry.queued is None:
            self._num_queued += 1
        entry.queued = worth
        self._num_pushed += 1
        heapq.heappush(
            self._hit if worth[0] == _HIT else self._common, (worth, self._num_pushed, entry)
        )
        if len(self._common) + len(self._hit) > 2 * self._num_queued + MOST_TRIED:
            for queue in (self._common, self._hit):
                queue[:] = [each for each in queue if each[2].queued is each[0]]
                heapq.heapify(queue)

    def _unqueue(self, entry: Entry) -> None:
        """Its place in a queue is not valid any more, and is dropped when its turn comes."""
        if entry.queued is not None:
            entry.queued = None
            self._num_queued -= 1

    def _worth_of(self, entry: Entry) -> Worth:
        return self.worth(entry.piece, entry.key, entry.use, entry.number, entry.is_hit)

    def _forget_hit(self, entry: Entry) -> None:
        if entry.is_hit:
            entry.is_hit = False
            self.hit_bytes -= entry.num_bytes
