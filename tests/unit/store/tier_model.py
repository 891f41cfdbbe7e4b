# SPDX-License-Identifier: Apache-2.0
"""Prefixes that are their own keys, and a model of the host tier that uses a list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from vllm_ascend_kvext.holes.load_plan import LoadPlan
from vllm_ascend_kvext.store.entries import Entry, EntryState, Kind, Piece
from vllm_ascend_kvext.store.lookup import Shortfall
from vllm_ascend_kvext.store.prefix import TierGeometry

ALIGNMENT_BYTES = 64


@dataclass(frozen=True)
class TextPrefix:
    """A prefix as a text. One letter is one token, and the key of a prefix is its text."""

    text: str
    key_space: ClassVar[str] = ""

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def key_at(self, boundary_tokens: int) -> bytes:
        assert 0 < boundary_tokens <= len(self.text)
        return self.text[:boundary_tokens].encode()

    def keys_at(self, boundaries: range) -> list[bytes]:
        return [self.key_at(boundary) for boundary in boundaries]


@dataclass
class ModelEntry:
    """The model's data of one entry."""

    entry: Entry
    piece: Piece
    text: str
    size_bytes: int
    use: int
    state: EntryState = EntryState.STORING
    num_pins: int = 0
    is_being_written: bool = True
    settled: int = 0

    @property
    def is_evictable(self) -> bool:
        return self.state is EntryState.STORED and not self.num_pins

    @property
    def span(self) -> tuple[int, int]:
        return self.entry.offset_bytes, self.entry.offset_bytes + self.size_bytes


