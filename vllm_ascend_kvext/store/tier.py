# SPDX-License-Identifier: Apache-2.0
"""The host tier of one engine. The scheduler side of a connector uses it.

The calls for a request, from its admission on::

    use = tier.next_use()
    hit = tier.look_up(prefix, limit_tokens, after_tokens)      what can be loaded
    load = tier.begin_load(prefix, boundary, entries, use)      pins the entries
    tier.end_load(load, unreadable)                             when no worker reads them any more

    for piece in tier.lookup(prefix).missing_pieces(first, end):    pieces that it has computed
        entry = tier.begin_store(prefix, piece, num_bytes, use)     or a Refusal
        tier.finish_store(entry, row_map)                       or fail_store, when no worker writes

Every call is synchronous. The same calls lead to the same offsets, so all workers can use the same
offsets. The tier moves no bytes, and does not know what a worker is.
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
"""The shortfall that a later lookup reports after a removal. Other removals are not reported."""


class HostTier:
    """The entries of one host buffer.

    Args:
        capacity_bytes: The size of the host buffer.
        geometry: Where prefixes are cut.
        remembered_keys: How many evicted or failed keys of each kind are remembered, and how many
            chunks `Reuse` knows.
        on_removed: Called for every stored entry that is removed.
        evicts_ends_first: Whether rows stay as long as rows or tails behind them stay. If a load
            stops at the first gap, it could not reach what lies behind evicted rows.
        spare_bytes: Additional bytes at the end of every place, for a shared tier.

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
        """A new point in time, later than all before. Ages are differences of such points.

        A request takes a point when it is admitted, and another point when it ends.
        """
        self._latest_use += 1
        return self._latest_use

    def note_ended(self, prefix: Prefix, prompt_tokens: int, end_tokens: int) -> None:
        """Note that a request has ended. Call it once, before its remaining pieces are stored.

        Args:
            prefix: The tokens of the request.
            prompt_tokens: The length of its prompt.
            end_tokens: The end of its tokens that have keys. These tokens include its answer.
        """
        unit_tokens = self.geometry.unit_tokens
        chunk_tokens = self.geometry.chunk_tokens
        # A chunk is identified by the key of its first unit, even if the tokens end within the
        # chunk.
        keys = prefix.keys_at(range(unit_tokens, end_tokens + 1, chunk_tokens))
        num_asked = len(range(unit_tokens, prompt_tokens + 1, chunk_tokens))
        self._reuse.note_ended(keys[:num_asked], keys[num_asked:], self._latest_use)

    # Loads.

    def look_up(self, prefix: Prefix, limit_tokens: int, after_tokens: int = 0) -> Hit:
        """Find the last boundary within a limit at which a request can resume. Changes nothing."""
        return self.lookup(prefix).find_hit(self._lost, limit_tokens, after_tokens)

    def lookup(self, prefix: Prefix) -> Lookup:
        """The lookup of a prefix, which also finds what is stored behind gaps. Changes nothing."""
        return Lookup(self._index, self.geometry, prefix)

    def begin_load(
        self, prefix: Prefix, boundary_tokens: int, entries: tuple[Entry, ...], use: int
    ) -> Load | None:
        """Pin the entries of a load.

        Args:
            prefix: The tokens of the request.
            boundary_tokens: Where the request resumes. Its rows up to this boundary are renewed.
            entries: The entries that were found.
            use: The use of the request's admission.

        Returns:
            The load; None, with nothing pinned, if one of the entries is not stored any more.
        """
        if not all(entry.state is EntryState.STORED for entry in entries):
            return None
        self.renew(prefix, boundary_tokens, use)
        for entry in entries:
            entry.num_pins += 1
            entry.use = max(entry.use, use)
        return Load(entries)

    def end_load(self, load: Load, unreadable: Collection[Entry] = ()) -> None:
        """Unpin the entries of a load that has ended on all workers, or that was not needed.

        Args:
            load: The load.
            unreadable: Entries that a worker could not read. They are removed.

        Raises:
            TierError: If the load has ended before.
        """
        if load.has_ended:
            raise TierError(
                f"host tier: this load of {len(load.entries)} entries has ended before; end each "
                "load once, when the last worker is done"
            )
        load.has_ended = True
        if unreadable:
            self.counters.failed_loads += 1
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
        """Mark the rows of a prefix as used, even if the device has them and nothing is loaded.

        The method walks back until it finds rows that were renewed at this use or later. The rows
        before them were renewed then, too.
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
        """The boundary up to which the rows of a prefix are stored or being stored."""
        if not self.geometry.needs_rows:
            return 0
        return self.lookup(prefix).first_run(limit_tokens, 0, with_storing=True).end_tokens

    def begin_store(
        self,
        prefix: Prefix,
        piece: Piece,
        num_bytes: int,
        use: int,
        preference: Callable[[Entry], int] = lambda _: 0,
    ) -> Entry | Refusal:
        """Take a place for a piece of a prefix. The rows before it are renewed, so that they stay.

        Args:
            prefix: A prefix with keys up to the end of the piece.
            piece: Rows within one chunk, or tails.
            num_bytes: The bytes of the piece in host memory, more than 0.
            use: The latest use by the request.
            preference: See `EvictionOrder.choose`.

        Returns:
            The entry, whose place begins at ``offset_bytes``, or the reason why there is none. A
            refusal evicts nothing.

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
            -1,  # The entry has no place yet.
            place_bytes,
            use,
            chunk_key=prefix.key_at(chunk_first + self.geometry.unit_tokens),
            key_before=prefix.key_at(piece.first_tokens) if needs_before else None,
            key_space=prefix.key_space,
        )
        self._order.begin(entry)
        refusal = self._make_room(prefix, entry, preference)
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
        """End a store whose bytes are in place on all workers.

        Args:
            entry: The entry.
            row_map: The rows of the entry. Loads are planned against it.

        Returns:
            Whether the entry can be found. It cannot if the tier was cleared meanwhile, or if
            longer entries have all its rows.

        Raises:
            TierError: If the entry is not being stored.
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
        """End a store that has ended on all workers, and whose bytes cannot be used.

        Args:
            entry: The entry.
            is_own: Whether a store of this engine has failed. Otherwise a shared tier did not
                deliver the entry, which does not count as a failed store.

        Raises:
            TierError: If the entry is not being stored.
        """
        if self._end_store(entry):
            self._leave(entry, Shortfall.FAILED if is_own else None)
        if is_own:
            self.counters.failed_stores += 1

    def abandon_store(self, entry: Entry) -> None:
        """Forget an entry that is being stored. Its store may never end.

        No lookup finds the entry any more. Its place is held until its store ends, because bytes
        may be written there until then.
        """
        if entry.state is EntryState.STORING:
            self._leave(entry)

    def pin(self, entry: Entry) -> Load | None:
        """Pin an entry until `end_load` without renewing rows; None if it is not stored."""
        if entry.state is not EntryState.STORED:
            return None
        entry.num_pins += 1
        return Load((entry,))

    def evict(self, is_chosen: Callable[[Entry], bool]) -> None:
        """Evict the entries that the caller chooses. Entries that a transfer uses stay."""
        for entry in list(self._entries.values()):
            if entry.is_evictable and is_chosen(entry):
                self._remove(entry, Removal.EVICTED)

    def clear(self) -> None:
        """Forget everything. A place that a transfer uses is held until the transfer ends."""
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
        self, prefix: Prefix, entry: Entry, preference: Callable[[Entry], int]
    ) -> Refusal | None:
        """Evict entries of lower priority if there is no gap. If that is not enough, evict none."""
        self.renew(prefix, entry.piece.end_tokens, entry.use)
        if entry.num_bytes <= self._arena.largest_gap_bytes:
            return None
        chosen = self._order.choose(self._entries, entry, self._latest_use, preference)
        if isinstance(chosen, Refusal):
            return chosen
        for victim in chosen:
            self._remove(victim, Removal.EVICTED)
        return None

    def _end_store(self, entry: Entry) -> bool:
        """End the writing of an entry. Returns whether the entry is still wanted.

        The place of an unwanted entry is released.
        """
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
        """Remove an entry that was stored."""
        self.counters.removed_entries[removal] += 1
        self.counters.removed_bytes[removal] += entry.num_bytes
        self._leave(entry, _SHORTFALLS.get(removal))
        if is_known and self._on_removed is not None:
            self._on_removed(entry, removal)

    def _leave(self, entry: Entry, shortfall: Shortfall | None = None) -> None:
        """Hide an entry from lookups. Its place is held until its last transfer ends."""
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
