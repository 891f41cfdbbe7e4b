# SPDX-License-Identifier: Apache-2.0
"""What gives way when a place is needed.

What is expected to bring the fewest hits for its time goes first, see ``reuse``; of what is equal,
the least recently used. What was used last goes after all others: of what has just become popular,
too few requests have been seen to expect more (as the window of W-TinyLFU: G. Einziger, R. Friedman
and B. Manes, "TinyLFU: a highly efficient cache admission policy", ACM Transactions on Storage 13,
2017). Tails whose rows are gone go before everything: nothing can resume there until the rows are
stored again.

Where a load stops at the first hole, a prefix gives way from its end on: rows stay as long as rows
or tails behind them are stored, or on their way. So nothing is kept that nobody can reach. Where
holes are computed, each chunk goes by its own worth. What is being stored or loaded never gives
way. A new entry pushes out only what is worth less than itself.

The order is looked for among a random sample of the ends, as LHD does: what an entry is worth
changes while it waits, and a sample needs no order that would have to be kept up. Up to
`NUM_SAMPLED` ends, the sample is all of them.

Entries differ in size, so the first in the order need not make a gap that is large enough. It is
followed until what went makes one; after `MAX_TRIED` entries without one, the first that is large
enough by itself goes, too, or else one together with lesser neighbours. Nothing is changed before a
gap is found: all or nothing.
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
"""Entries that are compared for one store: the one that goes is among the least 5 % nearly always
(all but 4 of 100 times)."""

RECENT_SHARE = 1 / 6
"""Of the tier: what was used since so much was asked to be stored goes after all others. Of the
traces of ``benchmarks/holes``, a smaller share costs more where other documents become popular
(1.05 times the tokens of LRU with 1/8), and a larger one where contexts are compacted."""

MAX_TRIED = 8
"""Entries that are tried in order before one goes out of order."""


class Worth(NamedTuple):
    """What an entry is worth; what gives way first compares as least.

    Attributes:
        is_recent: Whether it is among what was used last.
        density: Expected hits for the time it stays; below 0 for tails without rows.
        use: The latest use.
        nearness: The end in tokens, negated: of one use, the end of a prefix goes first.
        kind: Of one boundary, tails go first.
        number: The number of the entry.
    """

    is_recent: bool
    density: float
    use: int
    nearness: int
    kind: Kind
    number: int


class EvictionOrder:
    """The entries that may have to go.

    Args:
        arena: The places of the tier.
        index: The index of the tier.
        geometry: Where prefixes are cut.
        reuse: What is known of when chunks are asked for again.
        ends_first: Whether rows wait for what lies behind them.
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
        # Uses that stored something, and how many bytes: as many as fill the share, one at least.
        self._recent_bytes = RECENT_SHARE * arena.capacity_bytes
        self._latest: deque[list[int]] = deque([[0, 0]])
        self._latest_bytes = 0
        # How many entries lie just behind a boundary, and the rows before it that wait for these.
        self._behind: Counter[bytes] = Counter()
        self._blocked: dict[bytes, dict[Entry, None]] = {}
        # What may go, in any order, and perhaps what may not; that is seen when it is sampled.
        self._ends: list[Entry] = []
        self._places: dict[Entry, int] = {}

    def begin(self, entry: Entry) -> None:
        """An entry is going to be stored."""
        if self._latest[-1][0] < entry.use:
            self._latest.append([entry.use, 0])
        self._latest[-1][1] += entry.num_bytes
        self._latest_bytes += entry.num_bytes
        while self._latest_bytes > self._recent_bytes and len(self._latest) > 1:
            self._latest_bytes -= self._latest.popleft()[1]
        if entry.key_before is not None:
            self._behind[entry.key_before] += 1

    def add(self, entry: Entry) -> None:
        """An entry may have to go from now on."""
        if entry.is_evictable and entry not in self._places:
            self._places[entry] = len(self._ends)
            self._ends.append(entry)

    def forget(self, entry: Entry) -> None:
        """An entry leaves, stored or not."""
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
        standing: Callable[[Entry], int] = lambda _: 0,
    ) -> list[Entry] | Refusal:
        """What has to go for a new entry, in order; changes nothing that is stored.

        Args:
            entries: The entries by the offset of their place.
            new: The entry that has no place yet. What is worth as much or more stays.
            now: The latest use of all.
            standing: Of an entry beside the new one: below 0 it goes first, above 0 it stays.
        """
        sample = self._sample()
        recent_use = self._latest[0][0]
        if self._latest_bytes > self._recent_bytes:  # by the latest use alone
            recent_use += 1

        def worth(entry: Entry) -> Worth:
            found = self._worth_of(entry, recent_use, now)
            if entry is not new and standing(entry) < 0:
                return found._replace(is_recent=False, density=-1.0)
            return found

        below = worth(new)
        worths = sorted((worth(entry), entry) for entry in sample)
        lesser = [
            entry for its_worth, entry in worths if its_worth < below and standing(entry) <= 0
        ]
        tried: set[int] = set()
        for number, entry in enumerate(lesser[:MAX_TRIED], 1):
            tried.add(entry.offset_bytes)
            if self._arena.window_around(entry.offset_bytes, new.num_bytes, tried.__contains__):
                return lesser[:number]

        def may_go(offset_bytes: int) -> bool:
            entry = entries[offset_bytes]
            # What the same request uses is the beginning of its prefix.
            return (
                entry.is_evictable
                and standing(entry) <= 0
                and entry.use < new.use
                and worth(entry) < below
                and not self._is_blocked(entry)
            )

        large = [entry for entry in lesser[MAX_TRIED:] if entry.num_bytes >= new.num_bytes]
        for entry in large[:1] or lesser:
            window = self._arena.window_around(entry.offset_bytes, new.num_bytes, may_go)
            if window is not None:
                others = (entries[offset_bytes] for offset_bytes in window)
                return list(dict.fromkeys([*lesser[:MAX_TRIED], *others]))
        return Refusal.WORTH_LESS if sample else Refusal.NO_ROOM

    def _worth_of(self, entry: Entry, recent_use: int, now: int) -> Worth:
        """What an entry is worth that is stored, or going to be."""
        is_recent = False
        density = -1.0
        if not self._is_orphan(entry):
            is_recent = entry.use >= recent_use
            density = self._reuse.density(entry.chunk_key, entry.use, now)
        piece = entry.piece
        return Worth(is_recent, density, entry.use, -piece.end_tokens, piece.kind, entry.number)

    def _sample(self) -> list[Entry]:
        """Some of the ends."""
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
        """Whether something lies behind some rows. If so, they are added when that has gone."""
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
