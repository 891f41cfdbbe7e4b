# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The host tier under random calls, compared with a model that looks at all entries."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from unit.store.small_tier import pin
from unit.store.tier_model import (
    ALIGNMENT_BYTES,
    USELESS,
    Eviction,
    ModelEntry,
    ModelTier,
    TextPrefix,
)

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.holes.load_plan import plan_of_hit
from vllm_ascend_kvext.store.counters import Refusal, Removal
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Load, Piece
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.prefix import TierGeometry
from vllm_ascend_kvext.store.resumes import Resumes
from vllm_ascend_kvext.store.reuse import Reuse
from vllm_ascend_kvext.store.tier import HostTier

UNIT_TOKENS = 2
CHUNK_TOKENS = 12
CAPACITY_BYTES = 24 * ALIGNMENT_BYTES
REASONS = {Removal.EVICTED: Shortfall.EVICTED, Removal.LOAD_FAILED: Shortfall.FAILED}


def text_of(num_units: int, other_unit: int) -> str:
    """One of a family of prompts. They differ from some unit on."""
    letters = ["b" if unit == other_unit else "a" for unit in range(num_units)]
    return "".join(letter * UNIT_TOKENS for letter in letters)


texts = st.builds(text_of, st.integers(1, 14), st.sampled_from([99, 99, 2, 4, 7]))


class KnownReuse(Reuse):
    """Fixed densities: some chunks have higher ones than others, independent of lookups."""

    def density(self, key: bytes, use: int, now: int) -> float:
        return key[-1] % 2 + len(key) % 5


class KnownResumes(Resumes):
    """Fixed densities: some tails have higher ones than others, and than rows."""

    def density(self, key: bytes, use: int, now: int) -> float:
        return key[0] % 2 + len(key) % 3 + 0.5