@dataclass
class ModelTier:
    """A model that answers by looking at all entries.

    Attributes:
        density: The expected density of the chunk whose first unit ends a text.
        ends_first: Whether rows are evicted only after the rows that follow them.
    """

    geometry: TierGeometry
    capacity_bytes: int
    density: Callable[[bytes], float]
    ends_first: bool = True
    entries: list[ModelEntry] = field(default_factory=list)
    lost: dict[tuple[Kind, str], Shortfall] = field(default_factory=dict)
    wanted: list[list[int]] = field(default_factory=lambda: [[0, 0]])

    num_settled: int = 0

    def of(self, entry: Entry) -> ModelEntry:
        return next(each for each in self.entries if each.entry is entry)

    def holding(
        self, kind: Kind, text: str, states: Iterable[EntryState] = (EntryState.STORED,)
    ) -> list[ModelEntry]:
        """The entries that hold the tokens just before the end of a text."""
        end_tokens = len(text)
        return [
            each
            for each in self.entries
            if each.state in states
            and each.piece.kind is kind
            and each.text[:end_tokens] == text
            and (kind is Kind.TAILS or each.piece.first_tokens < end_tokens)
            and (kind is Kind.ROWS or each.piece.end_tokens == end_tokens)
        ]

    def find(self, prefix: TextPrefix, limit_tokens: int, after_tokens: int) -> tuple[int, object]:
        """The boundary and the shortfall of a lookup."""
        text = prefix.text
        unit_tokens = self.geometry.unit_tokens
        boundaries = [
            tokens
            for tokens in range(unit_tokens, min(limit_tokens, len(text)) + 1, unit_tokens)
            if tokens > after_tokens
        ]
        if not boundaries:
            return after_tokens, Shortfall.BELOW_UNIT
        with_rows = boundaries
        if self.geometry.needs_rows:
            with_rows = []
            for tokens in boundaries:
                if not self.holding(Kind.ROWS, text[:tokens]):
                    break
                with_rows.append(tokens)
        hits = with_rows
        if self.geometry.needs_tails:
            hits = [tokens for tokens in with_rows if self.holding(Kind.TAILS, text[:tokens])]
        hit = max(hits, default=after_tokens)
        end = max(with_rows, default=after_tokens)
        if hit < end:
            missed = [tokens for tokens in with_rows if tokens > hit]
            return hit, self._known(Kind.TAILS, text, missed) or Shortfall.NO_TAIL
        if end < boundaries[-1]:
            chunk_tokens = self.geometry.chunk_tokens
            chunk_end = end - end % chunk_tokens + chunk_tokens
            missed = [tokens for tokens in boundaries if end < tokens <= chunk_end]
            return hit, self._known(Kind.ROWS, text, missed) or Shortfall.NEVER_STORED
        return hit, None

    def settle(self, each: ModelEntry) -> None:
        """Note that an entry is stored."""
        self.num_settled += 1
        each.state = EntryState.STORED
        each.settled = self.num_settled

    def renew(self, text: str, use: int) -> None:
        """Renew all rows of a prefix from its end, up to the first renewed row.

        Rows may be in a store.
        """
        boundary = len(text) - len(text) % self.geometry.unit_tokens
        while boundary > 0 and self.geometry.needs_rows:
            states = (EntryState.STORED, EntryState.STORING)
            holding = self.holding(Kind.ROWS, text[:boundary], states)
            if not holding:
                boundary -= self.geometry.unit_tokens
                continue
            leading = min(
                holding,
                key=lambda each: (
                    each.piece.first_tokens,
                    -each.piece.end_tokens,
                    each.state is EntryState.STORING,
                    each.settled,
                    each.entry.number,
                ),
            )
            if leading.use >= use:
                return
            leading.use = use
            boundary = leading.piece.first_tokens

    def _known(self, kind: Kind, text: str, boundaries: list[int]) -> Shortfall | None:
        for tokens in reversed(boundaries):
            part = text[:tokens]
            if self.holding(kind, part):
                continue
            if self.holding(kind, part, [EntryState.STORING]):
                return Shortfall.BEING_STORED
            if (kind, part) in self.lost:
                return self.lost[kind, part]
        return None

    def can_load(self, plan: LoadPlan) -> bool:
        """Whether the entries of a plan are enough to resume at its boundary."""
        if not plan.num_tokens:
            return True
        text = plan.prefix.text  # type: ignore[attr-defined]
        loaded = [self.of(entry) for entry in plan.entries]
        unit_tokens = self.geometry.unit_tokens
        for first in range(plan.after_tokens, plan.boundary_tokens, unit_tokens):
            needed = text[: first - first % unit_tokens + unit_tokens]
            has_rows = any(each in loaded for each in self.holding(Kind.ROWS, needed))
            if self.geometry.needs_rows and not has_rows:
                return False
        tails = self.holding(Kind.TAILS, text[: plan.boundary_tokens])
        return not self.geometry.needs_tails or any(each in loaded for each in tails)

    def texts_of(self, each: ModelEntry) -> list[str]:
        """The prefixes at whose ends an entry can be found."""
        if each.piece.kind is Kind.TAILS:
            return [each.text]
        first, end = each.piece.first_tokens, each.piece.end_tokens
        unit_tokens = self.geometry.unit_tokens
        return [each.text[:tokens] for tokens in range(first + unit_tokens, end + 1, unit_tokens)]

    def lose(self, each: ModelEntry, reason: Shortfall | None) -> None:
        """Let an entry not be found any more."""
        each.state = EntryState.LEAVING
        for text in self.texts_of(each):
            if reason is not None and not self.holding(each.piece.kind, text):
                self.lost[each.piece.kind, text] = reason
        self.release(each)

    def release(self, each: ModelEntry) -> None:
        if each.state is EntryState.LEAVING and not (each.num_pins or each.is_being_written):
            each.state = EntryState.GONE
            self.entries.remove(each)

    def want(self, each: ModelEntry) -> None:
        """Note that a place for an entry is requested."""
        if self.wanted[-1][0] < each.use:
            self.wanted.append([each.use, 0])
        self.wanted[-1][1] += each.size_bytes

    def recent_use(self) -> int:
        """The first of the latest uses that together requested at most a sixth of the tier."""
        recent_use = self.wanted[-1][0] + 1
        sum_bytes = 0
        for use, num_bytes in reversed(self.wanted):
            sum_bytes += num_bytes
            if sum_bytes > self.capacity_bytes / 6:
                break
            recent_use = use
        return recent_use

    def priority(self, each: ModelEntry, recent_use: int) -> tuple[float, ...]:
        """Entries with the lowest priority are evicted first.

        Recently used entries are evicted last.
        """
        piece = each.piece
        first_unit = self.geometry.chunk_start(piece.end_tokens) + self.geometry.unit_tokens
        density = self.density(each.text[:first_unit].encode())
        is_orphan = self.is_orphan(piece, each.text)
        if is_orphan:
            density = -1
        is_recent = each.use >= recent_use and not is_orphan
        return is_recent, density, each.use, -piece.end_tokens, piece.kind, each.entry.number

    def is_end(self, each: ModelEntry, others: Iterable[ModelEntry]) -> bool:
        """Whether none of the others begins right behind the rows of this entry."""
        if not self.ends_first or each.piece.kind is Kind.TAILS or not self.geometry.needs_rows:
            return True
        texts = self.texts_of(each)
        return not any(
            other.text[: other.piece.first_tokens] in texts
            for other in others
            if other.state in (EntryState.STORED, EntryState.STORING)
        )

    def is_orphan(self, piece: Piece, text: str) -> bool:
        """Whether a piece is tails whose rows are gone."""
        states = (EntryState.STORED, EntryState.STORING)
        return (
            piece.kind is Kind.TAILS
            and self.geometry.needs_rows
            and not self.holding(Kind.ROWS, text, states)
        )

    def largest_run_bytes(self, may_free: list[ModelEntry]) -> int:
        """The size of the largest hole that can be made by freeing these entries."""
        largest = 0
        position = 0
        for each in sorted(self.entries, key=lambda each: each.span):
            if each not in may_free:
                largest = max(largest, each.span[0] - position)
                position = each.span[1]
        return max(largest, self.capacity_bytes - position)
