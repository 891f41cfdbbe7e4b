# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Prefixes that are their own keys, and a model of the host tier that uses a list."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import InitVar, dataclass, field, replace
from typing import ClassVar, NamedTuple

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
    """The model's data of one entry.

    Attributes:
        uses: The latest use of each of its tokens.
        chance: The probability that its tokens come back at all.
        base: The tails that these tails continue; None if they are whole, or rows.
    """

    entry: Entry
    piece: Piece
    text: str
    size_bytes: int
    first_use: InitVar[int]
    state: EntryState = EntryState.STORING
    num_pins: int = 0
    is_being_written: bool = True
    settled: int = 0
    chance: float = 1.0
    base: Entry | None = None
    uses: list[int] = field(init=False)

    def __post_init__(self, first_use: int) -> None:
        self.uses = [first_use] * max(1, self.piece.end_tokens - self.piece.first_tokens)

    @property
    def use(self) -> int:
        """The latest use of the last token."""
        return self.uses[-1]

    def use_at(self, end_tokens: int) -> int:
        """The latest use of the token before a boundary."""
        return self.uses[max(0, end_tokens - self.piece.first_tokens - 1)]

    def renew(self, end_tokens: int, use: int) -> None:
        """Note a use of the tokens before a boundary."""
        num_used = max(1, end_tokens - self.piece.first_tokens)
        self.uses = [max(use, each) for each in self.uses[:num_used]] + self.uses[num_used:]

    @property
    def text_before(self) -> str:
        """The text of the rows without which the entry is useless. Tails need those before them."""
        is_rows = self.piece.kind is Kind.ROWS
        return self.text[: self.piece.first_tokens] if is_rows else self.text

    @property
    def span(self) -> tuple[int, int]:
        return self.entry.offset_bytes, self.entry.offset_bytes + self.size_bytes


USELESS = -1.0
"""The density of what no request can use."""


class Eviction(NamedTuple):
    """An entry has lost its tokens behind ``left_tokens``, or was removed.

    Attributes:
        left_tokens: None if the entry was removed.
        num_begun: The number of entries that had a place before.
    """

    entry: Entry
    left_tokens: int | None
    is_replaced: bool
    num_begun: int


