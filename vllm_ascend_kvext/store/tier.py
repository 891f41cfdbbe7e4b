# SPDX-License-Identifier: Apache-2.0
"""The host tier of one engine, as the scheduler side of a connector uses it.

A request, from its admission on::

    use = tier.next_use()
    hit = tier.look_up(prefix, limit_tokens, after_tokens)      what can be loaded
    load = tier.begin_load(prefix, boundary, entries, use)      pins it
    tier.end_load(load, unreadable)                             once no worker reads it any more

    for piece in tier.lookup(prefix).missing_pieces(first, end):    what it has computed
        entry = tier.begin_store(prefix, piece, num_bytes, use)     or a Refusal
        tier.finish_store(entry, row_map)                       or fail_store, once no worker writes

Every call is synchronous, and the same calls lead to the same offsets: all workers are handed the
same ones. Moves no bytes; does not know what a worker is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.counters import Refusal, Removal, TierCounters
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Load, Piece
from vllm_ascend_kvext.store.eviction import EvictionOrder
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.lookup import Hit, Lookup, Lost, Shortfall
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.reuse import Reuse

OnRemoved = Callable[[Entry, Removal], None]

_SHORTFALLS = {
    Removal.EVICTED: Shortfall.EVICTED,
    Removal.LOAD_FAILED: Shortfall.FAILED,
}
"""What a later lookup says of the keys; nothing is said of others."""


class HostTier:
    """What one host buffer holds.

    Args:
        remembered_keys: Of how many keys of each kind it is known that they were evicted or failed,
            and of how many chunks when they were asked for.
        on_removed: Told of every entry that was stored and is not there any more.
        evicts_ends_first: Whether rows stay as long as rows or tails behind them do: where a load
            stops at the first gap, nothing can reach these.
        spare_bytes: What every place has behind the bytes of its entry, for whoever shares them.

    Raises:
        TierError: If the capacity is too small to hold anything.
    """

    def __init__(
        self,
        capacity_bytes: int,
        geometry: TierGeometry,
        remembered_keys: int = 1 << 16,
        on_removed: OnRemoved | None = None,
        evicts_ends_first: bool = True,
        spare_bytes: int = 0,
    ) -> None:
        self.geometry = geometry
        self.counters = TierCounters()
        self._arena = Arena(capacity_bytes, spare_bytes)
        self.capacity_bytes = self._arena.capacity_bytes
        self._index = Index()
        self._reuse = Reuse(remembered_keys)
        self._order = EvictionOrder(
            self._arena, self._index, geometry, self._reuse, evicts_ends_first
        )
        self._lost: dict[Kind, Lost] = {kind: Lost(remembered_keys) for kind in Kind}
        self._entries: dict[int, Entry] = {}
        self._on_removed = on_removed
        self._latest_use = 0
        self._num_entries = 0

    def next_use(self) -> int:
        """A moment, later than those before, by which ages are told.

        A request takes one when it is admitted, and another when it ends.
        """
        self._latest_use += 1
        return self._latest_use

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        """A request has ended. Call it once, before what it leaves is stored.

        Args:
            prompt_tokens: Length of the prompt, which it asked for.
            end_tokens: Up to where there are keys, and its answer may be asked for.
        """
        unit_tokens = self.geometry.unit_tokens
        chunk_tokens = self.geometry.chunk_tokens
        # A chunk is known by its first unit, however many of its tokens there are.
        keys = prefix.keys_at(range(unit_tokens, end_tokens + 1, chunk_tokens))
        num_asked = len(range(unit_tokens, prompt_tokens + 1, chunk_tokens))
        self._reuse.note_ended(keys[:num_asked], keys[num_asked:], self._latest_use)

    # Loads.

    def look_up(self, prefix: Prefix, limit_tokens: int, after_tokens: int = 0) -> Hit:
        """The last boundary within a limit at which a request can resume; changes nothing."""
        return self.lookup(prefix).find_hit(self._lost, limit_tokens, after_tokens)

    def lookup(self, prefix: Prefix) -> Lookup:
        """Finds all that is stored of a prefix, with gaps between; changes nothing."""
        return Lookup(self._index, self.geometry, prefix)

    def begin_load(
        self, prefix: Prefix, boundary_tokens: int, entries: tuple[Entry, ...], use: int
    ) -> Load | None:
        """Pin what was found. None, and nothing is pinned, if some of it is not there any more.

        Args:
            boundary_tokens: Where the request resumes: its rows up to there are renewed.
            use: That of the request's admission.
        """
        if not all(entry.state is EntryState.STORED for entry in entries):
            return None
        self.renew(prefix, boundary_tokens, use)
        for entry in entries:
            entry.num_pins += 1
            entry.use = max(entry.use, use)
        return Load(entries)

    def end_load(self, load: Load, unreadable: Collection[Entry] = ()) -> None:
        """A load is over on all workers, or was not needed: its entries may go.

        Args:
            unreadable: Entries that a worker could not read: they are not offered again.

        Raises:
            TierError: If it has ended before.
        """
        if load.has_ended:
            raise TierError(
                f"host tier: this load of {len(load.entries)} entries has ended before; end each "
                "load once, when the last worker is done"
            )
        load.has_ended = True
        self.counters.failed_loads += bool(unreadable)
        for entry in load.entries:
            has_failed = entry in unreadable
            entry.num_pins -= 1
            if entry.state is EntryState.LEAVING:
                self._release_if_idle(entry)
            elif has_failed:
                self._remove(entry, Removal.LOAD_FAILED)
            else:
                self._order.add(entry)

    def renew(self, prefix: Prefix, upto_tokens: int, use: int) -> None:
        """Rows of a prefix are of use, even if the device has them and nothing is loaded.

        Walks back until it finds rows that were renewed at this moment or later; what lies before
        them was, too.
        """
        if not self.geometry.needs_rows:
            return
        boundary = self.geometry.floor(min(upto_tokens, prefix.num_tokens))
        for _, entry in self.lookup(prefix).walk_back(0, boundary, with_storing=True):
            if entry.use >= use:
                return
            entry.use = use

    # Stores.

    def present_tokens(self, prefix: Prefix, limit_tokens: int) -> int:
        """Up to which boundary the rows of a prefix are there, those being stored included."""
        if not self.geometry.needs_rows:
            return 0
        return self.lookup(prefix).first_run(limit_tokens, 0, with_storing=True).end_tokens

    def begin_store(
        self,
        prefix: Prefix,
        piece: Piece,
        num_bytes: int,
        use: int,
        standing: Callable[[Entry], int] = lambda _: 0,
    ) -> Entry | Refusal:
        """Take a place for a piece of a prefix. Renews the rows before it, so that they stay.

        Args:
            prefix: Has keys up to the piece's end.
            piece: Rows within one chunk, or tails.
            num_bytes: What they take in host memory, more than 0.
            use: The latest use by the request.
            standing: See `EvictionOrder.choose`.

        Returns:
            The entry, whose place begins at ``offset_bytes``; or why there is none. Nothing is
            evicted for a refusal.

        Raises:
            TierError: If a piece is not cut at units, or reaches into a second chunk.
        """
        keys = self.lookup(prefix).keys_of(piece)
        refusal = self._why_not_needed(piece, keys[-1])
        place_bytes = self._arena.place_bytes(num_bytes)
        if refusal is None and place_bytes > self.capacity_bytes:
            refusal = Refusal.NO_ROOM
        if refusal is not None:
            self.counters.refused_stores[refusal] += 1
            return refusal
        chunk_first = self.geometry.chunk_start(piece.end_tokens)
        needs_before = self.geometry.needs_rows and piece.first_tokens
        entry = Entry(
            self._num_entries,
            piece,
            keys,
            -1,  # It has no place yet.
            place_bytes,
            use,
            chunk_key=prefix.key_at(chunk_first + self.geometry.unit_tokens),
            key_before=prefix.key_at(piece.first_tokens) if needs_before else None,
        )
        self._order.begin(entry)
        refusal = self._make_room(prefix, entry, standing)
        if refusal is not None:
            self._order.forget(entry)
            self.counters.refused_stores[refusal] += 1
            return refusal
        offset_bytes = self._arena.allocate(entry.num_bytes)
        assert offset_bytes is not None
        entry.offset_bytes = offset_bytes
        self._num_entries += 1
        self._entries[offset_bytes] = entry
        self._index.begin(entry)
        self._count_held()
        return entry

    def finish_store(self, entry: Entry, row_map: Any = None) -> bool:
        """The bytes are in place, on all workers; loads are planned against the row map.

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

    def fail_store(self, entry: Entry, is_own: bool = True) -> None:
        """A store has ended, on all workers, and what it wrote is worth nothing.

        Without ``is_own`` none has failed: what was to come from elsewhere did not.

        Raises:
            TierError: If it is not being stored.
        """
        if self._end_store(entry):
            self._leave(entry, Shortfall.FAILED if is_own else None)
        self.counters.failed_stores += is_own

    def abandon_store(self, entry: Entry) -> None:
        """Nobody finds an entry any more that is being stored, and may be for ever.

        Its place is held until its store ends: until then something may write there.
        """
        if entry.state is EntryState.STORING:
            self._leave(entry)

    def pin(self, entry: Entry) -> Load | None:
        """Keep an entry until `end_load`, and renew nothing; None if it is not stored."""
        if entry.state is not EntryState.STORED:
            return None
        entry.num_pins += 1
        return Load((entry,))

    def evict(self, is_chosen: Callable[[Entry], bool]) -> None:
        """Entries that the caller chooses give way, for none other; none that a transfer uses."""
        for entry in list(self._entries.values()):
            if entry.is_evictable and is_chosen(entry):
                self._remove(entry, Removal.EVICTED)

    def clear(self) -> None:
        """Forget everything. Places that a transfer uses are held until it ends."""
        for entry in list(self._entries.values()):
            if entry.state is EntryState.STORED:
                self._remove(entry, Removal.CLEARED)
            elif entry.state is EntryState.STORING:
                self._leave(entry)
        for lost in self._lost.values():
            lost.clear()
        self._reuse.clear()

    def _why_not_needed(self, piece: Piece, key: bytes) -> Refusal | None:
        for find, refusal in (
            (self._index.stored, Refusal.ALREADY_STORED),
            (self._index.storing, Refusal.BEING_STORED),
        ):
            found = find(piece.kind, key)
            if found is not None and found.piece.first_tokens <= piece.first_tokens:
                return refusal
        return None

    def _make_room(
        self, prefix: Prefix, entry: Entry, standing: Callable[[Entry], int]
    ) -> Refusal | None:
        """Evict what is worth less, unless there is a gap; nothing if that is not enough."""
        self.renew(prefix, entry.piece.end_tokens, entry.use)
        if entry.num_bytes <= self._arena.largest_gap_bytes:
            return None
        chosen = self._order.choose(self._entries, entry, self._latest_use, standing)
        if isinstance(chosen, Refusal):
            return chosen
        for victim in chosen:
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
        self._order.forget(entry)
        lost_keys = self._index.drop(entry)
        entry.state = EntryState.LEAVING
        if shortfall is not None:
            for key in lost_keys:
                self._lost[kind].put(key, shortfall)
        self._release_if_idle(entry)

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
