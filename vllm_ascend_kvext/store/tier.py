# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The host tier of one engine. The scheduler side of a connector uses it.

The calls for a request, from its admission on::

    hit = tier.look_up(prefix, limit_tokens, after_tokens)      what can be loaded
    load = tier.begin_load(prefix, boundary, entries, tier.next_use())      pins the entries
    tier.end_load(load, unreadable)                             when no worker reads them any more

    use = tier.note_admitted(prefix, prompt_tokens)             it begins to compute
    for piece in tier.lookup(prefix).missing_pieces(first, end):    pieces that it has computed
        entries = tier.begin_rows(prefix, piece, use)           or a Refusal
        tier.finish_store(entry, row_map)                       or fail_store, when no worker writes
    tails = tier.tails_to_store(prefix, boundary, max_tokens)   whole, or continuing others
    entry = tier.begin_store(prefix, tails, num_bytes, use)     needs one gap

    use = tier.next_use()                                       it has ended
    tier.note_ended(prefix, prompt_tokens, end_tokens)          its last pieces are stored behind
    tier.note_stopped(prefix, end_tokens)                       or it was aborted or preempted

Every call is synchronous. The same calls lead to the same offsets, so all workers can use the same
offsets. The tier moves no bytes, and does not know what a worker is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import Any, Protocol

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.counters import Refusal, Removal, TierCounters
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Load, Piece
from vllm_ascend_kvext.store.eviction import USELESS, EvictionOrder, Priority
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.lookup import Hit, Lookup, Lost, Shortfall
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.recency import Recency
from vllm_ascend_kvext.store.resumes import ENDS_OF_TURNS, Resumes, TailOrigin
from vllm_ascend_kvext.store.reuse import NUM_CHUNK_ORIGINS, Reuse

OnRemoved = Callable[[Entry, Removal], None]
OnRowsLost = Callable[[Sequence[bytes]], None]


class PieceLayout(Protocol):
    """How rows lie in host memory. A piece lies there cut by cut."""

    def num_bytes(self, piece: Piece) -> int:
        """The bytes of a piece."""

    def rows_within(self, row_map: Any, first_tokens: int, end_tokens: int) -> Any:
        """The rows of a row map within a range of tokens."""


_MAX_REMEMBERED = 4096
"""The number of ranges of rows whose sizes are cached. Prompts are cut at the same tokens."""

MAX_CHAIN = 4
"""The most tails that are read together. Each of them costs a load one more section per group."""

