# SPDX-License-Identifier: Apache-2.0
"""How much of a prefix can be loaded, and why not more.

Changes nothing. Takes time in proportion to the chunks of the prefix, times the units of a chunk
where tails are looked for; how much is stored does not matter.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.store.entries import Entry, Kind
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.pieces import chain_to
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys


class Shortfall(enum.Enum):
    """Why a lookup did not find more. Of several reasons, that of the longest prefix."""

    BELOW_UNIT = "below_unit"
    """No boundary lies between what the device has and the limit."""

    BEING_STORED = "being_stored"
    """The next rows or tails are on their way to the tier."""

    EVICTED = "evicted"
    """They were stored, and have given way."""

    FAILED = "failed"
    """Their store or their load failed."""

    NEVER_STORED = "never_stored"
    """The next rows were not stored, or that is too long ago to be remembered."""

    NO_TAIL = "no_tail"
    """Rows are there, but no tails were kept at any boundary of theirs."""


Lost = RememberedKeys[Shortfall]
"""Why a key leads nowhere: EVICTED or FAILED."""


class PlacedRows(NamedTuple):
    """Rows of another prefix that are loaded to a place of their own.

    Attributes:
        entry: That has them.
        first_tokens: Where they go.
        end_tokens: Where they end there.
        entry_tokens: Of the entry's prefix, before the first of them.
    """

    entry: Entry
    first_tokens: int
    end_tokens: int
    entry_tokens: int


class LoadedRows(NamedTuple):
    """Rows of an entry that a hit loads.

    Attributes:
        entry: It may have more of them.
        first_tokens: Tokens before them.
        end_tokens: Tokens up to their end.
    """

    entry: Entry
    first_tokens: int
    end_tokens: int


@dataclass(frozen=True, slots=True)
class Hit:
    """What can be loaded.

    Attributes:
        prefix: That was looked up.
        after_tokens: What the device has.
        boundary_tokens: Where the request can resume; ``after_tokens`` if nothing can be loaded.
        entries: To load for it: rows in ascending order, then the tails.
        shortfall: Why it is not more; None if there is no later boundary within the limit.
        holes: First and end token of what is computed before the boundary, ascending.
        hole_tails: To load for each hole: the tails at its first token; None where it needs none.
        gap_tokens: Where it would end if nothing behind what is missing were loaded; None if
            nothing is missing.
        placed: Rows that are not of this prefix; ascending. What lies between and before them, from
            the end of the rows on, is in ``holes``.
        heads: Rows of the same prefixes as those, in ``holes``: they are loaded all the same, to be
            looked at before they are computed.
        exact_tokens: Where the rows of this prefix end, if some are placed.
        exact_tails: The tails there; None if it needs none.
        left_out: Entries that are there, and whose rows are computed because that is faster.
    """

    prefix: Prefix
    after_tokens: int
    boundary_tokens: int
    entries: tuple[Entry, ...]
    shortfall: Shortfall | None
    holes: tuple[tuple[int, int], ...] = ()
    hole_tails: tuple[Entry | None, ...] = ()
    gap_tokens: int | None = None
    placed: tuple[PlacedRows, ...] = ()
    heads: tuple[PlacedRows, ...] = ()
    exact_tokens: int = 0
    exact_tails: Entry | None = None
    left_out: tuple[Entry, ...] = ()

    @property
    def all_entries(self) -> tuple[Entry, ...]:
        """Everything that is read for it; what is read twice is there once."""
        tails = [entry for entry in (*self.hole_tails, self.exact_tails) if entry is not None]
        placed = [rows.entry for rows in (*self.placed, *self.heads)]
        return tuple(dict.fromkeys((*self.entries, *tails, *placed)))

    @property
    def loaded_rows(self) -> Iterator[LoadedRows]:
        """What is loaded of each entry with rows, ascending. Of holes, nothing is.

        Rows that a later entry has, too, are those of another prefix in the earlier one::

            found by the key at 8      rows 0 ── 8 ── 16    of another request
            found by the key at 24          rows 8 ──────── 24
        """
        rows = [entry for entry in self.entries if entry.piece.kind is Kind.ROWS]
        for entry, following in itertools.zip_longest(rows, rows[1:]):
            first_tokens, end_tokens = entry.piece.first_tokens, entry.piece.end_tokens
            if following is not None:
                end_tokens = min(end_tokens, following.piece.first_tokens)
            first_tokens = max(first_tokens, self.after_tokens)
            end_tokens = min(end_tokens, self.boundary_tokens)
            for run in _between(self.holes, first_tokens, end_tokens):
                yield LoadedRows(entry, *run)

    @property
    def num_tokens(self) -> int:
        """Tokens from the device's to the boundary."""
        return self.boundary_tokens - self.after_tokens

    @property
    def prefix_entries(self) -> tuple[Entry, ...]:
        """What would be read if nothing behind what is missing were loaded."""
        gap_tokens = self.gap_tokens
        if gap_tokens is None:
            return self.all_entries
        # Rows may go on behind it; tails at it begin and end there.
        return tuple(
            entry
            for entry in self.all_entries
            if entry.piece.first_tokens < gap_tokens or entry.piece.end_tokens == gap_tokens
        )

    @property
    def hole_tokens(self) -> int:
        """Those of them that are missing."""
        return sum(end - first for first, end in self.holes)

    @property
    def loaded_tokens(self) -> int:
        return self.num_tokens - self.hole_tokens

    @property
    def behind_hole_tokens(self) -> int:
        """Tokens behind the first hole that are loaded."""
        if not self.holes:
            return 0
        return self.boundary_tokens - self.holes[0][0] - self.hole_tokens