@dataclass
class ModelTier:
    """A model that answers by looking at all entries.

    Attributes:
        density: The expected density of the cut whose first unit ends a text.
        tail_density: The expected density of the tails at the end of a text.
        place_bytes: The size of a place for rows that may lose their end.
        small_tails_bytes: Tails of this size or less may be evicted late if they were used last.
        is_kept: Whether a plain LRU would have a cut with a key and a latest use, while such an LRU
            finds the most.
    """

    geometry: TierGeometry
    capacity_bytes: int
    density: Callable[[bytes], float]
    tail_density: Callable[[bytes], float]
    place_bytes: Callable[[Piece], int] | None = None
    small_tails_bytes: int = 0
    is_kept: Callable[[bytes, int], bool] = lambda key, use: False
    entries: list[ModelEntry] = field(default_factory=list)
    lost: dict[tuple[Kind, str], Shortfall] = field(default_factory=dict)
    wanted: list[list[int]] = field(default_factory=lambda: [[0, 0]])
    num_settled: int = 0

    def of(self, entry: Entry) -> ModelEntry:
        return next(each for each in self.entries if each.entry is entry)

    def is_evictable(self, each: ModelEntry, *new: ModelEntry) -> bool:
        """Whether an entry may be evicted. Tails that others continue may not."""
        is_continued = any(other.base is each.entry for other in [*self.wanted_entries, *new])
        return each.state is EntryState.STORED and not each.num_pins and not is_continued

    @property
    def wanted_entries(self) -> list[ModelEntry]:
        """The entries that are stored or being stored."""
        states = (EntryState.STORED, EntryState.STORING)
        return [each for each in self.entries if each.state in states]

    def chain_of(self, each: ModelEntry) -> list[ModelEntry]:
        """An entry, and all that it continues."""
        return [each] if each.base is None else [each, *self.chain_of(self.of(each.base))]

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
        for boundary, leading in self.walk_back(text):
            if leading.use_at(boundary) >= use:
                return
            leading.renew(self.geometry.cut_end(boundary), use)

    def walk_back(self, text: str, first_tokens: int = 0) -> Iterator[tuple[int, ModelEntry]]:
        """The rows from the end of a text back, each from the entry that its key leads to.

        Rows may be in a store.
        """
        boundary = len(text) - len(text) % self.geometry.unit_tokens
        states = (EntryState.STORED, EntryState.STORING)
        while boundary > first_tokens and self.geometry.needs_rows:
            holding = self.holding(Kind.ROWS, text[:boundary], states)
            if not holding:
                boundary -= self.geometry.unit_tokens
                continue
            leading = self.leading(holding)
            yield boundary, leading
            boundary = leading.piece.first_tokens

    def leading(self, holding: list[ModelEntry]) -> ModelEntry:
        """The entry to which a key leads, if all of these hold the rows before it."""
        return min(
            holding,
            key=lambda each: (
                each.piece.first_tokens,
                -each.piece.end_tokens,
                each.state is EntryState.STORING,
                each.settled,
                each.entry.number,
            ),
        )

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
        return not self.geometry.needs_tails or any(
            all(part in loaded and text.startswith(part.text) for part in self.chain_of(each))
            for each in tails
        )

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
        # The tier reports those that were stored.
        for other in self.wanted_entries:
            if other.base is each.entry and other.state is EntryState.STORING:
                self.lose(other, reason)

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

    def trim(self, each: ModelEntry, end_tokens: int, reason: Shortfall | None) -> None:
        """Let an entry lose its tokens behind a boundary."""
        assert self.place_bytes is not None
        texts = self.texts_of(each)
        num_kept = end_tokens - each.piece.first_tokens
        each.piece = each.piece._replace(end_tokens=end_tokens)
        each.text = each.text[:end_tokens]
        each.uses = each.uses[:num_kept]
        each.size_bytes = self.place_bytes(each.piece)
        # Keys lead to the entry that was made longest ago, if several are equal.
        self.num_settled += 1
        each.settled = self.num_settled
        for text in texts[num_kept // self.geometry.unit_tokens :]:
            if reason is not None and not self.holding(Kind.ROWS, text):
                self.lost[Kind.ROWS, text] = reason

    def kept_tokens(self, each: ModelEntry, others: Iterable[ModelEntry]) -> int:
        """The token down to which an entry may lose its end."""
        kind, first_tokens, end_tokens = each.piece
        if kind is Kind.TAILS:
            return first_tokens
        kept = first_tokens
        for text in self.texts_of(each):
            begun = [other for other in others if other.text_before == text]
            if any(other.state in (EntryState.STORED, EntryState.STORING) for other in begun):
                kept = len(text)
        if kept == first_tokens:
            return first_tokens
        return min(end_tokens, self.geometry.cut_end(kept))

    def priority(self, each: ModelEntry, recent_use: int, end_tokens: int = 0) -> tuple[float, ...]:
        """Entries with the lowest priority are evicted first.

        Rows that were used last are evicted after all others, and what no request can use before
        all others. Small tails are worth what the rows before them are. Without the rows behind
        ``end_tokens``, an entry has another priority.
        """
        piece = each.piece
        end_tokens = end_tokens or piece.end_tokens
        use = each.use_at(end_tokens)
        first_unit = self.geometry.cut_start(end_tokens - 1) + self.geometry.unit_tokens
        rows = each
        if piece.kind is Kind.TAILS:
            states = (EntryState.STORED, EntryState.STORING)
            holding = self.holding(Kind.ROWS, each.text, states)
            is_small = each.base is None and each.size_bytes <= self.small_tails_bytes
            if not (holding and is_small and each.use):
                is_orphan = self.is_orphan(piece, each.text)
                density = USELESS if is_orphan else self.tail_density(each.text.encode())
                return False, density, use, -end_tokens, piece.kind, each.entry.number
            rows = self.leading(holding)
            use = max(use, rows.use_at(end_tokens))
        key = each.text[:first_unit].encode()
        density = rows.chance * self.density(key)
        is_recent = use >= recent_use and rows.chance >= 0.5
        if rows.chance >= 0.5 and self.is_kept(key, use):
            density = math.inf
        is_tails = piece.kind is Kind.TAILS
        is_useful = is_tails or is_recent or self.may_be_resumed(each, end_tokens)
        if not is_useful:
            density = USELESS
        return is_recent, density, use, -end_tokens, piece.kind, each.entry.number

    def may_be_resumed(self, each: ModelEntry, end_tokens: int) -> bool:
        """Whether a request can resume at the last cut of some rows, or behind it.

        New rows are stored for tails that follow.
        """
        if not self.geometry.needs_tails or each.state is EntryState.STORING:
            return True
        cut_start = max(each.piece.first_tokens, self.geometry.cut_start(end_tokens - 1))
        return self._has_tails_behind(
            [text for text in self.texts_of(each) if cut_start < len(text) <= end_tokens]
        )

    def _has_tails_behind(self, texts: list[str]) -> bool:
        """Whether there are tails at one of these boundaries, or where rows from there lead to."""
        return any(
            other.piece.kind is Kind.TAILS or self._has_tails_behind(self.texts_of(other))
            for other in self.entries
            if other.state in (EntryState.STORED, EntryState.STORING) and other.text_before in texts
        )

    def ends(self, new: ModelEntry) -> list[ModelEntry]:
        """The entries that may be evicted, or that may lose their end, while a new one is begun."""
        others = [*self.entries, new]
        return [
            each
            for each in self.entries
            if self.is_evictable(each, new)
            and (
                each.piece.kind is Kind.TAILS
                or not self.geometry.needs_rows
                or self.kept_tokens(each, others) < each.piece.end_tokens
            )
        ]

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

    # What was evicted, one after the other.

    def copied(self) -> ModelTier:
        """A model in which entries can be evicted without a trace."""
        return replace(self, entries=[copy.copy(each) for each in self.entries], lost={})

    def follow(self, eviction: Eviction) -> None:
        """Evict as the tier did."""
        each = self.of(eviction.entry)
        if eviction.left_tokens is None:
            self.lose(each, None)
        else:
            self.trim(each, eviction.left_tokens, None)

    def lost_ends(self, eviction: Eviction) -> list[int]:
        """The ends of the cuts that an eviction takes, the last one first."""
        each = self.of(eviction.entry)
        if each.piece.kind is Kind.TAILS:
            return [each.piece.end_tokens]
        ends = self.geometry.cut_ends(*each.piece[1:])
        left_tokens = eviction.left_tokens or each.piece.first_tokens
        assert left_tokens in (each.piece.first_tokens, *ends[:-1])
        return [end for end in reversed(ends) if end > left_tokens]
