# SPDX-License-Identifier: Apache-2.0
"""The host tier of one engine, as the scheduler side of a connector uses it.

A request, from its admission on::

    use = tier.next_use()
    hit = tier.look_up(prefix, limit_tokens, after_tokens)      what can be loaded
    load = tier.begin_load(hit, use)                            pins it
    tier.end_load(load, outcome)                                once no worker reads it any more

    for piece in tier.missing_pieces(prefix, first, end):       what it has computed
        entry = tier.begin_store(prefix, piece, num_bytes, use)     or a Refusal
        tier.finish_store(entry, row_map)                       or fail_store, once no worker writes

Every call is synchronous, and the same calls lead to the same offsets: all workers are handed the
same ones. Moves no bytes; does not know what a worker is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.counters import Refusal, Removal, TierCounters
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.eviction import EvictionOrder
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.loads import Load, LoadOutcome
from vllm_ascend_kvext.store.lookup import Hit, Lost, Shortfall, find_hit
from vllm_ascend_kvext.store.pieces import keys_of, missing_pieces, present_tokens
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.protected_share import ProtectedShare
from vllm_ascend_kvext.store.reuse import Reuse
from vllm_ascend_kvext.store.runs import StoredRun, find_all_tails, find_runs
from vllm_ascend_kvext.store.worth import EvictionRule, LatestUse, WorthRule

_NOWHERE = -1
"""In place of an offset."""

OnRemoved = Callable[[Entry, Removal], None]

_SHORTFALLS = {
    Removal.EVICTED: Shortfall.EVICTED,
    Removal.LOAD_FAILED: Shortfall.FAILED,
}
"""What a later lookup says of the keys; nothing is said of others."""


class HostTier:
    """What one host buffer holds.

    Args:
        capacity_bytes: Size of the buffer.
        geometry: Where prefixes are cut, and what a resume needs.
        protected_share: Of the capacity: what entries that were loaded may take and still give way
            last, to begin with; see that module. From 0 to 1.
        remembered_keys: Of how many keys of each kind it is known that they were evicted or failed.
        on_removed: Told of every entry that was stored and is not there any more.
        eviction: What gives way first.

    Raises:
        ArenaError: If the capacity is too small to hold anything.
        TierError: If the share is not from 0 to 1.

    Attributes:
        geometry: As given.
        counters: See `TierCounters`.
    """

    def __init__(
        self,
        capacity_bytes: int,
        geometry: TierGeometry,
        protected_share: float = 0.75,
        remembered_keys: int = 1 << 16,
        on_removed: OnRemoved | None = None,
        eviction: EvictionRule = EvictionRule.LATEST_USE,
    ) -> None:
        if not 0 <= protected_share <= 1:
            raise TierError(
                f"host tier: expected a protected share from 0 to 1, found {protected_share}; "
                "0.75 is the default"
            )
        self.geometry = geometry
        self.counters = TierCounters()
        self._arena = Arena(capacity_bytes)
        self._index = Index()
        self._rule: WorthRule
        if eviction is EvictionRule.REUSE:
            self._rule = Reuse(self._index, geometry, self.capacity_bytes, remembered_keys)
        else:
            self._rule = LatestUse(self._index, geometry)
        share = ProtectedShare(self.capacity_bytes, protected_share)
        self._order = EvictionOrder(share, self._rule)
        self._lost: dict[Kind, Lost] = {kind: Lost(remembered_keys) for kind in Kind}
        self._entries: dict[int, Entry] = {}
        self._on_removed = on_removed
        self._latest_use = 0
        self._num_entries = 0

    @property
    def capacity_bytes(self) -> int:
        return self._arena.capacity_bytes

    def next_use(self) -> int:
        """A moment, later than those before: what is used at one gives way after what is older.

        A request takes one when it is admitted, and another when it ends.
        """
        self._latest_use += 1
        return self._latest_use

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        """A request has ended. Call it once, before what it leaves is stored.

        Args:
            prefix: Of the request.
            prompt_tokens: What it asked for.
            end_tokens: Up to where there are keys, and its answer may be asked for.
        """
        self._rule.note_ended(prefix, prompt_tokens, end_tokens)

    # Loads.

    def look_up(self, prefix: Prefix, limit_tokens: int, after_tokens: int = 0) -> Hit:
        """The last boundary within a limit at which a request can resume; changes nothing.

        Args:
            prefix: Of the request.
            limit_tokens: The boundary is no later.
            after_tokens: What the device has already.
        """
        return find_hit(self._index, self._lost, self.geometry, prefix, limit_tokens, after_tokens)

    def find_runs(
        self, prefix: Prefix, limit_tokens: int, after_tokens: int = 0
    ) -> list[StoredRun]:
        """All stored rows in a range, with gaps between them; changes nothing. See ``runs``."""
        return find_runs(self._index, self.geometry, prefix, limit_tokens, after_tokens)

    def find_all_tails(
        self, prefix: Prefix, limit_tokens: int, after_tokens: int = 0
    ) -> list[Entry]:
        """All stored tails of a range of boundaries, ascending; changes nothing. See ``runs``."""
        return find_all_tails(self._index, self.geometry, prefix, limit_tokens, after_tokens)

    def begin_load(self, hit: Hit, use: int) -> Load | None:
        """Pin what was found. None, and nothing is pinned, if some of it is not there any more.

        Args:
            hit: Of a lookup.
            use: Of the request.
        """
        entries = hit.all_entries
        if not all(entry.state is EntryState.STORED for entry in entries):
            return None
        self.renew(hit.prefix, hit.boundary_tokens, use)
        for entry in entries:
            entry.num_pins += 1
            entry.use = max(entry.use, use)
        return Load(entries, frozenset(hit.prefix_entries), hit.left_out)

    def end_load(
        self,
        load: Load,
        outcome: LoadOutcome = LoadOutcome.LOADED,
        unreadable: Collection[Entry] | None = None,
    ) -> None:
        """A load is over on all workers: its entries may go.

        Args:
            load: Of `begin_load`.
            outcome: How it ended.
            unreadable: Entries that are not offered again; by default all of them if it FAILED,
                and none else.

        Raises:
            TierError: If it has ended before.
        """
        if load.has_ended:
            raise TierError(
                f"host tier: this load of {len(load.entries)} entries has ended before; end each "
                "load once, when the last worker is done"
            )
        load.has_ended = True
        if unreadable is None:
            unreadable = load.entries if outcome is LoadOutcome.FAILED else ()
        self.counters.failed_loads += outcome is LoadOutcome.FAILED or bool(unreadable)
        for entry in load.entries:
            has_failed = entry in unreadable
            entry.num_pins -= 1
            if outcome is LoadOutcome.LOADED and not has_failed:
                self.counters.hit_entries[entry.piece.kind] += 1
                self.counters.hit_bytes[entry.piece.kind] += entry.num_bytes
                entry.was_loaded = True
                entry.was_hit = entry in load.hits
                if entry.was_hit:
                    self._order.note_hit(entry)
            if entry.state is EntryState.LEAVING:
                self._release_if_idle(entry)
            elif has_failed:
                self._remove(entry, Removal.LOAD_FAILED)
            else:
                self._order.add(entry)
        for entry in load.left_out if outcome is LoadOutcome.LOADED else ():
            if entry.state is EntryState.STORED:
                entry.was_hit = True
                self._order.note_hit(entry)
                self._order.add(entry)
        self._order.shrink_hits()

    def renew(self, prefix: Prefix, upto_tokens: int, use: int) -> None:
        """Rows of a prefix are of use, even if the device has them and nothing is loaded.

        Walks back until it finds rows that were renewed at this moment or later; what lies before
        them was, too.
        """
        if not self.geometry.needs_rows:
            return
        boundary = self.geometry.floor(min(upto_tokens, prefix.num_tokens))
        while boundary > 0:
            entry = self._index.present(Kind.ROWS, prefix.key_at(boundary))
            if entry is None:
                boundary = self._present_before(prefix, boundary)
                continue
            if entry.use >= use:
                break
            entry.use = use
            boundary = entry.piece.first_tokens

    def _present_before(self, prefix: Prefix, boundary_tokens: int) -> int:
        """The last boundary of the same chunk whose rows are there, or where the chunk begins."""
        unit_tokens = self.geometry.unit_tokens
        first_tokens = self.geometry.chunk_start(boundary_tokens)
        keys = prefix.keys_at(range(first_tokens + unit_tokens, boundary_tokens, unit_tokens))
        return first_tokens + unit_tokens * self._index.upto_present(Kind.ROWS, keys)

    def count_shortfall(self, shortfall: Shortfall | None) -> None:
        """Count why a request did not load more; once for each request."""
        if shortfall is not None:
            self.counters.shortfalls[shortfall] += 1

    # Stores.

    def count_refusal(self, refusal: Refusal) -> None:
        """Count a store that the tier was not asked for."""
        self.counters.refused_stores[refusal] += 1

    def missing_pieces(self, prefix: Prefix, first_tokens: int, end_tokens: int) -> list[Piece]:
        """What to store so that rows can be read up to a boundary; see ``pieces``."""
        if not self.geometry.needs_rows:
            return []
        return missing_pieces(self._index, self.geometry, prefix, first_tokens, end_tokens)

    def present_tokens(self, prefix: Prefix, limit_tokens: int) -> int:
        """Up to which boundary the rows of a prefix are there, those being stored included."""
        if not self.geometry.needs_rows:
            return 0
        return present_tokens(self._index, self.geometry, prefix, limit_tokens)

    def begin_store(
        self, prefix: Prefix, piece: Piece, num_bytes: int, use: int
    ) -> Entry | Refusal:
        """Take a place for a piece of a prefix. Renews the rows before it, so that they stay.

        Args:
            prefix: Has keys up to the piece's end.
            piece: Rows within one chunk, or tails.
            num_bytes: What they take in host memory.
            use: Of the request.

        Returns:
            The entry, whose place begins at ``offset_bytes``; or why there is none. Nothing is
            evicted for a refusal.

        Raises:
            TierError: If a piece is not cut at units, or reaches into a second chunk.
            ArenaError: If the size is not positive.
        """
        keys = keys_of(self.geometry, prefix, piece)
        refusal = self._why_not_needed(piece, keys[-1])
        if refusal is None and num_bytes > self.capacity_bytes:
            refusal = Refusal.NO_ROOM
        if refusal is not None:
            self.counters.refused_stores[refusal] += 1
            return refusal
        entry = Entry(
            self._num_entries, piece, keys, _NOWHERE, self._arena.place_bytes(num_bytes), use
        )
        self._rule.note_wanted(entry, prefix)
        self._order.share.note_wanted(entry)
        self._order.shrink_hits()
        refusal = self._make_room(prefix, entry)
        if refusal is not None:
            self.counters.refused_stores[refusal] += 1
            return refusal
        offset_bytes = self._arena.allocate(entry.num_bytes)
        assert offset_bytes is not None
        entry.offset_bytes = offset_bytes
        self._num_entries += 1
        self._entries[offset_bytes] = entry
        self._index.begin(entry)
        self._add_tails_of(entry.keys, piece.kind)  # they have their rows back
        self._count_held()
        return entry

    def finish_store(self, entry: Entry, row_map: Any = None) -> bool:
        """The bytes are in place, on all workers.

        Args:
            entry: Of `begin_store`.
            row_map: What loads are planned against.

        Returns:
            Whether it can be found; not if the tier was cleared meanwhile, or if longer pieces of
            the same rows were stored.

        Raises:
            TierError: If it is not being stored.
        """
        if not self._end_store(entry):
            return False
        kind = entry.piece.kind
        entry.row_map = row_map
        self.counters.stored_entries[kind] += 1
        self.counters.stored_bytes[kind] += entry.num_bytes
        for useless in self._index.settle(entry):
            self._remove(useless, Removal.REPLACED, is_known=useless is not entry)
        self._order.add(entry)
        return entry.state is EntryState.STORED

    def fail_store(self, entry: Entry) -> None:
        """A store has ended, on all workers, and what it wrote is worth nothing.

        Raises:
            TierError: If it is not being stored.
        """
        is_wanted = self._end_store(entry)
        self.counters.failed_stores += 1
        if is_wanted:
            self._leave(entry, Shortfall.FAILED)

    def clear(self) -> None:
        """Forget everything. Places that a transfer uses are held until it ends."""
        for entry in list(self._entries.values()):
            if entry.state is EntryState.STORED:
                self._remove(entry, Removal.CLEARED)
            elif entry.state is EntryState.STORING:
                self._leave(entry)
        for lost in self._lost.values():
            lost.clear()
        self._rule.clear()
        self._order.share.clear()

    def _why_not_needed(self, piece: Piece, key: bytes) -> Refusal | None:
        stored = self._index.stored(piece.kind, key)
        if stored is not None and stored.piece.first_tokens <= piece.first_tokens:
            return Refusal.ALREADY_STORED
        storing = self._index.storing(piece.kind, key)
        if storing is not None and storing.piece.first_tokens <= piece.first_tokens:
            return Refusal.BEING_STORED
        return None

    def _make_room(self, prefix: Prefix, entry: Entry) -> Refusal | None:
        """Evict what is worth less, unless there is a hole; nothing if that is not enough."""
        self.renew(prefix, entry.piece.end_tokens, entry.use)
        if entry.num_bytes <= self._arena.largest_hole_bytes:
            return None
        worth = self._rule.worth_of(entry)
        choice = self._order.choose(self._arena, self._entries, entry.num_bytes, worth)
        if choice.victims is None:
            return Refusal.WORTH_LESS if choice.is_outbid else Refusal.NO_ROOM
        for spared in choice.spared:
            spared.num_spared += 1
        for victim in choice.victims:
            self._order.share.note_evicted(victim)
            self._remove(victim, Removal.EVICTED)
        return None

    def _end_store(self, entry: Entry) -> bool:
        """Whether the entry is still wanted; if not, its place is released."""
        if self._entries.get(entry.offset_bytes) is not entry or not entry.is_being_written:
            raise TierError(
                f"host tier: expected an entry of this tier that is being stored, found {entry}; "
                "end each store once, when the last worker is done"
            )
        entry.is_being_written = False
        if entry.state is EntryState.STORING:
            return True
        self._release_if_idle(entry)
        return False

    def _remove(self, entry: Entry, removal: Removal, is_known: bool = True) -> None:
        """An entry that was stored is not there any more."""
        self.counters.removed_entries[removal] += 1
        self.counters.removed_bytes[removal] += entry.num_bytes
        self._leave(entry, _SHORTFALLS.get(removal))
        if is_known and self._on_removed is not None:
            self._on_removed(entry, removal)

    def _leave(self, entry: Entry, shortfall: Shortfall | None = None) -> None:
        """Nobody finds the entry any more; its place is held until its last transfer ends."""
        kind = entry.piece.kind
        if entry.state is EntryState.STORED:
            self._order.forget(entry)
        lost_keys = self._index.drop(entry)
        entry.state = EntryState.LEAVING
        if shortfall is not None:
            for key in lost_keys:
                self._lost[kind].put(key, shortfall)
        self._add_tails_of(lost_keys, kind)  # worth less without its rows
        self._release_if_idle(entry)

    def _add_tails_of(self, keys: Iterable[bytes], kind: Kind) -> None:
        """Rows before some boundaries come or go: that changes the rank of tails at them."""
        for key in keys if kind is Kind.ROWS else ():
            tails = self._index.stored(Kind.TAILS, key)
            if tails is not None:
                self._order.add(tails)

    def _release_if_idle(self, entry: Entry) -> None:
        if entry.num_pins or entry.is_being_written:
            return
        entry.state = EntryState.GONE
        entry.row_map = None
        del self._entries[entry.offset_bytes]
        self._arena.free(entry.offset_bytes)
        self._count_held()

    def _count_held(self) -> None:
        self.counters.entries_held = len(self._entries)
        self.counters.bytes_held = self._arena.used_bytes
