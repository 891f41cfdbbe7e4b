# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The host tier under random calls, with pieces that lose their end and pieces in several gaps.

Host memory is an array of cells, one for each unit of rows. A store writes its cells when it begins
and when it ends, because nobody knows when the bytes are written. What is stored or being loaded
must always be in its cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule, run_state_machine_as_test
from unit.store.test_tier_machine import (
    CAPACITY_BYTES,
    CHUNK_TOKENS,
    REASONS,
    UNIT_TOKENS,
    TierMachine,
    texts,
)
from unit.store.tier_model import ALIGNMENT_BYTES, Eviction, ModelEntry, ModelTier, TextPrefix

from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Load, Piece
from vllm_ascend_kvext.store.prefix import TierGeometry


class CellLayout:
    """Each unit of rows takes one place. A row map is the range of its tokens."""

    def num_bytes(self, piece: Piece) -> int:
        return (piece.end_tokens - piece.first_tokens) // UNIT_TOKENS * ALIGNMENT_BYTES

    def rows_within(self, row_map: range, first_tokens: int, end_tokens: int) -> range:
        assert row_map.start == first_tokens and end_tokens < row_map.stop
        return range(first_tokens, end_tokens)


class CutMachine(TierMachine):
    """Rows are stored cut by cut, and give way cut by cut."""

    def __init__(self) -> None:
        self.layout = CellLayout()
        super().__init__()
        self.cells: dict[int, bytes] = {}
        self.pinned: dict[Load, list[tuple[int, tuple[bytes, ...]]]] = {}
        self.may_evict = True
        self.chance = 1.0

    def _make_tier(self, **options: Any) -> None:
        super()._make_tier(layout=self.layout, **options)
        chunk = Piece.rows(0, self.geometry.chunk_tokens)
        self.model.small_tails_bytes = self._place_bytes(chunk)
        assert self.tier._order.recency is not None
        self.recency = self.tier._order.recency
        recency = self.recency
        self.model.is_kept = lambda key, use: recency.is_followed and recency.has(key, use)
        self._trim_entry = self.tier._trim
        self.tier._trim = self._trim  # type: ignore[method-assign]

    # Host memory.

    def _write(self, entry: Entry) -> None:
        first_cell = entry.offset_bytes // ALIGNMENT_BYTES
        for number in range(entry.num_bytes // ALIGNMENT_BYTES):
            self.cells[first_cell + number] = b""
        for number, key in enumerate(entry.keys):
            self.cells[first_cell + number] = bytes([entry.piece.kind]) + key

    def _is_whole(self, offset_bytes: int, kind: Kind, keys: Sequence[bytes]) -> bool:
        first_cell = offset_bytes // ALIGNMENT_BYTES
        found = [self.cells[first_cell + number] for number in range(len(keys))]
        return found == [bytes([kind]) + key for key in keys]

    def load(self, text: str, after: int) -> None:
        super().load(text, after)
        load = self.loads[-1]
        for entry in load.entries:
            self.model.of(entry).chance = 1.0
        self.pinned[load] = [
            (entry.offset_bytes, entry.piece, entry.keys) for entry in load.entries
        ]

    def _end_load(self, load: Load, unreadable: Sequence[Entry]) -> None:
        for (offset_bytes, piece, keys), entry in zip(
            self.pinned.pop(load), load.entries, strict=True
        ):
            assert (entry.offset_bytes, entry.piece, entry.keys) == (offset_bytes, piece, keys)
            assert self._is_whole(offset_bytes, piece.kind, keys), "a load reads other rows"
        super()._end_load(load, unreadable)

    def _end_store(self, known: ModelEntry, ends_well: bool) -> None:
        self._write(known.entry)
        super()._end_store(known, ends_well)

    # Stores.

    def _row_map(self, entry: Entry) -> Any:
        return range(*entry.piece[1:])

    @rule(text=texts)
    def store_in_gaps(self, text: str) -> None:
        """Store rows without evicting anything."""
        self.may_evict = False
        self.store_what_is_missing(text, 0, (1, 1), True)
        self.may_evict = True

    @rule(text=texts, chance=st.sampled_from([0.2, 0.5, 0.7]))
    def store_an_answer(self, text: str, chance: float) -> None:
        """Store rows that may not come back."""
        self.chance = chance
        self.store_what_is_missing(text, 0, (1, 1), True)
        self.chance = 1.0

    @rule(text=texts, known_cuts=st.integers(0, 1), num_uses=st.integers(0, 8))
    def learn_what_a_plain_lru_would_have(self, text: str, known_cuts: int, num_uses: int) -> None:
        self.tier.note_stopped(TextPrefix(text), len(text))
        self.recency._known_cuts, self.recency._found_cuts = known_cuts, 0
        self.recency.lost_use = max(0, self.use - num_uses)

    @rule(text=texts, first_units=st.integers(0, 11))
    def answers_come_back(self, text: str, first_units: int) -> None:
        first_tokens = first_units * UNIT_TOKENS
        self.tier.note_came_back(TextPrefix(text), first_tokens, len(text))
        for _, each in self.model.walk_back(text, first_tokens):
            each.chance = 1.0

    def _begin_store(self, prefix: TextPrefix, piece: Piece, size: int) -> None:
        if piece.kind is Kind.TAILS:
            entry = self._begin_in_one_gap(prefix, piece, size) if self.may_evict else None
            if isinstance(entry, Entry):
                self._write(entry)
            return
        model = self.model
        text = prefix.text[: piece.end_tokens]
        is_known = any(
            each.piece.first_tokens <= piece.first_tokens
            for each in model.holding(Kind.ROWS, text, [EntryState.STORED, EntryState.STORING])
        )
        gaps = self._gaps(model)
        new = ModelEntry(
            Entry(self.tier._num_entries, piece, (), -1, 0, self.use, b"", None),
            piece,
            text,
            self._place_bytes(piece),
            self.use,
            chance=self.chance,
        )
        if not is_known:
            model.renew(text, self.use)
            model.want(new)
        before = model.copied()
        recent_use = model.recent_use()
        priority_of_new = self._priorities(new)
        found = self.tier.begin_rows(prefix, piece, self.use, self.may_evict, self.chance)
        if is_known:
            assert found in (Refusal.ALREADY_STORED, Refusal.BEING_STORED)
            assert not self.evictions
            return
        evictions = list(self.evictions)
        self._follow_removals({Removal.EVICTED, Removal.REPLACED})
        ends = self.geometry.cut_ends(*piece[1:])
        entries = found if isinstance(found, list) else []
        position = piece.first_tokens
        for entry in entries:
            assert entry.piece.first_tokens == position < entry.piece.end_tokens
            position = entry.piece.end_tokens
            assert position in ends and entry.num_bytes == self._place_bytes(entry.piece)
            assert entry.chance == self.chance
            assert list(entry.keys) == prefix.keys_at(
                range(entry.piece.first_tokens + UNIT_TOKENS, position + 1, UNIT_TOKENS)
            )
            self._write(entry)
            model.entries.append(
                ModelEntry(
                    entry,
                    entry.piece,
                    text[:position],
                    entry.num_bytes,
                    self.use,
                    chance=self.chance,
                )
            )
        self._check_order(before, new, evictions, recent_use, max(priority_of_new.values()))
        if max(gaps) >= new.size_bytes or self._num_parts(gaps, piece) >= len(ends):
            assert not evictions, "something was evicted although there was room"
            assert position == piece.end_tokens
        # What has not been stored.
        if position < piece.end_tokens and self.may_evict:
            next_end = ends[ends.index(position) + 1] if entries else ends[0]
            wanted = min(priority_of_new[end] for end in ends if end <= next_end)
            left = Piece.rows(position, piece.end_tokens)
            rest = ModelEntry(new.entry, left, text, 0, self.use)
            for each in model.ends(rest):
                assert model.priority(each, recent_use) >= wanted
        if isinstance(found, Refusal):
            assert position == piece.first_tokens
            assert found in (Refusal.WORTH_LESS, Refusal.NO_ROOM)

    @property
    def _spare(self) -> int:
        return self.tier._arena._spare_bytes

    def _place_bytes(self, piece: Piece) -> int:
        return self.tier._arena.place_bytes(self.layout.num_bytes(piece))

    def _priorities(self, each: ModelEntry) -> dict[int, tuple[float, ...]]:
        """The priorities of rows, by the end that they would have."""
        ends = self.geometry.cut_ends(*each.piece[1:])
        recent_use = self.model.recent_use()
        return {end: self.model.priority(each, recent_use, end) for end in ends}

    def _check_order(
        self,
        model: ModelTier,
        new: ModelEntry,
        evictions: Sequence[Eviction],
        recent_use: int,
        limit: tuple[float, ...],
    ) -> None:
        """Check that cuts were evicted in order, and no more than were lacking.

        Args:
            model: The model before the first eviction.
            limit: The highest priority of the cuts of the new entry.
        """
        ends = self.geometry.cut_ends(*new.piece[1:])
        known = {id(each.entry): model.priority(each, recent_use) for each in model.ends(new)}
        for eviction in evictions:
            each = model.of(eviction.entry)
            if eviction.is_replaced:  # Other entries have the rows that were left of it.
                model.follow(eviction)
                continue
            assert self.may_evict
            self._check_is_end(model, new, eviction)
            others = [end for end in model.ends(new) if id(end.entry) in known and end is not each]
            highest = min([limit, *(model.priority(end, recent_use) for end in others)])
            for end in model.lost_ends(eviction):
                priority = model.priority(each, recent_use, end)
                if each.piece.kind is Kind.TAILS:
                    # They are judged by the rows that they had at first. These may lose their end,
                    # and other rows, of a later use, then stand for them.
                    priority = min(priority, known.get(id(each.entry), priority))
                assert priority < highest
            if eviction.num_begun == new.entry.number:  # The new entry has no place yet.
                gaps = self._gaps(model)
                assert eviction is not evictions[0] or max(gaps) < new.size_bytes
                assert self._num_parts(gaps, new.piece) < len(ends)
            begin = each.text_before
            model.follow(eviction)
            before = [] if each.base is None else [model.of(each.base)]
            holding = model.holding(Kind.ROWS, begin)
            if eviction.left_tokens is None and holding:
                before.append(model.leading(holding))
            for end in model.ends(new):
                # Other entries may end where others begin, too. These are found by the next search.
                if end in before:
                    known[id(end.entry)] = model.priority(end, recent_use)

    def _num_parts(self, gaps: Sequence[int], piece: Piece) -> int:
        """How many cuts of a piece fit into gaps. Cuts in one gap share the spare bytes."""
        ends = self.geometry.cut_ends(*piece[1:])
        cut_bytes = max(
            self.layout.num_bytes(Piece.rows(first, end))
            for first, end in zip([piece.first_tokens, *ends], ends, strict=False)
        )
        return sum(max(0, (gap - self._spare) // cut_bytes) for gap in gaps)

    def _gaps(self, model: ModelTier) -> list[int]:
        """The sizes of what lies between the entries. Some may be 0."""
        gaps = []
        position = 0
        for first, end in sorted(each.span for each in model.entries):
            gaps.append(first - position)
            position = end
        return [*gaps, CAPACITY_BYTES - position]

    def _trim(self, entry: Entry, end_tokens: int, removal: Removal) -> None:
        known = self.model.of(entry)
        assert known.state is EntryState.STORED and not known.num_pins
        assert end_tokens % self.geometry.cut_tokens == 0
        texts = [text.encode() for text in self.model.texts_of(known)]
        num_kept = (end_tokens - entry.piece.first_tokens) // UNIT_TOKENS
        assert 0 < num_kept < len(texts)
        is_replaced = removal is Removal.REPLACED
        num_entries = self.tier._num_entries
        self.evictions.append(Eviction(entry, end_tokens, is_replaced, num_entries))
        self._trim_entry(entry, end_tokens, removal)
        self.model.trim(known, end_tokens, REASONS.get(removal))
        assert list(entry.keys) == texts[:num_kept] and entry.piece.end_tokens == end_tokens
        if entry.state is EntryState.STORED:
            assert entry.row_map == range(*entry.piece[1:])

    def teardown(self) -> None:
        self.end_all_stores()
        super().teardown()

    @invariant()
    def what_is_stored_is_in_its_cells(self) -> None:
        for entry in self.tier._entries.values():
            if entry.state is EntryState.STORED:
                assert self._is_whole(entry.offset_bytes, entry.piece.kind, entry.keys)
        for pinned in self.pinned.values():
            for offset_bytes, piece, keys in pinned:
                assert self._is_whole(offset_bytes, piece.kind, keys)

    @invariant()
    def gaps_are_those_of_the_arena(self) -> None:
        gaps = sorted(gap for gap in self._gaps(self.model) if gap)
        assert gaps == sorted(size for size, _ in self.tier._arena._by_size)


GEOMETRIES = {
    "rows and tails": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, cut_tokens=4),
    "rows only": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_tails=False, cut_tokens=4),
    "cuts of a unit": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, cut_tokens=2),
}


@pytest.mark.parametrize("has_learned", [False, True], ids=["latest use", "reuse"])
@pytest.mark.parametrize("spare_bytes", [0, 70], ids=["no spare", "spare"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_cuts_give_way_as_in_the_model(
    geometry: TierGeometry, spare_bytes: int, has_learned: bool
) -> None:
    parts: dict[str, object] = {"geometry": geometry, "spare_bytes": spare_bytes}
    parts["has_learned"] = has_learned
    machine = type("Machine", (CutMachine,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
