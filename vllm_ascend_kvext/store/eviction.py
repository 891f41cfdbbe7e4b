# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Chooses which entries are evicted when a new entry needs a place.

The order of eviction:

1. What no request can use as it is: tails whose rows are gone, and, in a model with tails, rows at
   the end of a prefix that have no tails. Rows that were used last are spared: the request that has
   computed them may still store tails there.
2. Entries with the fewest expected hits for the time that they stay. ``resumes`` expects the hits
   of tails, and ``reuse`` those of rows. Rows of an answer count for as much as the answer is
   likely to come back. Among equal entries, the least recently used entry goes first.
3. Rows that were used last. A chunk that has just become popular has had too few requests to show
   it (compare the window of W-TinyLFU: G. Einziger, R. Friedman and B. Manes, "TinyLFU: a highly
   efficient cache admission policy", ACM Transactions on Storage 13, 2017).

While a plain LRU would find nearly all that comes back, or has found much that this order has lost,
the latest use decides instead of the expected hits: what such an LRU would have goes after all that
it would not have. ``recency`` says when. Useless entries still go first.

A prompt asks for all rows before its end, but it resumes at one boundary only: the later tails of a
conversation make the earlier ones useless, however late those were used. So tails are judged by
themselves, and are never among what was used last. Whole tails that take no more memory than a
chunk of rows are an exception if a request asked for their boundary. They are worth what the rows
before them are worth, which would be lost with them.

A prefix is evicted from its end on, cut by cut. Rows stay as long as rows or tails behind them are
stored or are being stored, and tails as long as others continue them. So no entry stays that a load
cannot reach. This holds even if holes are computed: a hole that an eviction makes costs every later
request its tokens. An entry that is being stored or loaded is never evicted. A new entry evicts
only what has a lower priority.

The order is taken from a random sample of the ends, as in LHD. The priority of an entry changes
while it waits, and a sample needs no sorted list that must be updated. If there are at most
`NUM_SAMPLED` ends, the sample has all of them.

Rows take any gaps, so as many cuts are evicted as are lacking. Other entries need one gap. For
tails, useless entries and useless ends of rows are evicted until there is one. If there is still no
gap, entries are evicted as a whole. As entries differ in size, the first entry of the order may not
make a gap. Entries are chosen in order until they make one. If `MAX_TRIED` entries make no such
gap, the first entry that is large enough by itself is chosen, too. If there is none, an entry is
chosen together with its neighbours of lower priority. None of them is evicted before a gap is
found.
"""

from __future__ import annotations

import math
import random
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.recency import Recency
from vllm_ascend_kvext.store.resumes import Resumes
from vllm_ascend_kvext.store.reuse import Reuse

NUM_SAMPLED = 64
"""The number of entries that are compared for one store. In 96 of 100 times, the chosen entry is
among the 5 % of lowest priority."""

RECENT_SHARE = 1 / 6
"""The share of the tier that is for recently used entries. An entry is recent if the stores
requested since its latest use take no more than this share. In the traces of ``benchmarks/holes``,
a smaller share costs more tokens when other documents become popular (1.05 times the tokens of LRU
with 1/8). A larger share costs more tokens when contexts are compacted."""

MIN_RECENT_CHANCE = 0.5
"""Answers that are less likely to come back are not recent, however late they were used."""

USELESS = -1.0
"""The density of what no request can use, below all others."""

KEPT = math.inf
"""The density of what a plain LRU would have, while such an LRU is followed; see `recency`."""

MAX_TRIED = 8
"""The number of entries that are tried in order before an entry is chosen out of order."""


class Priority(NamedTuple):
    """The priority of an entry. The entry of the lowest priority is evicted first.

    Attributes:
        is_recent: Whether the entry has rows, or small tails, that were used last.
        density: The expected hits for the time that it stays; `USELESS` if no request can use it.
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
        resumes: What is known about where requests resume.

    Attributes:
        small_tails_bytes: Tails of this size or less are worth what the rows before them are.
        recency: What a plain LRU would have; None if no LRU is followed, see `HostTier`.
    """

    def __init__(
        self,
        arena: Arena,
        index: Index,
        geometry: TierGeometry,
        reuse: Reuse,
        resumes: Resumes,
    ) -> None:
        self._arena = arena
        self._index = index
        self._geometry = geometry
        self._reuse = reuse
        self._resumes = resumes
        self.small_tails_bytes = 0
        self.recency: Recency | None = None
        self._random = random.Random(0)
        # The latest uses that stored something, and the bytes of each. While the sum of the bytes
        # exceeds the share, the oldest use is dropped. The latest use always stays.
        self._recent_bytes = RECENT_SHARE * arena.capacity_bytes
        self._latest: deque[list[int]] = deque([[0, 0]])
        self._latest_bytes = 0
        self._recent_use = 0  # The first use that is recent.
        # Both map the key of a boundary: `_behind` to the number of entries that begin there, and
        # `_blocked` to the rows before the boundary, which wait until these entries are gone.
        # `_waits_at` maps rows that wait to this key.
        self._behind: Counter[bytes] = Counter()
        self._blocked: dict[bytes, dict[Entry, None]] = {}
        self._waits_at: dict[Entry, bytes] = {}
        # Entries that may be evicted, in any order, with their positions. An entry that must stay
        # may be among them; `_sample` drops it.
        self._ends: list[Entry] = []
        self._places: dict[Entry, int] = {}

    def note_bytes(self, use: int, num_bytes: int) -> None:
        """Note that a use stores bytes."""
        if self._latest[-1][0] < use:
            self._latest.append([use, 0])
        self._latest[-1][1] += num_bytes
        self._latest_bytes += num_bytes
        while self._latest_bytes > self._recent_bytes and len(self._latest) > 1:
            self._latest_bytes -= self._latest.popleft()[1]
        # If the latest use alone exceeds the share, no use is recent.
        self._recent_use = self._latest[0][0] + (self._latest_bytes > self._recent_bytes)

    def begin(self, entry: Entry) -> None:
        """Note an entry that is going to be stored. The rows before it stay from now on."""
        if entry.key_before is not None:
            self._behind[entry.key_before] += 1

    def add(self, entry: Entry) -> None:
        """Note an entry that may be evicted from now on."""
        self._stop_waiting(entry)
        if entry.is_evictable and entry not in self._places:
            self._places[entry] = len(self._ends)
            self._ends.append(entry)

    def forget(self, entry: Entry) -> None:
        """Forget an entry that leaves the tier, stored or not."""
        if entry in self._places:
            self._discard(self._places[entry])
        self._stop_waiting(entry)
        key = entry.key_before
        if key is None:
            return
        self._behind[key] -= 1
        if not self._behind[key]:
            del self._behind[key]
            for waiting in list(self._blocked.get(key, ())):
                self.add(waiting)

    def lesser(
        self, limit: Priority, now: int, preference: Callable[[Entry], int] = lambda _: 0
    ) -> list[tuple[Priority, Entry]]:
        """Entries of lower priority than a limit, in the order in which they are evicted.

        Of some of them, only the end may be evicted, see `removable_to`. Nothing that is stored
        changes.

        Args:
            limit: The priority of a new entry. Entries of equal or higher priority stay.
            now: The latest use of all.
            preference: Returns a number for an entry, which overrules the priorities of this entry
                and of the new entry. Below 0, the entry is evicted first; above 0, it stays.
        """
        sample = self._sample()
        by_priority = sorted((self._preferred(entry, now, preference), entry) for entry in sample)
        return [found for found in by_priority if found[0] < limit and preference(found[1]) <= 0]

    def choose(
        self,
        entries: Mapping[int, Entry],
        new: Entry,
        now: int,
        lesser: Sequence[tuple[Priority, Entry]],
        preference: Callable[[Entry], int] = lambda _: 0,
    ) -> list[Entry] | Refusal:
        """Choose entries whose removal makes one gap for a new entry, in order. Nothing changes.

        Args:
            entries: The entries by the offset of their place.
            new: The entry that has no place yet.
            now: See `lesser`.
            lesser: What `lesser` has found for the new entry.
            preference: See `lesser`.
        """
        whole = [
            entry for _, entry in lesser if self.removable_to(entry) == entry.piece.first_tokens
        ]
        tried: set[int] = set()
        for number, entry in enumerate(whole[:MAX_TRIED], 1):
            tried.add(entry.offset_bytes)
            if self._arena.window_around(entry.offset_bytes, new.num_bytes, tried.__contains__):
                return whole[:number]
        limit = self.priority(new, now)

        def may_go(offset_bytes: int) -> bool:
            entry = entries[offset_bytes]
            # An entry that the same request uses is the beginning of its prefix, so it stays.
            return (
                entry.is_evictable
                and preference(entry) <= 0
                and entry.use < new.use
                and self._preferred(entry, now, preference) < limit
                and self.removable_to(entry) == entry.piece.first_tokens
            )

        large = [entry for entry in whole[MAX_TRIED:] if entry.num_bytes >= new.num_bytes]
        for entry in large[:1] or whole:
            window = self._arena.window_around(entry.offset_bytes, new.num_bytes, may_go)
            if window is not None:
                others = (entries[offset_bytes] for offset_bytes in window)
                return list(dict.fromkeys([*whole[:MAX_TRIED], *others]))
        return self.refusal

    @property
    def refusal(self) -> Refusal:
        """Why there is no room, after a search that found no entries of lower priority."""
        return Refusal.WORTH_LESS if self._ends else Refusal.NO_ROOM

    def removable_to(self, entry: Entry) -> int:
        """The token down to which an entry may lose its end.

        Returns:
            The first token of the entry if it may be removed as a whole. Its end if entries behind
            it keep all of it.
        """
        kind, first_tokens, end_tokens = entry.piece
        behind = self._behind
        if kind is Kind.TAILS or behind.keys().isdisjoint(entry.keys):
            return first_tokens
        keys = entry.keys
        num_kept = next(number for number in range(len(keys), 0, -1) if keys[number - 1] in behind)
        kept_tokens = self._geometry.floor(first_tokens) + num_kept * self._geometry.unit_tokens
        return min(end_tokens, self._geometry.cut_end(kept_tokens))

    def _preferred(self, entry: Entry, now: int, preference: Callable[[Entry], int]) -> Priority:
        """The priority of an entry that is stored, after the preference."""
        found = self.priority(entry, now)
        if preference(entry) < 0:
            return found._replace(is_recent=False, density=USELESS)
        return found

    def priority(self, entry: Entry, now: int, end_tokens: int = 0) -> Priority:
        """The priority of an entry that is stored or is going to be stored.

        This is the priority of its last cut, which is evicted first.

        Args:
            end_tokens: If given, the priority that the entry would have if it ended there.
        """
        kind, first_tokens, last_tokens = entry.piece
        end_tokens = end_tokens or last_tokens
        use = entry.use_at(end_tokens)
        if kind is Kind.TAILS:
            if self._is_orphan(entry):
                return Priority(False, USELESS, use, -end_tokens, kind, entry.number)
            rows = self._index.present(Kind.ROWS, entry.key)
            is_unasked = not entry.use
            is_large = entry.base is not None or entry.num_bytes > self.small_tails_bytes
            if rows is None or is_unasked or is_large:
                density = self._resumes.density(entry.key, use, now)
                return Priority(False, density, use, -end_tokens, kind, entry.number)
            use = max(use, rows.use_at(end_tokens))
            is_recent, density = self._worth_of_rows(rows, entry.cut_key, use, now)
            return Priority(is_recent, density, use, -end_tokens, kind, entry.number)
        key = entry.cut_key
        cut_start = self._geometry.cut_start(end_tokens - 1)
        if cut_start > first_tokens:
            key = entry.keys[(cut_start - first_tokens) // self._geometry.unit_tokens]
        is_recent, density = self._worth_of_rows(entry, key, use, now)
        if not is_recent and self._is_without_tails(entry):
            density = USELESS
        return Priority(is_recent, density, use, -end_tokens, kind, entry.number)

    def _worth_of_rows(self, rows: Entry, cut_key: bytes, use: int, now: int) -> tuple[bool, float]:
        """Whether a cut of some rows is recent, and the hits that are expected of it."""
        may_be_kept = rows.chance >= MIN_RECENT_CHANCE
        is_recent = may_be_kept and use >= self._recent_use
        recency = self.recency
        if (
            may_be_kept
            and recency is not None
            and recency.is_followed
            and recency.has(cut_key, use)
        ):
            return is_recent, KEPT
        return is_recent, rows.chance * self._reuse.density(cut_key, use, now)

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
        """Whether entries behind rows keep all of the rows. If so, `forget` adds the rows again."""
        if entry.piece.kind is Kind.TAILS or self.removable_to(entry) < entry.piece.end_tokens:
            return False
        key = next(key for key in reversed(entry.keys) if key in self._behind)
        self._blocked.setdefault(key, {})[entry] = None
        self._waits_at[entry] = key
        return True

    def _stop_waiting(self, entry: Entry) -> None:
        """Note that an entry does not wait, whether or not it has waited."""
        key = self._waits_at.pop(entry, None)
        if key is None:
            return
        blocked = self._blocked[key]
        del blocked[entry]
        if not blocked:
            del self._blocked[key]

    def _is_without_tails(self, entry: Entry) -> bool:
        """Whether no request can resume at the end of rows, nor behind it, and so needs no end.

        The method is called for ends and for new rows. Nothing is stored behind an end: no tails
        either, because tails keep the rows before them. New rows are stored for tails that follow.
        Segments need no tails.
        """
        is_new = entry.state is EntryState.STORING
        return self._geometry.needs_tails and not entry.key_space and not is_new

    def _is_orphan(self, tails: Entry) -> bool:
        """Whether the rows before tails are gone."""
        if not self._geometry.needs_rows:
            return False
        return self._index.present(Kind.ROWS, tails.key) is None

    def _put(self, place: int, entry: Entry) -> None:
        self._ends[place] = entry
        self._places[entry] = place

    def _discard(self, place: int) -> None:
        del self._places[self._ends[place]]
        last = self._ends.pop()
        if place < len(self._ends):
            self._put(place, last)
