# SPDX-License-Identifier: Apache-2.0
"""What gives way when a place is needed.

The order, what gives way first first:

1. Tails whose rows are gone: nothing can resume there until the rows are stored again.
2. Entries that were never loaded: most of what is stored never is.
3. Entries that were loaded. They keep this rank while all of them together take no more than a
   share of the tier; beyond it, the least recently used of them count as never loaded. Without the
   share, what was of use long ago would fill the tier for good (the segmented LRU of R. Karedla,
   J. S. Love and B. G. Wherry, "Caching strategies to improve disk system performance", 1994).
   How large it is, is learned: see ``protected_share``.
   What was loaded behind a hole does not get it: it saves less than a prefix that is whole, and
   would push such prefixes out.

Within a rank, a rule decides. With `worth.LatestUse`, the least recently used goes first; of one
use, the end of the prefix goes before its beginning, which more prompts share. With `reuse.Reuse`,
what is expected to bring the fewest hits for its time goes first. Of what is equal, a boundary's
tails go before its rows. An entry that is being stored or loaded never gives way. Rows behind a gap
stay where they are in the order, for holes can be filled.

A new entry may push out what is worth less than itself, as it will be worth when it is stored. So
it never takes the place of an entry of rank 3, nor, with `worth.LatestUse`, of its own prefix.

Entries differ in size, so the first in the order need not make a hole that is large enough:

- The order is followed until some entry, with holes and earlier entries beside it, does.
- After `MOST_TRIED` entries without one, the first that is large enough by itself goes.
- If there is none, one of the tried goes together with any lesser neighbours, or these go alone if
  they are enough.

Only what lies in that hole goes, and what has been spared `MOST_SPARED` times so: small entries
that lie alone among large ones would stay for good, and be tried again every time.

Nothing is changed before a hole is found: all or nothing. Costs O(log n) for each entry that is
tried, amortised, and the neighbours looked at. At most `MOST_TRIED_IN_ALL` are tried: where none of
them can make a hole, because what lies beside them has to stay, the store is refused.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.entries import Entry, EntryState, Worth
from vllm_ascend_kvext.store.protected_share import ProtectedShare
from vllm_ascend_kvext.store.worth import WorthRule
from vllm_ascend_kvext.store.worth_queue import WorthQueue

MOST_TRIED = 8
"""Entries that are tried in order before one goes out of order."""

MOST_TRIED_IN_ALL = 128
"""Entries that are tried for one store."""

MOST_MOVED = 256
"""Entries that are queued anew for one store, once the rule has learned: a millisecond or less."""

MOST_SPARED = 8
"""How often an entry is tried, and stays, while others go."""


class Choice(NamedTuple):
    """What has to go; None if that is not possible.

    Attributes:
        victims: What lies in the hole, and what has been spared too often.
        spared: Whose turn it was.
        is_outbid: Where nothing can go: whether entries that are worth more are the reason.
    """

    victims: list[Entry] | None
    spared: list[Entry]
    is_outbid: bool


class EvictionOrder:
    """The entries that may have to go.

    Args:
        share: What entries that were loaded may take together and keep their rank.
        rule: What an entry is worth.
    """

    __slots__ = ("_version", "hit_bytes", "queue", "rule", "share")

    def __init__(self, share: ProtectedShare, rule: WorthRule) -> None:
        self.share = share
        self.rule = rule
        self.queue = WorthQueue(rule.worth_of)
        self._version = rule.version
        self.hit_bytes = 0

    def add(self, entry: Entry) -> None:
        """An entry may have to go, or may be worth less than before."""
        if entry.is_evictable:
            self.queue.add(entry)

    def note_hit(self, entry: Entry) -> None:
        """An entry has been loaded."""
        if entry.state is not EntryState.STORED:
            return
        if not entry.is_hit:
            entry.is_hit = True
            entry.num_spared = 0
            self.hit_bytes += entry.num_bytes

    def shrink_hits(self) -> None:
        """See to it that entries of the highest rank take no more than their share."""
        while self.hit_bytes > self.share.num_bytes:
            entry = self.queue.first(is_hit=True)
            if entry is None:
                break  # the others are being loaded, and come here when that ends
            self._forget_hit(entry)
            self.queue.add(entry)

    def forget(self, entry: Entry) -> None:
        """An entry is not STORED any more."""
        self._forget_hit(entry)
        self.queue.discard(entry)

    def choose(
        self, arena: Arena, entries: Mapping[int, Entry], num_bytes: int, below: Worth
    ) -> Choice:
        """What has to go for a place of so many bytes; changes nothing.

        Args:
            entries: By the offset of their place.
            below: What is worth this or more stays.
        """
        if self._version != self.rule.version:
            self._version = self.rule.version
            self.queue.renew()
        self.queue.move(MOST_MOVED)
        search = _Search(arena, entries, num_bytes, below, self)
        window = search.find_window()
        is_outbid = window is None and any(self.queue.first(is_hit) for is_hit in (False, True))
        for entry in search.tried:
            self.add(entry)
        if window is None:
            return Choice(None, [], is_outbid)
        victims = [entries[offset] for offset in window]
        spared = [entry for entry in search.spared if entry not in victims]
        victims += [entry for entry in spared if entry.num_spared >= MOST_SPARED]
        return Choice(victims, spared, False)

    def take(self, below: Worth, at_least_bytes: int = 0) -> Iterator[Entry]:
        """Entries in order that were never loaded; they are not queued any more."""
        while (entry := self.queue.first(False, at_least_bytes)) is not None:
            assert entry.queued is not None
            if entry.queued >= below:
                return
            self.queue.discard(entry)
            yield entry

    def is_lesser(self, entry: Entry, below: Worth) -> bool:
        """Whether an entry may go for something that is worth so much."""
        return entry.is_evictable and self.rule.worth_of(entry) < below

    def greatest_worth(self, entries: Iterable[Entry]) -> Worth:
        return max(self.rule.worth_of(entry) for entry in entries)

    def _forget_hit(self, entry: Entry) -> None:
        if entry.is_hit:
            entry.is_hit = False
            self.hit_bytes -= entry.num_bytes


class _Search:
    """For entries that make a hole; see the module's words on sizes."""

    def __init__(
        self,
        arena: Arena,
        entries: Mapping[int, Entry],
        num_bytes: int,
        below: Worth,
        order: EvictionOrder,
    ) -> None:
        self._arena = arena
        self._entries = entries
        self._num_bytes = num_bytes
        self._below = below
        self._order = order
        self._offsets: set[int] = set()
        self.tried: list[Entry] = []
        self.spared: list[Entry] = []

    def find_window(self) -> list[int] | None:
        """Offsets of places. What was tried is not queued any more."""
        while len(self.tried) < MOST_TRIED_IN_ALL:
            num_tried = len(self.tried)
            window = self._try(self._order.take(self._below))
            self.spared += self.tried[num_tried:]
            if window is None and len(self.tried) == num_tried + MOST_TRIED:
                window = self._try(self._order.take(self._below, self._num_bytes))
            if window is None:
                window = self._widen(self.tried[num_tried:])
            if window is not None or len(self.tried) == num_tried:
                return window
        return None

    def _try(self, candidates: Iterator[Entry]) -> list[int] | None:
        """A window of nothing but what was tried."""
        for entry in itertools.islice(candidates, MOST_TRIED):
            self.tried.append(entry)
            self._offsets.add(entry.offset_bytes)
            window = self._arena.window_around(
                entry.offset_bytes, self._num_bytes, self._offsets.__contains__
            )
            if window is not None:
                return window
        return None

    def _widen(self, tried: list[Entry]) -> list[int] | None:
        """The window of lesser entries around a tried one in which none is worth much."""
        windows = [
            self._shrink(entry.offset_bytes, window)
            for entry in tried
            if (
                window := self._arena.window_around(
                    entry.offset_bytes, self._num_bytes, self._is_lesser
                )
            )
        ]
        return min(windows, key=self._greatest_worth, default=None)

    def _shrink(self, center: int, window: list[int]) -> list[int]:
        """Without the entry that it was found around, where the others are enough."""
        while len(window) > 1 and center in (window[0], window[-1]):
            others = set(window) - {center}
            beside = window[1] if center == window[0] else window[-2]
            smaller = self._arena.window_around(beside, self._num_bytes, others.__contains__)
            if smaller is None:
                return window
            center, window = beside, smaller
        return window

    def _is_lesser(self, offset_bytes: int) -> bool:
        return self._order.is_lesser(self._entries[offset_bytes], self._below)

    def _greatest_worth(self, window: list[int]) -> Worth:
        return self._order.greatest_worth(self._entries[offset] for offset in window)
