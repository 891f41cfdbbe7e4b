# SPDX-License-Identifier: Apache-2.0
"""Chooses which entries are evicted when a new entry needs a place.

The order of eviction:

1. Tails whose rows are gone. No request can resume at such tails until the rows are stored again.
2. Entries with the fewest expected hits for the time that they stay, see ``reuse``. Among equal
   entries, the least recently used entry goes first.
3. Entries that were used last. A chunk that has just become popular has had too few requests to
   show it (compare the window of W-TinyLFU: G. Einziger, R. Friedman and B. Manes, "TinyLFU: a
   highly efficient cache admission policy", ACM Transactions on Storage 13, 2017).

If a load stops at the first hole, a prefix is evicted from its end on. Rows stay as long as rows or
tails behind them are stored or are being stored. So no entry stays that a load cannot reach. If
holes are computed, each chunk is evicted by its own priority. An entry that is being stored or
loaded is never evicted. A new entry evicts only entries of lower priority.

The order is taken from a random sample of the ends, as in LHD. The priority of an entry changes
while it waits, and a sample needs no sorted list that must be updated. If there are at most
`NUM_SAMPLED` ends, the sample has all of them.

Entries differ in size, so the first entry of the order may not make a large enough gap. Entries are
chosen in order until they make such a gap. If `MAX_TRIED` entries make no such gap, the first entry
that is large enough by itself is chosen, too. If there is none, an entry is chosen together with
its neighbours of lower priority. Nothing is changed before a gap is found.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import NamedTuple

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Kind
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.reuse import Reuse

NUM_SAMPLED = 64
"""The number of entries that are compared for one store. In 96 of 100 times, the chosen entry is
among the 5 % of lowest priority."""

RECENT_SHARE = 1 / 6
"""The share of the tier that is for recently used entries. An entry is recent if the stores
requested since its latest use take no more than this share. In the traces of ``benchmarks/holes``,
a smaller share costs more tokens when other documents become popular (1.05 times the tokens of LRU
with 1/8). A larger share costs more tokens when contexts are compacted."""

MAX_TRIED = 8
"""The number of entries that are tried in order before an entry is chosen out of order."""


class Priority(NamedTuple):
    """The priority of an entry. The entry of the lowest priority is evicted first.

    Attributes:
        is_recent: Whether the entry is one of the entries that were used last.
        density: The expected hits for the time that it stays; below 0 for tails without rows.
        use: Its latest use.
        nearness: Its end in tokens, negated: entries of one use are evicted from the end of the
            prefix on.
        kind: Its kind: tails are evicted before the rows at the same boundary.
        number: Its number.
    """

    is_recent: bool
    density: float
    use: int
    nearness: int
    kind: Kind
    number: int


class EvictionOrder:
    """The entries that may be evicted.

    Args:
        arena: The places of the tier.
        index: The index of the tier.
        geometry: Where prefixes are cut.
        reuse: What is known about when chunks are asked for again.
        ends_first: Whether rows stay as long as entries behind them stay.
    """

    def __init__(
        self, arena: Arena, index: Index, geometry: TierGeometry, reuse: Reuse, ends_first: bool
    ) -> None:
        self._arena = arena
        self._index = index
        self._geometry = geometry
        self._reuse = reuse
        self._ends_first = ends_first
        self._random = random.Random(0)
        # The latest uses that stored something, and the bytes of each. The oldest use is dropped
        # while their bytes exceed the share; the latest use always stays.
        self._recent_bytes = RECENT_SHARE * arena.capacity_bytes
        self._latest: deque[list[int]] = deque([[0, 0]])
        self._latest_bytes = 0
        # Both map the key of a boundary: `_behind` to the number of entries that begin there, and
        # `_blocked` to the rows before the boundary, which stay until these entries are gone.
        self._behind: Counter[bytes] = Counter()
        self._blocked: dict[bytes, dict[Entry, None]] = {}
        # Entries that may be evicted, in any order, with their positions. An entry that must stay
        # may be among them; `_sample` drops it.
        self._ends: list[Entry] = []
        self._places: dict[Entry, int] = {}

    def begin(self, entry: Entry) -> None:
        """Note an entry that is going to be stored."""
        if self._latest[-1][0] < entry.use:
            self._latest.append([entry.use, 0])
        self._latest[-1][1] += entry.num_bytes
        self._latest_bytes += entry.num_bytes
        while self._latest_bytes > self._recent_bytes and len(self._latest) > 1:
            self._latest_bytes -= self._latest.popleft()[1]
        if entry.key_before is not None:
            self._behind[entry.key_before] += 1

    def add(self, entry: Entry) -> None:
        """Note an entry that may be evicted from now on."""
        if entry.is_evictable and entry not in self._places:
            self._places[entry] = len(self._ends)
            self._ends.append(entry)

    def forget(self, entry: Entry) -> None:
        """Forget an entry that leaves the tier, stored or not."""
        if entry in self._places:
            self._discard(self._places[entry])
        key = entry.key_before
        if key is None:
            return
        self._behind[key] -= 1
        if not self._behind[key]:
            del self._behind[key]
            for waiting in self._blocked.pop(key, ()):
                self.add(waiting)

    def choose(
        self,
        entries: Mapping[int, Entry],
        new: Entry,
        now: int,
        preference: Callable[[Entry], int] = lambda _: 0,
    ) -> list[Entry] | Refusal:
        """Choose the entries to evict for a new entry, in order. Nothing that is stored changes.

        Args:
            entries: The entries by the offset of their place.
            new: The entry that has no place yet. Entries of equal or higher priority stay.
            now: The latest use of all.
            preference: Returns a number for an entry, which overrules the priorities of this entry
                and of the new entry. Below 0, the entry is evicted first; above 0, it stays.
        """
        sample = self._sample()
        recent_use = self._latest[0][0]
        if self._latest_bytes > self._recent_bytes:  # The latest use alone exceeds the share.
            recent_use += 1

        def priority_of(entry: Entry) -> Priority:
            found = self._priority_of(entry, recent_use, now)
            if entry is not new and preference(entry) < 0:
                return found._replace(is_recent=False, density=-1.0)
            return found

        limit = priority_of(new)
        by_priority = sorted((priority_of(entry), entry) for entry in sample)
        lesser = [
            entry for priority, entry in by_priority if priority < limit and preference(entry) <= 0
        ]
        tried: set[int] = set()
        for number, entry in enumerate(lesser[:MAX_TRIED], 1):
            tried.add(entry.offset_bytes)
            if self._arena.window_around(entry.offset_bytes, new.num_bytes, tried.__contains__):
                return lesser[:number]

        def may_go(offset_bytes: int) -> bool:
            entry = entries[offset_bytes]
            # An entry that the same request uses is the beginning of its prefix, so it stays.
            return (
                entry.is_evictable
                and preference(entry) <= 0
                and entry.use < new.use
                and priority_of(entry) < limit
                and not self._is_blocked(entry)
            )

        large = [entry for entry in lesser[MAX_TRIED:] if entry.num_bytes >= new.num_bytes]
        for entry in large[:1] or lesser:
            window = self._arena.window_around(entry.offset_bytes, new.num_bytes, may_go)
            if window is not None:
                others = (entries[offset_bytes] for offset_bytes in window)
                return list(dict.fromkeys([*lesser[:MAX_TRIED], *others]))
        return Refusal.WORTH_LESS if sample else Refusal.NO_ROOM

    def _priority_of(self, entry: Entry, recent_use: int, now: int) -> Priority:
        """The priority of an entry that is stored or is going to be stored."""
        is_recent = False
        density = -1.0
        if not self._is_orphan(entry):
            is_recent = entry.use >= recent_use
            density = self._reuse.density(entry.chunk_key, entry.use, now)
        piece = entry.piece
        return Priority(is_recent, density, entry.use, -piece.end_tokens, piece.kind, entry.number)

    def _sample(self) -> list[Entry]:
        """A random sample of the entries that may be evicted."""
        ends = self._ends
        found = 0
        while found < min(NUM_SAMPLED, len(ends)):
            chosen = found + int(self._random.random() * (len(ends) - found))
            entry = ends[chosen]
            if not entry.is_evictable or self._is_blocked(entry):
                self._discard(chosen)
                continue
            self._put(chosen, ends[found])
            self._put(found, entry)
            found += 1
        return ends[:found]

    def _is_blocked(self, entry: Entry) -> bool:
        """Whether entries behind rows keep the rows. If so, `forget` adds the rows again later."""
        behind = self._behind
        is_rows = entry.piece.kind is Kind.ROWS
        if not self._ends_first or not is_rows or behind.keys().isdisjoint(entry.keys):
            return False
        key = next(key for key in entry.keys if key in behind)
        self._blocked.setdefault(key, {})[entry] = None
        return True

    def _is_orphan(self, entry: Entry) -> bool:
        return (
            entry.piece.kind is Kind.TAILS
            and self._geometry.needs_rows
            and self._index.present(Kind.ROWS, entry.key) is None
        )

    def _put(self, place: int, entry: Entry) -> None:
        self._ends[place] = entry
        self._places[entry] = place

    def _discard(self, place: int) -> None:
        del self._places[self._ends[place]]
        last = self._ends.pop()
        if place < len(self._ends):
            self._put(place, last)