def find_hit(
    index: Index,
    lost: dict[Kind, Lost],
    geometry: TierGeometry,
    prefix: Prefix,
    limit_tokens: int,
    after_tokens: int = 0,
) -> Hit:
    """The last boundary up to which everything is STORED.

    Args:
        lost: What has gone.
        limit_tokens: The boundary is no later.
        after_tokens: What the device has: rows before it are not needed.
    """
    limit_tokens = geometry.floor(min(limit_tokens, prefix.num_tokens))
    if limit_tokens <= after_tokens:
        return Hit(prefix, after_tokens, after_tokens, (), Shortfall.BELOW_UNIT)
    search = _Search(index, lost, geometry, prefix, limit_tokens, after_tokens)
    rows: list[Entry] = []
    end_tokens, shortfall = limit_tokens, None
    if geometry.needs_rows:
        rows, end_tokens, shortfall = search.find_rows()
    if not geometry.needs_tails:
        return Hit(prefix, after_tokens, end_tokens, tuple(rows), shortfall)
    tails, no_tails = search.find_tails(end_tokens)
    if tails is None:
        return Hit(prefix, after_tokens, after_tokens, (), no_tails or shortfall)
    boundary_tokens = tails.piece.end_tokens
    needed = [entry for entry in rows if entry.piece.first_tokens < boundary_tokens]
    return Hit(prefix, after_tokens, boundary_tokens, (*needed, tails), no_tails or shortfall)


@dataclass(frozen=True, slots=True)
class _Search:
    index: Index
    lost: dict[Kind, Lost]
    geometry: TierGeometry
    prefix: Prefix
    limit_tokens: int
    after_tokens: int

    def find_rows(self) -> tuple[list[Entry], int, Shortfall | None]:
        """Rows without a gap, where they end, and why there."""
        chunk_tokens, unit_tokens = self.geometry.chunk_tokens, self.geometry.unit_tokens
        rows: list[Entry] = []
        position = self.after_tokens
        while position < self.limit_tokens:
            chunk_end = position - position % chunk_tokens + chunk_tokens
            target = min(chunk_end, self.limit_tokens)
            chain = chain_to(self.index, self.prefix, target, position)
            if chain is None:
                first = self.geometry.floor(position)
                for boundary in range(target - unit_tokens, first, -unit_tokens):
                    chain = chain_to(self.index, self.prefix, boundary, position)
                    if chain is not None:
                        rows += chain
                        position = boundary
                        break
                reason = self.reason(Kind.ROWS, position, target)
                return rows, position, reason or Shortfall.NEVER_STORED
            rows += chain
            position = target
        return rows, position, None

    def find_tails(self, end_tokens: int) -> tuple[Entry | None, Shortfall | None]:
        """The last tails at or before a boundary, and why there are none behind them."""
        end_tokens = self.geometry.floor(end_tokens)
        first = self.geometry.floor(self.after_tokens)
        for boundary in range(end_tokens, first, -self.geometry.unit_tokens):
            tails = self.index.stored(Kind.TAILS, self.prefix.key_at(boundary))
            if tails is not None:
                break
        else:
            tails, boundary = None, first
        if boundary == end_tokens:
            return tails, None
        return tails, self.reason(Kind.TAILS, boundary, end_tokens) or Shortfall.NO_TAIL

    def reason(self, kind: Kind, after_tokens: int, upto_tokens: int) -> Shortfall | None:
        """What is known of the longest prefix in a range of boundaries."""
        unit_tokens = self.geometry.unit_tokens
        for boundary in range(upto_tokens, self.geometry.floor(after_tokens), -unit_tokens):
            key = self.prefix.key_at(boundary)
            if self.index.stored(kind, key) is not None:
                continue
            if self.index.storing(kind, key) is not None:
                return Shortfall.BEING_STORED
            reason = self.lost[kind].get(key)
            if reason is not None:
                return reason
        return None


def _between(
    holes: Sequence[tuple[int, int]], first_tokens: int, end_tokens: int
) -> Iterator[tuple[int, int]]:
    """What is left of a range without the holes, which are ascending."""
    for first, end in holes:
        if end <= first_tokens:
            continue
        if first_tokens < min(first, end_tokens):
            yield first_tokens, min(first, end_tokens)
        first_tokens = max(first_tokens, end)
    if first_tokens < end_tokens:
        yield first_tokens, end_tokens