class TierMachine(RuleBasedStateMachine):
    """Stores, looks up and loads prompts that share prefixes. Transfers fail, and resets occur."""

    geometry: TierGeometry
    has_one_size = False
    has_learned = False
    spare_bytes = 0

    def __init__(self) -> None:
        super().__init__()
        self.removed: list[tuple[Entry, Removal]] = []
        self.evictions: list[Eviction] = []
        self.loads: list[Load] = []
        self.use = 0
        self._make_tier()

    def _make_tier(self, **options: Any) -> None:
        self.tier = HostTier(
            CAPACITY_BYTES,
            self.geometry,
            on_removed=self._on_removed,
            spare_bytes=self.spare_bytes,
            **options,
        )
        reuse = KnownReuse(0) if self.has_learned else Reuse(0)
        resumes = KnownResumes(0) if self.has_learned else Resumes(0)
        self.tier._order._reuse = reuse
        self.tier._order._resumes = resumes
        self.model = ModelTier(
            self.geometry,
            CAPACITY_BYTES,
            lambda key: reuse.density(key, self.use, self.use),
            lambda key: resumes.density(key, self.use, self.use),
            place_bytes=lambda piece: self._place_bytes(piece),
        )

    def _place_bytes(self, piece: Piece) -> int:
        raise AssertionError("this tier has no layout, and evicts entries as a whole")

    def _on_removed(self, entry: Entry, removal: Removal) -> None:
        self.removed.append((entry, removal))
        is_replaced = removal is Removal.REPLACED
        self.evictions.append(Eviction(entry, None, is_replaced, self.tier._num_entries))

    # Actions of a request.

    @rule()
    def next_request(self) -> None:
        use = self.tier.next_use()
        assert use > self.use
        self.use = use

    @rule(text=texts, limit=st.integers(0, 30), after=st.integers(0, 20))
    def look_up(self, text: str, limit: int, after: int) -> None:
        prefix = TextPrefix(text)
        hit = self.tier.look_up(prefix, limit, after)
        assert (hit.boundary_tokens, hit.shortfall) == self.model.find(prefix, limit, after)
        plan = plan_of_hit(hit)
        assert bool(plan.entries) == (plan.num_tokens > 0)
        assert self.model.can_load(plan)
        position = after
        for entry, first, end in hit.run.rows:
            assert entry.piece.first_tokens <= first == position < end
            assert self.model.of(entry).text[:end] == text[:end]
            position = end

    @rule(text=texts, limit=st.integers(0, 30), after=st.integers(0, 20))
    def look_up_what_is_there(self, text: str, limit: int, after: int) -> None:
        prefix = TextPrefix(text)
        limit = min(limit, len(text))
        boundaries = range(UNIT_TOKENS, limit + 1, UNIT_TOKENS)

        def those_with(kind: Kind, *states: EntryState) -> list[int]:
            return [end for end in boundaries if self.model.holding(kind, text[:end], states)]

        tails = self.tier.lookup(prefix).find_all_tails(limit, after)
        assert [entry.piece.end_tokens for entry in tails] == [
            boundary for boundary in those_with(Kind.TAILS, EntryState.STORED) if boundary >= after
        ]
        present = those_with(Kind.ROWS, EntryState.STORED, EntryState.STORING)
        missing = (end - UNIT_TOKENS for end in boundaries if end not in present)
        present_tokens = next(missing, boundaries[-1] if boundaries else 0)
        assert self.tier.present_tokens(prefix, limit) == present_tokens * self.geometry.needs_rows
        if self.geometry.needs_rows:
            after -= after % UNIT_TOKENS
            self._check_runs(text, after, limit, set(those_with(Kind.ROWS, EntryState.STORED)))

    @rule(text=texts, after=st.sampled_from([0, 0, 3, 8, 12]))
    def load(self, text: str, after: int) -> None:
        hit = self.tier.look_up(TextPrefix(text), len(text), after)
        load = pin(self.tier, plan_of_hit(hit), self.use)
        assert load is not None
        self.model.renew(text[: hit.boundary_tokens], self.use)
        for entry in load.entries:
            known = self.model.of(entry)
            known.num_pins += 1
            if known.piece.kind is Kind.TAILS:
                known.renew(known.piece.end_tokens, self.use)
        self.loads.append(load)

    @precondition(lambda self: self.loads)
    @rule(data=st.data(), reads=st.sampled_from(["all", "all", "some", "nothing"]))
    def end_load(self, data: st.DataObject, reads: str) -> None:
        load = self.loads.pop(data.draw(st.integers(0, len(self.loads) - 1)))
        self._end_load(load, {"all": (), "some": load.entries[::2]}.get(reads, load.entries))

    def _end_load(self, load: Load, unreadable: Sequence[Entry]) -> None:
        known = {entry: self.model.of(entry) for entry in load.entries}
        was_stored = {entry for entry, each in known.items() if each.state is EntryState.STORED}
        chains = {
            each: [part.entry for part in self.model.chain_of(known[each])] for each in was_stored
        }
        self.tier.end_load(load, unreadable)
        for each in known.values():
            each.num_pins -= 1
            self.model.release(each)
        self._follow_removals({Removal.LOAD_FAILED} if unreadable else set())
        is_stored = {entry for entry, each in known.items() if each.state is EntryState.STORED}
        assert is_stored == {
            each for each in was_stored if not {*unreadable}.intersection(chains[each])
        }
        with pytest.raises(TierError, match="has ended before"):
            self.tier.end_load(load)

    @rule(text=texts, upto=st.integers(0, 30))
    def renew(self, text: str, upto: int) -> None:
        self.tier.renew(TextPrefix(text), upto, self.use)
        self.model.renew(text[:upto], self.use)

    @rule(
        text=texts,
        first=st.sampled_from([0, 0, 0, 5, 12]),
        sizes=st.tuples(*[st.integers(1, 3)] * 2),
        ends_at_once=st.booleans(),
    )
    def store_what_is_missing(
        self, text: str, first: int, sizes: tuple[int, int], ends_at_once: bool
    ) -> None:
        prefix = TextPrefix(text)
        pieces = self.tier.lookup(prefix).missing_pieces(first, len(text))
        if self.geometry.needs_rows:
            self._check_missing(text, first, pieces)
        else:
            assert not pieces
        for piece in pieces:
            self._begin_store(prefix, piece, sizes[0])
        self._begin_store(prefix, Piece.tails(len(text)), sizes[1])
        if ends_at_once:
            self.end_all_stores()

    @rule(text=texts, size=st.integers(1, 3), ends_at_once=st.booleans())
    def store_unasked_tails(self, text: str, size: int, ends_at_once: bool) -> None:
        """Store tails that no request asked for, as if they had never been used."""
        use = self.use
        self.use = 0
        self._begin_store(TextPrefix(text), Piece.tails(len(text)), size)
        self.use = use
        if ends_at_once:
            self.end_all_stores()

    @rule(
        data=st.data(),
        grown_units=st.integers(1, 4),
        letter=st.sampled_from("aab"),
        size=st.integers(1, 3),
        ends_at_once=st.sampled_from([True, True, False]),
    )
    def store_continuing_tails(
        self, data: st.DataObject, grown_units: int, letter: str, size: int, ends_at_once: bool
    ) -> None:
        """Store tails that continue stored tails, whichever."""
        bases = [each for each in self.model.wanted_entries if each.piece.kind is Kind.TAILS]
        bases = [each for each in bases if each.state is EntryState.STORED]
        if not bases:
            return
        base_text = bases[data.draw(st.integers(0, len(bases) - 1))].text
        text = base_text + letter * grown_units * UNIT_TOKENS
        self._begin_rows(text)
        if self.model.holding(Kind.TAILS, base_text):
            piece = Piece.continued_tails(len(base_text), len(text))
            self._begin_store(TextPrefix(text), piece, size)
        if ends_at_once:
            self.end_all_stores()
            self.look_up(text, len(text), 0)

    @rule(text=texts, data=st.data())
    def continue_what_is_not_there(self, text: str, data: st.DataObject) -> None:
        base_tokens = data.draw(st.integers(0, len(text) // UNIT_TOKENS - 1)) * UNIT_TOKENS
        states = (EntryState.STORED, EntryState.STORING)
        if (
            not base_tokens
            or self.model.holding(Kind.TAILS, text[:base_tokens])
            or self.model.holding(Kind.TAILS, text, states)
        ):
            return
        piece = Piece.continued_tails(base_tokens, len(text))
        with pytest.raises(TierError, match="which others are to continue, found none"):
            self.tier.begin_store(TextPrefix(text), piece, 1, self.use)

    def _begin_rows(self, text: str) -> None:
        prefix = TextPrefix(text)
        for piece in self.tier.lookup(prefix).missing_pieces(0, len(text)):
            self._begin_store(prefix, piece, 1)

    @rule(text=texts, grown_units=st.integers(1, 3), reads=st.sampled_from([True] * 3 + [False]))
    def take_a_turn(self, text: str, grown_units: int, reads: bool) -> None:
        """Let a request load the stored part of its text, and store the new part."""
        self.next_request()
        self.load(text, 0)
        load = self.loads.pop()
        self._end_load(load, () if reads else load.entries)
        self.store_what_is_missing(text + "a" * grown_units * UNIT_TOKENS, 0, (1, 2), True)

    @rule(text=texts, first_units=st.integers(0, 11), size=st.sampled_from([1, 2, 5, 24]))
    def store_any_rows(self, text: str, first_units: int, size: int) -> None:
        first = first_units * UNIT_TOKENS
        if not self.geometry.needs_rows:
            return
        if (len(text) - 1) // CHUNK_TOKENS * CHUNK_TOKENS <= first < len(text):
            self._begin_store(TextPrefix(text), Piece.rows(first, len(text)), size)

    @rule(data=st.data(), size=st.integers(1, 5), ends_at_once=st.booleans())
    def store_pieces_as_one(self, data: st.DataObject, size: int, ends_at_once: bool) -> None:
        pieces = [each for each in self.model.entries if each.piece.first_tokens % CHUNK_TOKENS]
        rows = [each for each in pieces if each.piece.kind is Kind.ROWS]
        if rows:
            text = rows[data.draw(st.integers(0, len(rows) - 1))].text
            chunk_first = (len(text) - 1) // CHUNK_TOKENS * CHUNK_TOKENS
            self._begin_store(TextPrefix(text), Piece.rows(chunk_first, len(text)), size)
            if ends_at_once:
                self.end_all_stores()

    @rule(data=st.data(), ends_well=st.sampled_from([True, True, False]))
    def end_store(self, data: st.DataObject, ends_well: bool) -> None:
        writing = [each for each in self.model.entries if each.is_being_written]
        if not writing:
            return
        known = writing[data.draw(st.integers(0, len(writing) - 1))]
        self._end_store(known, ends_well)
        with pytest.raises(TierError, match="end each store once"):
            self.tier.finish_store(known.entry)

    @rule()
    def end_all_stores(self) -> None:
        for known in [each for each in self.model.entries if each.is_being_written]:
            self._end_store(known, True)

    @rule(data=st.data())
    def evict_one(self, data: st.DataObject) -> None:
        if not self.model.entries:
            return
        chosen = self.model.entries[data.draw(st.integers(0, len(self.model.entries) - 1))]
        self.tier.evict(lambda entry: entry is chosen.entry)
        expected = [chosen.entry] if self.model.is_evictable(chosen) else []
        assert [entry for entry, _ in self.removed] == expected
        self._follow_removals({Removal.EVICTED})

    @rule(is_reset=st.sampled_from([False] * 9 + [True]))
    def clear(self, is_reset: bool) -> None:
        if not is_reset:
            return
        self.tier.clear()
        for each in list(self.model.entries):
            each.state = EntryState.LEAVING
            self.model.release(each)
        self.model.lost.clear()
        assert {removal for _, removal in self.removed} <= {Removal.CLEARED}
        self.removed.clear()
        self.evictions.clear()

    # The same actions in the model.

    def _check_missing(self, text: str, first: int, pieces: list[Piece]) -> None:
        """Each unit is stored or in one piece, or both if its cut has to be stored again."""
        states = (EntryState.STORED, EntryState.STORING)
        for boundary in range(
            first - first % CHUNK_TOKENS + UNIT_TOKENS, len(text) + 1, UNIT_TOKENS
        ):
            around = [each for each in pieces if each.first_tokens < boundary <= each.end_tokens]
            if self.model.holding(Kind.ROWS, text[:boundary], states):
                assert not any(each.first_tokens % self.geometry.cut_tokens for each in around)
            else:
                assert len(around) == 1

    def _check_runs(self, text: str, after: int, limit: int, stored: set[int]) -> None:
        """Runs are stored rows with gaps between them.

        The first run has all rows that follow without a gap. Each stored chunk lies in one run.
        """
        runs = self.tier.lookup(TextPrefix(text)).find_runs(limit, after)
        assert all(one.end_tokens < other.first_tokens for one, other in pairwise(runs))
        for first, end, entries in runs:
            assert after <= first < end <= limit
            assert stored.issuperset(range(first + UNIT_TOKENS, end + 1, UNIT_TOKENS))
            assert entries[0].piece.first_tokens <= first
            stops = [*(entry.piece.first_tokens for entry in entries[1:]), end]
            for entry, stop in zip(entries, stops, strict=True):
                assert entry.piece.first_tokens < stop <= entry.piece.end_tokens
                assert self.model.of(entry).text[:stop] == text[:stop]
        first_end = after
        while first_end + UNIT_TOKENS in stored:
            first_end += UNIT_TOKENS
        assert first_end == after or runs[0][:2] == (after, first_end)
        found = {token for run in runs for token in range(run.first_tokens, run.end_tokens)}
        for first in range(-(-after // CHUNK_TOKENS), limit // CHUNK_TOKENS):
            chunk = range(first * CHUNK_TOKENS, (first + 1) * CHUNK_TOKENS)
            if stored.issuperset(token + UNIT_TOKENS for token in chunk[::UNIT_TOKENS]):
                assert found.issuperset(chunk)

    def _begin_store(self, prefix: TextPrefix, piece: Piece, size: int) -> None:
        self._begin_in_one_gap(prefix, piece, size)

    def _begin_in_one_gap(self, prefix: TextPrefix, piece: Piece, size: int) -> Entry | Refusal:
        """Store a piece that needs one gap."""
        num_places = 4 if self.has_one_size else max(size, 1 + self.spare_bytes // ALIGNMENT_BYTES)
        size_bytes = num_places * ALIGNMENT_BYTES
        text = prefix.text[: piece.end_tokens]
        num_bytes = size_bytes - 1 - self.spare_bytes
        model = self.model
        states = [
            each.state
            for each in model.holding(piece.kind, text, [EntryState.STORED, EntryState.STORING])
            if piece.kind is Kind.TAILS or each.piece.first_tokens <= piece.first_tokens
        ]
        sample = Entry(self.tier._num_entries, piece, (), -1, size_bytes, self.use, b"", None)
        base: Entry | None = None
        if piece.continues:
            (stored,) = model.holding(Kind.TAILS, text[: piece.first_tokens])
            base = stored.entry
        new = ModelEntry(sample, piece, text, size_bytes, self.use, base=base)
        if not states:
            model.renew(text, self.use)
            model.want(new)
        before = model.copied()
        entry = self.tier.begin_store(prefix, piece, num_bytes, self.use)
        if states:
            wanted = {
                EntryState.STORED: Refusal.ALREADY_STORED,
                EntryState.STORING: Refusal.BEING_STORED,
            }
            assert entry in [wanted[state] for state in states]
            assert not self.evictions
            return entry
        self._check_gap(before, new, entry)
        self._follow_removals({Removal.EVICTED, Removal.REPLACED})
        if isinstance(entry, Entry):
            new.entry = entry
            model.entries.append(new)
            assert (entry.num_bytes, entry.state) == (size_bytes, EntryState.STORING)
        return entry

    def _check_gap(self, model: ModelTier, new: ModelEntry, found: Entry | Refusal) -> None:
        """Check what was evicted for an entry that needs one gap.

        First come useless ends, one after the other, if the entry is tails. Then come entries that
        were chosen at once, each of them as a whole.

        Args:
            model: The model before the first eviction.
        """
        evictions = self.evictions
        size_bytes = new.size_bytes
        recent_use = model.recent_use()
        limit = model.priority(new, recent_use)
        may_be_trimmed = new.piece.kind is Kind.TAILS and self.geometry.needs_rows
        chosen_from: list[ModelEntry] | None = None
        for eviction in evictions:
            each = model.of(eviction.entry)
            if eviction.is_replaced:  # Other entries have the rows that were left of it.
                model.follow(eviction)
                continue
            if chosen_from is None:
                assert model.largest_run_bytes([]) < size_bytes, (
                    "an entry was evicted although there was room"
                )
                useless = self._useless(model, new, recent_use)
                if may_be_trimmed and useless:
                    assert each in useless, "an entry was evicted although others are useless"
                    if eviction is evictions[0]:
                        assert each is min(useless, key=lambda end: model.priority(end, recent_use))
                    self._check_is_end(model, new, eviction)
                    for end in model.lost_ends(eviction):
                        priority = model.priority(each, recent_use, end)
                        assert priority[1] == USELESS and priority < limit
                    model.follow(eviction)
                    continue
                chosen_from = self._may_be_chosen(model, new, recent_use)
                least = min(chosen_from, key=lambda end: model.priority(end, recent_use))
                left = evictions[evictions.index(eviction) :]
                assert least.entry in [chosen.entry for chosen in left]
            assert each in chosen_from and eviction.left_tokens is None
            model.follow(eviction)
        if self.has_one_size:
            assert len(evictions) <= 1
        if isinstance(found, Entry):
            assert model.largest_run_bytes([]) >= size_bytes
            return
        assert chosen_from is None, "a refusal has evicted what a request can use"
        if may_be_trimmed:
            assert not self._useless(model, new, recent_use)
        may_go = self._may_be_chosen(model, new, recent_use)
        may_go = [each for each in may_go if each.use < self.use]
        assert model.largest_run_bytes(may_go) < size_bytes
        assert found is (Refusal.WORTH_LESS if model.ends(new) else Refusal.NO_ROOM)

    def _useless(self, model: ModelTier, new: ModelEntry, recent_use: int) -> list[ModelEntry]:
        """The ends that no request can use, and that have a lower priority than a new entry."""
        limit = model.priority(new, recent_use)
        priorities = [(model.priority(each, recent_use), each) for each in model.ends(new)]
        return [each for found, each in priorities if found[1] == USELESS and found < limit]

    def _may_be_chosen(
        self, model: ModelTier, new: ModelEntry, recent_use: int
    ) -> list[ModelEntry]:
        """The entries that may be evicted as a whole for a new entry."""
        limit = model.priority(new, recent_use)
        others = [*model.entries, new]
        return [
            each
            for each in model.ends(new)
            if model.priority(each, recent_use) < limit
            and (
                not self.geometry.needs_rows
                or model.kept_tokens(each, others) == each.piece.first_tokens
            )
        ]

    def _check_is_end(self, model: ModelTier, new: ModelEntry, eviction: Eviction) -> None:
        """Check that nothing begins behind what is evicted."""
        each = model.of(eviction.entry)
        assert model.is_evictable(each, new)
        if each.piece.kind is Kind.ROWS:
            left_tokens = eviction.left_tokens or each.piece.first_tokens
            assert model.kept_tokens(each, [*model.entries, new]) <= left_tokens

    def _row_map(self, entry: Entry) -> Any:
        return object()

    def _end_store(self, known: ModelEntry, ends_well: bool) -> None:
        is_wanted = known.state is EntryState.STORING
        row_map = self._row_map(known.entry)
        if not ends_well:
            self.tier.fail_store(known.entry)
            known.is_being_written = False
            if is_wanted:
                known.state = EntryState.LEAVING
                for text in self.model.texts_of(known):
                    if not self.model.holding(known.piece.kind, text):
                        self.model.lost[known.piece.kind, text] = Shortfall.FAILED
            self.model.release(known)
            assert known.state is EntryState.GONE
            return
        is_found = self.tier.finish_store(known.entry, row_map)
        known.is_being_written = False
        if not is_wanted:
            assert not is_found
            self.model.release(known)
            return
        self.model.settle(known)
        if is_found:
            assert known.entry.row_map is row_map
        else:
            known.state = EntryState.LEAVING
            self.model.release(known)
        for entry, removal in self.removed:
            assert removal is Removal.REPLACED
            assert entry is not known.entry
            replaced = self.model.of(entry)
            for text in self.model.texts_of(replaced):
                assert len(self.model.holding(replaced.piece.kind, text)) > 1, (
                    "an entry was replaced that was still needed"
                )
        self._follow_removals({Removal.REPLACED})

    def _follow_removals(self, allowed: set[Removal]) -> None:
        for entry, removal in self.removed:
            assert removal in allowed
            self.model.lose(self.model.of(entry), REASONS.get(removal))
        self.removed.clear()
        self.evictions.clear()

    # Conditions that hold after every call.

    @invariant()
    def the_tier_has_what_the_model_has(self) -> None:
        found: dict[int, Any] = {}
        for offset, entry in self.tier._entries.items():
            ends = range(entry.piece.first_tokens + 1, entry.piece.end_tokens + 1)
            uses = [entry.use_at(end) for end in ends] or [entry.use]
            pins = entry.num_pins, entry.is_being_written
            found[offset] = (entry.state, pins, entry.chance, uses)
        assert found == {
            each.entry.offset_bytes: (
                each.state,
                (each.num_pins, each.is_being_written),
                each.chance,
                each.uses,
            )
            for each in self.model.entries
        }

    @invariant()
    def what_continues_others_has_them(self) -> None:
        """All tails that can be found, now or when their store ends, can be read."""
        for each in self.model.wanted_entries:
            assert each.entry.base is each.base
            for base in self.model.chain_of(each)[1:]:
                assert base.state is EntryState.STORED and each.text.startswith(base.text)
        for entry in self.tier._entries.values():
            continuing = [each.entry for each in self.model.wanted_entries if each.base is entry]
            assert set(entry.continued_by or ()) == set(continuing)

    @invariant()
    def places_lie_apart(self) -> None:
        position = 0
        for first, end in sorted(each.span for each in self.model.entries):
            assert first >= position
            position = end
        assert position <= CAPACITY_BYTES

    @invariant()
    def counts_are_right(self) -> None:
        counters = self.tier.counters
        entries = self.model.entries
        assert counters.entries_held == len(entries)
        assert counters.bytes_held == sum(each.size_bytes for each in entries)
        stored = [each for each in entries if each.state is EntryState.STORED]
        assert len(stored) == sum(counters.stored_entries.values()) - sum(
            counters.removed_entries.values()
        )
        assert sum(each.size_bytes for each in stored) == sum(counters.stored_bytes.values()) - sum(
            counters.removed_bytes.values()
        )

    @invariant()
    def each_entry_waits_where_it_is_found(self) -> None:
        """What may be evicted is among the ends, or waits for what begins behind it."""
        order = self.tier._order
        entries = list(self.tier._entries.values())
        wanted = [each for each in entries if each.state in (EntryState.STORING, EntryState.STORED)]
        assert order._behind == Counter(each.key_before for each in wanted if each.key_before)
        waiting = {each: key for key, blocked in order._blocked.items() for each in blocked}
        assert waiting == order._waits_at
        for each, key in waiting.items():
            assert key in order._behind and key in each.keys
        assert order._places == {each: place for place, each in enumerate(order._ends)}
        found = [*waiting, *order._ends]
        assert len(set(found)) == len(found) and set(entries).issuperset(found)
        assert set(found).issuperset(each for each in entries if each.is_evictable)

    def teardown(self) -> None:
        """After all transfers have ended, nothing is pinned, and only stored entries take room."""
        for load in self.loads:
            self.tier.end_load(load)
        for entry in list(self.tier._entries.values()):
            if entry.is_being_written:
                self.tier.finish_store(entry)
        entries = list(self.tier._entries.values())
        assert all(entry.state is EntryState.STORED and not entry.num_pins for entry in entries)
        assert self.tier.counters.bytes_held == sum(entry.num_bytes for entry in entries)
        self.tier.clear()
        assert self.tier.counters.bytes_held == self.tier.counters.entries_held == 0
        assert self.tier._arena.largest_gap_bytes == CAPACITY_BYTES


GEOMETRIES = {
    "rows and tails": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS),
    "rows only": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_tails=False),
    "tails only": TierGeometry(CHUNK_TOKENS, UNIT_TOKENS, needs_rows=False),
}


@pytest.mark.parametrize("has_learned", [False, True], ids=["latest use", "reuse"])
@pytest.mark.parametrize("has_one_size", [False, True], ids=["sizes differ", "one size"])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=GEOMETRIES)
def test_the_tier_does_what_the_model_does(
    geometry: TierGeometry, has_one_size: bool, has_learned: bool
) -> None:
    # If sizes differ, places have spare bytes, too.
    parts: dict[str, object] = {"geometry": geometry, "has_one_size": has_one_size}
    parts["spare_bytes"] = 0 if has_one_size else 70
    parts["has_learned"] = has_learned
    machine = type("Machine", (TierMachine,), parts)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=25,
            stateful_step_count=30,
            suppress_health_check=list(HealthCheck),
        ),
    )