MAX_CONTINUED_SHARE = 3 / 4
"""Tails continue others only if they then take at most this share of their bytes."""

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
        on_rows_lost: Called with the keys of the units that no stored entry of rows has any more,
            whether the whole entry was removed or a part of it.
        spare_bytes: Additional bytes at the end of every place, for a shared tier.
        layout: How rows lie in host memory. `begin_rows` needs it.

    Raises:
        TierError: If the capacity is too small to hold anything.
    """

    def __init__(
        self,
        capacity_bytes: int,
        geometry: TierGeometry,
        remembered_keys: int = 1 << 16,
        on_removed: OnRemoved | None = None,
        on_rows_lost: OnRowsLost | None = None,
        spare_bytes: int = 0,
        layout: PieceLayout | None = None,
    ) -> None:
        self.geometry = geometry
        self.counters = TierCounters()
        self._arena = Arena(capacity_bytes, spare_bytes)
        self.capacity_bytes = self._arena.capacity_bytes
        self._index = Index()
        self._remembered_keys = remembered_keys
        self._reuse = Reuse(remembered_keys, NUM_CHUNK_ORIGINS)
        self._resumes = Resumes(remembered_keys)
        self._order = EvictionOrder(self._arena, self._index, geometry, self._reuse, self._resumes)
        self._lost: dict[Kind, Lost] = {kind: Lost(remembered_keys) for kind in Kind}
        self._entries: dict[int, Entry] = {}
        self._on_removed = on_removed
        self._on_rows_lost = on_rows_lost
        self._layout = layout
        self._rows_bytes = lru_cache(_MAX_REMEMBERED)(self._rows_place_bytes)
        self._latest_use = 0
        self._num_entries = 0
        self.forget_sizes()

    @property
    def num_tokens(self) -> int:
        """The tokens whose rows fit, if nothing else is stored; 0 if no rows are stored."""
        if self._layout is None or not self.geometry.needs_rows:
            return 0
        chunk_tokens = self.geometry.chunk_tokens
        num_chunks = self.capacity_bytes // self._rows_bytes(0, chunk_tokens)
        left_bytes = self.capacity_bytes - num_chunks * self._rows_bytes(0, chunk_tokens)
        ends = self.geometry.cut_ends(0, chunk_tokens)
        fitting = [end for end in ends if self._rows_bytes(0, end) <= left_bytes]
        return num_chunks * chunk_tokens + max(fitting, default=0)

    def forget_sizes(self) -> None:
        """Pieces have other sizes from now on. The caller forgets what is stored."""
        self._rows_bytes.cache_clear()
        if self._layout is not None and self.geometry.needs_rows:
            chunk = Piece.rows(0, self.geometry.chunk_tokens)
            chunk_bytes = self._arena.place_bytes(self._layout_bytes(chunk))
            self._order.small_tails_bytes = chunk_bytes
            self._order.recency = self._make_recency(chunk_bytes)

    def _make_recency(self, chunk_bytes: int) -> Recency | None:
        """What a plain LRU would have; None if large tails are judged by themselves.

        Also None if the LRU would have more cuts than half of those that ``reuse`` remembers. What
        the LRU has lost would not be known any more, so it would seem to find all.
        """
        tails_bytes = 0
        if self.geometry.needs_tails:
            tails_bytes = self._layout_bytes(Piece.tails(self.geometry.chunk_tokens))
        num_cuts = self.geometry.chunk_tokens // self.geometry.cut_tokens
        cut_bytes = -(-chunk_bytes // num_cuts)
        if (
            tails_bytes > chunk_bytes
            or self.capacity_bytes // cut_bytes > self._remembered_keys // 2
        ):
            return None
        # A request leaves tails at the end of its prompt, and at the end of its answer.
        return Recency(self.capacity_bytes, cut_bytes, 2 * tails_bytes)

    def next_use(self) -> int:
        """A new point in time, later than all before. Ages are differences of such points.

        A request takes a point when it is admitted, and another point when it ends.
        """
        self._latest_use += 1
        return self._latest_use

    def note_admitted(
        self,
        prefix: Prefix,
        prompt_tokens: int,
        is_again: bool = False,
        present_tokens: int | None = None,
        hit_tokens: int = 0,
    ) -> int:
        """Note that a request begins. Call it before the request's own tails are stored.

        A request that begins again after a preemption is noted again: it resumes once more.

        Args:
            prefix: The tokens of the request.
            prompt_tokens: The length of its prompt.
            is_again: Whether it has begun before. Call `note_stopped` before.
            present_tokens: What the method of this name returns; None to call it.
            hit_tokens: The tokens that the request does not compute, because the device has them or
                they were loaded.

        Returns:
            The use of its admission.
        """
        use = self.next_use()
        # The last token of a prompt is always computed.
        limit_tokens = self.geometry.floor(min(prompt_tokens - 1, prefix.num_tokens))
        unit_tokens = self.geometry.unit_tokens
        boundaries: Sequence[bytes] = ()
        num_until_tails = 0
        if self.geometry.needs_tails:
            boundaries = prefix.keys_at(range(unit_tokens, limit_tokens + 1, unit_tokens))
            num_until_tails = self._resumes.note_admitted(boundaries, use)
        if self._order.recency is not None and not is_again:
            if present_tokens is None:
                present_tokens = self.present_tokens(prefix, limit_tokens)
            if self.geometry.needs_tails:
                present = boundaries[: present_tokens // unit_tokens]
                present_tokens = unit_tokens * self._index.upto_present(Kind.TAILS, present)
            self._compare(
                self._order.recency,
                self._cut_keys(prefix, limit_tokens),
                boundaries[:num_until_tails],
                max(present_tokens, hit_tokens),
            )
        return use

    def _compare(
        self,
        recency: Recency,
        starts: Sequence[bytes],
        until_tails: Sequence[bytes],
        found_tokens: int,
    ) -> None:
        """Compare what a plain LRU, this tier, and an endless tier would find of a prompt.

        Args:
            starts: The keys of the cuts of the prompt.
            until_tails: The keys of its boundaries up to the last one with known tails.
            found_tokens: The tokens from its beginning on that this tier or the device has.
        """
        unit_tokens, cut_tokens = self.geometry.unit_tokens, self.geometry.cut_tokens
        num_found = recency.num_found(starts)
        tier_cuts = -(-found_tokens // cut_tokens)
        if not self.geometry.needs_tails:
            num_known = num_found + self._reuse.num_until_known(starts[num_found:])
            recency.note_prompt(num_known, num_found, tier_cuts)
            return
        num_units = cut_tokens // unit_tokens
        within = until_tails[: num_found * num_units]
        if len(within) < len(until_tails):
            within = within[: self._resumes.num_until_known(within)]
        # A cut is known by its first unit. So a cut that is begun counts as a whole.
        num_known, num_found = (-(-len(keys) // num_units) for keys in (until_tails, within))
        recency.note_prompt(num_known, num_found, tier_cuts)

    def note_ended(
        self, prefix: Prefix, prompt_tokens: int, end_tokens: int, is_answer_kept: bool = True
    ) -> None:
        """Note that a request has ended. Call it once, before its remaining pieces are stored.

        Args:
            prefix: The tokens of the request.
            prompt_tokens: The length of its prompt.
            end_tokens: The end of its tokens that have keys. These tokens include its answer.
            is_answer_kept: Whether its answer is likely enough to come back to be kept at all.
        """
        keys = self._cut_keys(prefix, end_tokens)
        unit_tokens = self.geometry.unit_tokens
        num_asked = len(range(unit_tokens, prompt_tokens + 1, self.geometry.cut_tokens))
        self._reuse.note_ended(keys[:num_asked], keys[num_asked:], self._latest_use)
        if self._order.recency is not None:
            kept = keys if is_answer_kept else keys[:num_asked]
            self._order.recency.note_used(kept, self._latest_use)

    def note_stopped(self, prefix: Prefix, end_tokens: int) -> None:
        """Note that a request stops before its end, and leaves nothing more in this tier.

        It was aborted, or it was preempted and is about to begin again. A plain LRU would have what
        it has computed.

        Args:
            prefix: The tokens of the request.
            end_tokens: The end of its tokens that were computed and have keys.
        """
        if self._order.recency is not None:
            self._order.recency.note_used(self._cut_keys(prefix, end_tokens), self._latest_use)

    def _cut_keys(self, prefix: Prefix, end_tokens: int) -> Sequence[bytes]:
        """The keys of the cuts before a token.

        A cut is identified by the key of its first unit, even if the tokens end within the cut.
        """
        first_tokens = self.geometry.unit_tokens
        return prefix.keys_at(range(first_tokens, end_tokens + 1, self.geometry.cut_tokens))

    def note_came_back(self, prefix: Prefix, first_tokens: int, end_tokens: int) -> None:
        """Note that a prompt contains answers, the first of which begins at ``first_tokens``."""
        boundary = self.geometry.floor(end_tokens)
        for _, entry in self.lookup(prefix).walk_back(first_tokens, boundary, with_storing=True):
            entry.chance = 1.0

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
            The load. If one of the entries is not stored any more, nothing is pinned, and None is
            returned.
        """
        if not all(entry.state is EntryState.STORED for entry in entries):
            return None
        self.renew(prefix, boundary_tokens, use)
        for entry in entries:
            entry.num_pins += 1
            entry.chance = 1.0
            if not entry.can_be_trimmed:  # The rows of the prefix are renewed.
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
        for end_tokens, entry in self.lookup(prefix).walk_back(0, boundary, with_storing=True):
            if entry.use_at(end_tokens) >= use:
                return
            # A cut is evicted as a whole, so a use of its first rows is a use of all of it.
            entry.renew(self.geometry.cut_end(end_tokens), use)

    # Stores.

    def present_tokens(self, prefix: Prefix, limit_tokens: int) -> int:
        """The boundary up to which the rows of a prefix are stored or being stored."""
        if not self.geometry.needs_rows:
            return 0
        return self.lookup(prefix).first_run(limit_tokens, 0, with_storing=True).end_tokens

    def known_tokens(self, prefix: Prefix, limit_tokens: int) -> int:
        """A boundary up to which earlier requests had the same tokens, stored or not.

        Nearly a cut may be missing, because a cut is known by its first unit.
        """
        unit_tokens = self.geometry.unit_tokens
        limit_tokens = min(limit_tokens, prefix.num_tokens)
        boundaries = range(unit_tokens, limit_tokens + 1, self.geometry.cut_tokens)
        number = self._reuse.num_until_known(prefix.keys_at(boundaries))
        return boundaries[number - 1] if number else 0

    def tails_to_store(self, prefix: Prefix, boundary_tokens: int, max_tokens: int) -> Piece:
        """The tails at a boundary: whole, or only what they have beyond stored tails before.

        Tails that others continue cannot be evicted. So only tails that several prompts use are
        continued, and only large ones: small ones are evicted like the rows before them. In a model
        without rows, nothing else gives way where all places hold such tails. And no tails are
        continued so far that a resume at the boundary reads nothing of the first ones.

        Args:
            prefix: A prefix with keys up to the boundary.
            boundary_tokens: The boundary.
            max_tokens: How far before the boundary the other tails may end; 0 if tails are stored
                as a whole in any case.
        """
        whole = Piece.tails(boundary_tokens)
        if not max_tokens or not self.geometry.needs_rows:
            return whole
        whole_bytes = self._layout_bytes(whole)
        if self._arena.place_bytes(whole_bytes) <= self._order.small_tails_bytes:
            return whole
        unit_tokens = self.geometry.unit_tokens
        first_tokens = max(unit_tokens, boundary_tokens - self.geometry.floor(max_tokens))
        keys = prefix.keys_at(range(first_tokens, boundary_tokens, unit_tokens))
        for base in reversed(self._index.all_stored(Kind.TAILS, keys)):
            first = base.chain[0].piece.end_tokens
            are_read = len(base.chain) < MAX_CHAIN and first > boundary_tokens - max_tokens
            if are_read and self._resumes.is_shared(base.key):
                piece = Piece.continued_tails(base.piece.end_tokens, boundary_tokens)
                is_saving = self._layout_bytes(piece) <= MAX_CONTINUED_SHARE * whole_bytes
                return piece if is_saving else whole
        return whole

    def begin_store(
        self,
        prefix: Prefix,
        piece: Piece,
        num_bytes: int,
        use: int,
        preference: Callable[[Entry], int] = lambda _: 0,
        origin: TailOrigin = TailOrigin.ASKED,
    ) -> Entry | Refusal:
        """Take a place for a piece of a prefix. The rows before it are renewed, so that they stay.

        Args:
            prefix: A prefix with keys up to the end of the piece.
            piece: Rows within one chunk, or tails, see `tails_to_store`.
            num_bytes: The bytes of the piece in host memory, more than 0.
            use: The latest use by the request.
            preference: See `EvictionOrder.choose`.
            origin: Why tails are stored.

        Returns:
            The entry, whose place begins at ``offset_bytes``, or the reason why there is none. A
            refusal evicts nothing that a request could use.

        Raises:
            TierError: If a piece is not cut at units, or reaches into a second chunk, or if it
                continues tails that are not stored.
        """
        entry = self._entry(prefix, piece, self._arena.place_bytes(num_bytes), use)
        refusal = self._why_not_needed(entry)
        if refusal is None and entry.num_bytes > self.capacity_bytes:
            refusal = Refusal.NO_ROOM
        if refusal is not None:
            self.counters.refused_stores[refusal] += 1
            return refusal
        if piece.continues:
            # Before room is made, so that the other tails do not give way.
            self._continue(entry, prefix.key_at(piece.first_tokens))
        if piece.kind is Kind.TAILS:
            self._resumes.note_tails(entry.key, origin, self._latest_use)
            if origin in ENDS_OF_TURNS:
                unit_tokens = self.geometry.unit_tokens
                boundaries = range(unit_tokens, piece.end_tokens, unit_tokens)
                self._resumes.note_answered(prefix.keys_at(boundaries), self._latest_use)
        self._order.note_bytes(use, entry.num_bytes)
        self._order.begin(entry)
        refusal = self._make_gap(prefix, entry, preference)
        if refusal is not None:
            self._order.forget(entry)
            self._stop_continuing(entry)
            self.counters.refused_stores[refusal] += 1
            return refusal
        offset_bytes = self._arena.allocate(entry.num_bytes)
        assert offset_bytes is not None
        self._begin(entry, offset_bytes)
        return entry

    def begin_rows(
        self,
        prefix: Prefix,
        piece: Piece,
        use: int,
        may_evict: bool = True,
        chance: float = 1.0,
    ) -> list[Entry] | Refusal:
        """Take places for rows of a prefix. The rows before them are renewed, so that they stay.

        The rows become as few entries as the gaps allow. Each of them has whole cuts of the piece.
        If there is room for the first rows only, the others get no entry.

        Args:
            prefix: A prefix with keys up to the end of the piece.
            piece: Rows within one chunk.
            use: The latest use by the request.
            may_evict: Whether other entries may give way. If not, a lack of gaps does not count as
                a refusal.
            chance: See `Entry`.

        Returns:
            The entries, ascending, at least one; or the reason why there is none.

        Raises:
            TierError: If the piece is not cut at units, or reaches into a second chunk.
        """
        new = self._entry(prefix, piece, self._rows_bytes(*piece[1:]), use, chance)
        refusal = self._why_not_needed(new)
        first_end, *_ = self.geometry.cut_ends(*piece[1:])
        if self._rows_bytes(piece.first_tokens, first_end) > self.capacity_bytes:
            refusal = refusal or Refusal.NO_ROOM
        if refusal is not None:
            self.counters.refused_stores[refusal] += 1
            return refusal
        self._order.note_bytes(use, new.num_bytes)
        self.renew(prefix, piece.end_tokens, use)
        entries: list[Entry] = []
        room_tokens = piece.first_tokens  # There is room in the gaps up to this token.
        rest: Entry | None = new
        while rest is not None:
            self._order.begin(rest)
            if rest.piece.first_tokens == room_tokens:
                room_tokens = self._make_gaps(rest, may_evict)
            if rest.piece.first_tokens == room_tokens:
                self._order.forget(rest)
                refusal = self._order.refusal
                self.counters.refused_stores[refusal] += may_evict
                return entries or refusal
            entries.append(rest)
            rest = self._begin_first_rows(rest, room_tokens)
        return entries

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
        if entry.state is EntryState.STORED:
            self._trim_rows_before(entry)
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
        self._resumes.clear()
        if self._order.recency is not None:
            self._order.recency.clear()

    def _entry(
        self, prefix: Prefix, piece: Piece, place_bytes: int, use: int, chance: float = 1.0
    ) -> Entry:
        """An entry that has no place yet."""
        # Tails need the rows before their boundary, and their cut is the last one of these rows.
        is_rows = piece.kind is Kind.ROWS
        first_tokens = piece.first_tokens if is_rows else piece.end_tokens
        cut_start = self.geometry.cut_start(min(first_tokens, piece.end_tokens - 1))
        # Parts of a segment may be of use without those before them, and give way in any order.
        needs_before = self.geometry.needs_rows and first_tokens and not prefix.key_space
        return Entry(
            self._num_entries,
            piece,
            self.lookup(prefix).keys_of(piece),
            -1,
            place_bytes,
            use,
            cut_key=prefix.key_at(cut_start + self.geometry.unit_tokens),
            key_before=prefix.key_at(first_tokens) if needs_before else None,
            key_space=prefix.key_space,
            chance=chance,
        )

    def _continue(self, entry: Entry, base_key: bytes) -> None:
        """Let new tails continue stored ones, which stay from now on."""
        base = self._index.stored(Kind.TAILS, base_key)
        if base is None:
            raise TierError(
                f"host tier: expected stored tails at token {entry.piece.first_tokens}, which "
                "others are to continue, found none; store the piece that tails_to_store names"
            )
        entry.base = base
        if base.continued_by is None:
            base.continued_by = {}
        base.continued_by[entry] = None

    def _stop_continuing(self, entry: Entry) -> None:
        """Note that an entry is not going to be read any more by new loads."""
        base = entry.base
        if base is not None and base.continued_by and entry in base.continued_by:
            del base.continued_by[entry]
            self._order.add(base)

    def _begin(self, entry: Entry, offset_bytes: int) -> None:
        """Give an entry a place that has been allocated."""
        entry.offset_bytes = offset_bytes
        self._num_entries += 1
        self._entries[offset_bytes] = entry
        self._index.begin(entry)
        self._count_held()

    def _begin_first_rows(self, entry: Entry, room_tokens: int) -> Entry | None:
        """Give the first rows of an entry a place. The entry loses the other rows.

        Rows take the smallest gap that is large enough. If there is none, the first of them take
        the largest gap.

        Args:
            room_tokens: The token up to which there is room in the gaps.

        Returns:
            An entry with the other rows, which has no place yet; None if there are none.
        """
        _, first_tokens, end_tokens = entry.piece
        if room_tokens < end_tokens or entry.num_bytes > self._arena.largest_gap_bytes:
            rest = self._split(entry, self._gap_end(first_tokens, room_tokens))
        else:
            rest = None
        offset_bytes = self._arena.allocate(entry.num_bytes)
        assert offset_bytes is not None
        self._begin(entry, offset_bytes)
        if rest is not None:
            rest.number = self._num_entries
        return rest

    def _gap_end(self, first_tokens: int, room_tokens: int) -> int:
        """The token up to which rows have room in one gap, at most ``room_tokens``."""
        gap_bytes = self._arena.largest_gap_bytes
        return next(
            end
            for end in reversed(self.geometry.cut_ends(first_tokens, room_tokens))
            if self._rows_bytes(first_tokens, end) <= gap_bytes
        )

    def _split(self, entry: Entry, end_tokens: int) -> Entry | None:
        """Let an entry of rows that has no place yet lose its rows behind the end of a cut.

        Returns:
            An entry with these rows; None if there are none.
        """
        _, first_tokens, last_tokens = entry.piece
        if end_tokens == last_tokens:
            return None
        num_kept = (end_tokens - first_tokens) // self.geometry.unit_tokens
        others = entry.keys[num_kept:]
        entry.piece = Piece.rows(first_tokens, end_tokens)
        entry.keys = entry.keys[:num_kept]
        entry.num_bytes = self._rows_bytes(first_tokens, end_tokens)
        return Entry(
            -1,
            Piece.rows(end_tokens, last_tokens),
            others,
            -1,
            self._rows_bytes(end_tokens, last_tokens),
            entry.use,
            cut_key=others[0],
            key_before=entry.key,
            key_space=entry.key_space,
            chance=entry.chance,
        )

    def _rows_place_bytes(self, first_tokens: int, end_tokens: int) -> int:
        """The size of a place for some rows."""
        return self._arena.place_bytes(self._layout_bytes(Piece.rows(first_tokens, end_tokens)))

    def _why_not_needed(self, entry: Entry) -> Refusal | None:
        piece = entry.piece
        for find, refusal in (
            (self._index.stored, Refusal.ALREADY_STORED),
            (self._index.storing, Refusal.BEING_STORED),
        ):
            found = find(piece.kind, entry.key)
            if found is None:
                continue
            if piece.kind is Kind.TAILS or found.piece.first_tokens <= piece.first_tokens:
                return refusal
        return None

    def _make_gap(
        self, prefix: Prefix, entry: Entry, preference: Callable[[Entry], int]
    ) -> Refusal | None:
        """Evict entries of lower priority if there is no gap. If that is not enough, evict none.

        For tails, what no request can use is evicted before, whether or not that is enough.
        """
        self.renew(prefix, entry.piece.end_tokens, entry.use)
        if entry.num_bytes <= self._arena.largest_gap_bytes:
            return None
        limit = self._order.priority(entry, self._latest_use)
        lesser = self._order.lesser(limit, self._latest_use, preference)
        if entry.piece.kind is Kind.TAILS and self.geometry.needs_rows:
            # What a request can use stays, even where the tails are worth more.
            least_useful = limit._replace(is_recent=False, density=0.0)
            while useless := [each for found, each in lesser if found.density == USELESS]:
                self._evict_useless(useless, entry.num_bytes, min(limit, least_useful))
                if entry.num_bytes <= self._arena.largest_gap_bytes:
                    return None
                lesser = self._order.lesser(limit, self._latest_use, preference)
        chosen = self._order.choose(self._entries, entry, self._latest_use, lesser, preference)
        if isinstance(chosen, Refusal):
            return chosen
        for victim in chosen:
            self._remove(victim, Removal.EVICTED)
        return None

    def _evict_useless(self, ends: list[Entry], gap_bytes: int, limit: Priority) -> None:
        """Evict what no request can use, from its end on, until there is a gap of some size.

        Args:
            ends: Entries of which no request can use the last cut.
            gap_bytes: The size of the gap.
            limit: A cut of higher priority stays.
        """
        now = self._latest_use
        while ends and gap_bytes > self._arena.largest_gap_bytes:
            victim = ends.pop(0)
            self._evict_end(victim, victim.num_bytes, limit)
            for end in self._ends_left(victim):
                is_new_end = self._is_end(end) and end not in ends
                if is_new_end and self._order.priority(end, now) < limit:
                    ends.append(end)

    def _make_gaps(self, entry: Entry, may_evict: bool) -> int:
        """Evict cuts of lower priority until the gaps have room for the cuts of a new entry.

        If only its first cuts have a higher priority than what is stored, room is made for them.

        Returns:
            The token up to which the gaps have room for the entry.
        """
        first_tokens, end_tokens = entry.piece[1:]
        if entry.num_bytes <= self._arena.largest_gap_bytes:
            return end_tokens
        ends = self.geometry.cut_ends(first_tokens, end_tokens)
        cut_bytes = self._cut_bytes(first_tokens, ends)
        highest = self._order.priority(entry, self._latest_use, ends[0])
        lesser: list[tuple[Priority, Entry]] = []
        is_new = False  # Whether nothing was evicted since `lesser` was found.
        limit: Priority | None = None  # The priority of the cut at the end of `ends`.
        while ends:
            num_lacking = len(ends) - self._arena.num_parts(cut_bytes, len(ends))
            if not num_lacking:
                return ends[-1]
            if limit is None:
                limit = self._order.priority(entry, self._latest_use, ends[-1])
            if may_evict and not is_new and (not lesser or lesser[0][0] >= limit):
                lesser = self._order.lesser(highest, self._latest_use)
                is_new = True
            if not lesser:
                return ends[-1 - num_lacking] if num_lacking < len(ends) else first_tokens
            if lesser[0][0] >= limit:
                ends.pop()
                limit = None
                continue
            is_new = False
            _, victim = heappop(lesser)
            next_priority = min(limit, lesser[0][0]) if lesser else limit
            self._evict_end(victim, num_lacking * cut_bytes, next_priority)
            for end in self._ends_left(victim):
                is_known = end is not victim and any(end is each for _, each in lesser)
                if is_known or not self._is_end(end):
                    continue
                priority = self._order.priority(end, self._latest_use)
                # What is not below the limit of the search would come before ends that it left out.
                if priority < highest:
                    heappush(lesser, (priority, end))
        return first_tokens

    def _ends_left(self, evicted: Entry) -> list[Entry]:
        """What may be evicted next where an entry was evicted, or has lost its end."""
        if evicted.is_evictable:
            return [evicted]
        before = [evicted.base]
        if evicted.key_before is not None:
            before.append(self._index.stored(Kind.ROWS, evicted.key_before))
        return [end for end in before if end is not None]

    def _is_end(self, entry: Entry) -> bool:
        """Whether the last cut of an entry may be evicted."""
        kind, _, end_tokens = entry.piece
        is_free = kind is Kind.TAILS or self._order.removable_to(entry) < end_tokens
        return entry.is_evictable and is_free

    def _cut_bytes(self, first_tokens: int, ends: Sequence[int]) -> int:
        """The bytes of the largest cut of a piece."""
        cut_tokens = self.geometry.cut_tokens
        if len(ends) > 2:  # One of the cuts is whole, and whole cuts have one size.
            return self._layout_bytes(Piece.rows(0, cut_tokens))
        cuts = zip((first_tokens, *ends), ends, strict=False)
        return max(self._layout_bytes(Piece.rows(begin, end)) for begin, end in cuts)

    def _layout_bytes(self, piece: Piece) -> int:
        assert self._layout is not None
        return self._layout.num_bytes(piece)

    def _evict_end(self, entry: Entry, num_bytes: int, next_priority: Priority) -> None:
        """Evict one or more cuts at the end of an entry.

        Args:
            num_bytes: No more cuts are evicted when this many bytes are free.
            next_priority: A cut of higher priority stays, unless it is the first one.
        """
        first_tokens, end_tokens = entry.piece[1:]
        kept_tokens = self._order.removable_to(entry)
        if entry.can_be_trimmed:
            for left_tokens in reversed(self.geometry.cut_ends(first_tokens, end_tokens)[:-1]):
                left_bytes = self._rows_bytes(first_tokens, left_tokens)
                is_enough = entry.num_bytes - left_bytes >= num_bytes
                if (
                    is_enough
                    or left_tokens == kept_tokens
                    or self._order.priority(entry, self._latest_use, left_tokens) > next_priority
                ):
                    self._trim(entry, left_tokens, Removal.EVICTED)
                    return
        self._remove(entry, Removal.EVICTED)

    def _trim(self, entry: Entry, end_tokens: int, removal: Removal) -> None:
        """Let a stored entry that no load pins lose its cuts behind a token."""
        assert entry.is_evictable and self._layout is not None
        first_tokens = entry.piece.first_tokens
        num_keys = (end_tokens - first_tokens) // self.geometry.unit_tokens
        entry.piece = Piece.rows(first_tokens, end_tokens)
        entry.use = entry.use_at(end_tokens)
        entry.head_uses = tuple(head for head in entry.head_uses if head[0] < end_tokens)
        lost_keys = self._index.trim(entry, num_keys)
        entry.row_map = self._layout.rows_within(entry.row_map, first_tokens, end_tokens)
        left_bytes = self._rows_bytes(first_tokens, end_tokens)
        self.counters.removed_bytes[removal] += entry.num_bytes - left_bytes
        self._arena.shrink(entry.offset_bytes, left_bytes)
        entry.num_bytes = left_bytes
        shortfall = _SHORTFALLS.get(removal)
        if shortfall is not None:
            for key in lost_keys:
                self._lost[Kind.ROWS].put(key, shortfall)
        self._report_lost_rows(lost_keys)
        if entry.num_leading_keys:
            self._order.add(entry)
            self._count_held()
        else:  # Other entries have the rows that are left, too.
            self._remove(entry, Removal.REPLACED)

    def _trim_rows_before(self, entry: Entry) -> None:
        """Let an older entry lose its last rows, if a new entry that begins at a cut has them."""
        if entry.piece.kind is not Kind.ROWS or entry.piece.first_tokens % self.geometry.cut_tokens:
            return
        older = self._index.stored(Kind.ROWS, entry.keys[0])
        if (
            older is not None
            and older.piece.first_tokens < entry.piece.first_tokens
            and older.is_evictable
            and older.can_be_trimmed
            and older.key in entry.keys
        ):
            self._trim(older, entry.piece.first_tokens, Removal.REPLACED)

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
        """Remove an entry that was stored, and all that continue it."""
        for each in list(entry.continued_by or ()):
            if each.state is EntryState.STORED:
                self._remove(each, removal)
            else:
                self._leave(each, _SHORTFALLS.get(removal))
        self.counters.removed_entries[removal] += 1
        self.counters.removed_bytes[removal] += entry.num_bytes
        lost_keys = self._leave(entry, _SHORTFALLS.get(removal))
        if entry.piece.kind is Kind.ROWS:
            self._report_lost_rows(lost_keys)
        if is_known and self._on_removed is not None:
            self._on_removed(entry, removal)

    def _report_lost_rows(self, keys: Sequence[bytes]) -> None:
        if keys and self._on_rows_lost is not None:
            self._on_rows_lost(keys)

    def _leave(self, entry: Entry, shortfall: Shortfall | None = None) -> list[bytes]:
        """Hide an entry from lookups. Its place is held until its last transfer ends.

        Returns:
            Its keys that lead to no stored entry now.
        """
        kind = entry.piece.kind
        self._order.forget(entry)
        self._stop_continuing(entry)
        lost_keys = self._index.drop(entry)
        entry.state = EntryState.LEAVING
        if shortfall is not None:
            for key in lost_keys:
                self._lost[kind].put(key, shortfall)
        self._release_if_idle(entry)
        return lost_keys

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
