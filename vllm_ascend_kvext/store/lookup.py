# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Looks a prefix up: how much of it is stored, why not more, and which pieces are missing.

A lookup walks back from a boundary. The key of the boundary leads to an entry, this entry begins at
an earlier boundary of the same prefix, and so on. An entry never reaches into the next chunk. A
chunk is stored as a whole, or in pieces that were added as the prompt grew, or for which there were
gaps in host memory. A cut has at most `MAX_PIECES` pieces. If a cut needed more pieces, the cut is
stored again as a whole, and its pieces are removed.

A lookup changes nothing. The time of a lookup grows with the number of chunks of the prefix, and
with the number of units in chunks that have a stored neighbour. The time of a search for all tails
grows with the units of the range.
"""

from __future__ import annotations

import enum
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.store.entries import Entry, Kind, Piece
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry
from vllm_ascend_kvext.store.remembered_keys import RememberedKeys

MAX_PIECES = 4
"""The most pieces of a cut. Each piece costs a load one more section per group. Storing a cut again
costs all its rows."""


class Shortfall(enum.Enum):
    """Why a lookup did not find more. If there are several reasons, the longest prefix decides."""

    BELOW_UNIT = "below_unit"
    """There is no boundary between the device's tokens and the limit."""

    BEING_STORED = "being_stored"
    """The next rows or tails are being stored."""

    EVICTED = "evicted"
    """The next rows or tails were stored, and have been evicted."""

    FAILED = "failed"
    """The store or the load of the next rows or tails failed."""

    NEVER_STORED = "never_stored"
    """The next rows were never stored, or too long ago to be remembered."""

    NO_TAIL = "no_tail"
    """Rows are stored, but no tails are stored at any of their boundaries."""


Lost = RememberedKeys[Shortfall]
"""Maps a key to the reason why it leads to no entry: EVICTED or FAILED."""


class StoredRows(NamedTuple):
    """Rows of one entry at some tokens of a prefix. The entry may have more rows."""

    entry: Entry
    first_tokens: int
    end_tokens: int


class StoredRun(NamedTuple):
    """Stored rows without a gap.

    Attributes:
        first_tokens: Where the rows begin. The first entry may begin earlier.
    """

    first_tokens: int
    end_tokens: int
    entries: tuple[Entry, ...]

    @property
    def rows(self) -> list[StoredRows]:
        """The rows that are read from each entry.

        If two entries have the same tokens, they are read from the later entry. The earlier entry
        may have the rows of another prefix there::

            found by the key at 8      rows 0 ── 8 ── 16    of another request
            found by the key at 24          rows 8 ──────── 24
        """
        rows = []
        run_tokens, end_tokens, entries = self
        for entry in reversed(entries):
            first_tokens = entry.piece.first_tokens
            if first_tokens < run_tokens:
                first_tokens = run_tokens
            if first_tokens < end_tokens:
                rows.append(StoredRows(entry, first_tokens, end_tokens))
                end_tokens = first_tokens
        return rows[::-1]


@dataclass(frozen=True, slots=True)
class Hit:
    """The part of a prefix that can be loaded without a gap.

    Attributes:
        run: The rows from the end of the device's tokens to where the request can resume; empty if
            nothing can be loaded. It has no entries if the model has no full attention.
        tails: The tails at the boundary; None if the model has none, or if nothing can be loaded.
        shortfall: Why the hit is not longer; None if the limit has no later boundary.
    """

    prefix: Prefix
    run: StoredRun
    tails: Entry | None = None
    shortfall: Shortfall | None = None

    @property
    def after_tokens(self) -> int:
        """The number of tokens that the device has."""
        return self.run.first_tokens

    @property
    def boundary_tokens(self) -> int:
        """The boundary at which the request can resume."""
        return self.run.end_tokens


@dataclass(frozen=True, slots=True)
class Lookup:
    """The lookup of one prefix."""

    index: Index
    geometry: TierGeometry
    prefix: Prefix

    def find_hit(self, lost: Mapping[Kind, Lost], limit_tokens: int, after_tokens: int) -> Hit:
        """Find the last boundary up to which everything is STORED.

        Args:
            lost: For each kind, the reasons why keys lead to no entry.
            limit_tokens: The latest boundary that may be found.
            after_tokens: The number of tokens that the device has. Rows before are not needed.
        """
        limit_tokens = self._limit(limit_tokens)
        nothing = Hit(self.prefix, StoredRun(after_tokens, after_tokens, ()))
        if limit_tokens <= after_tokens:
            return replace(nothing, shortfall=Shortfall.BELOW_UNIT)
        run = StoredRun(after_tokens, limit_tokens, ())
        shortfall: Shortfall | None = None
        if self.geometry.needs_rows:
            run = self.first_run(limit_tokens, after_tokens)
            end_tokens = run.end_tokens
            if end_tokens < limit_tokens:
                chunk_end = self.geometry.chunk_end(end_tokens)
                missed = self._boundaries(end_tokens, min(chunk_end, limit_tokens))
                shortfall = self._why_lost(lost, Kind.ROWS, missed) or Shortfall.NEVER_STORED
        if not self.geometry.needs_tails:
            return Hit(self.prefix, run, shortfall=shortfall)
        boundaries = self._boundaries(after_tokens, run.end_tokens)
        num_before = self.index.upto_stored(Kind.TAILS, self.prefix.keys_at(boundaries))
        if missed := boundaries[num_before:]:
            shortfall = self._why_lost(lost, Kind.TAILS, missed) or Shortfall.NO_TAIL
        if not num_before:
            return replace(nothing, shortfall=shortfall)
        boundary = boundaries[num_before - 1]
        tails = self.index.stored(Kind.TAILS, self.prefix.key_at(boundary))
        return Hit(self.prefix, run._replace(end_tokens=boundary), tails, shortfall)

    def first_run(
        self, limit_tokens: int, after_tokens: int, with_storing: bool = False
    ) -> StoredRun:
        """The rows without a gap from a token on; an empty run if the first row is not stored."""
        limit_tokens = self._limit(limit_tokens)
        entries: list[Entry] = []
        position = after_tokens
        while position < limit_tokens:
            target = min(self.geometry.chunk_end(position), limit_tokens)
            runs = self.runs_of_chunk(position, target, with_storing)
            if not runs or runs[0].first_tokens > position:
                break
            entries += runs[0].entries
            position = runs[0].end_tokens
            if position < target:
                break
        return StoredRun(after_tokens, position, tuple(entries))

    def find_runs(self, limit_tokens: int, after_tokens: int) -> list[StoredRun]:
        """The stored rows, ascending.

        If nothing of a prompt is stored, the search costs one look-up per chunk. So rows in the
        middle of a chunk may be left out if their neighbours are not stored.
        """
        limit_tokens = self._limit(limit_tokens)
        runs: list[StoredRun] = []
        entries: list[Entry] = []
        position = after_tokens
        first_tokens = after_tokens
        end_tokens = after_tokens
        while position < limit_tokens:
            target = min(self.geometry.chunk_end(position), limit_tokens)
            for run in self.runs_of_chunk(position, target, at_gap=position != end_tokens):
                if run.first_tokens != end_tokens:
                    if entries:
                        runs.append(StoredRun(first_tokens, end_tokens, tuple(entries)))
                    entries = []
                    first_tokens = run.first_tokens
                entries += run.entries
                end_tokens = run.end_tokens
            position = target
        if entries:
            runs.append(StoredRun(first_tokens, end_tokens, tuple(entries)))
        return runs

    def find_all_tails(self, limit_tokens: int, after_tokens: int) -> list[Entry]:
        """The stored tails, ascending. Tails at ``after_tokens`` are included."""
        boundaries = self._boundaries(max(0, after_tokens - 1), self._limit(limit_tokens))
        return self.index.all_stored(Kind.TAILS, self.prefix.keys_at(boundaries))

    def runs_of_chunk(
        self, first_tokens: int, end_tokens: int, with_storing: bool = False, at_gap: bool = False
    ) -> list[StoredRun]:
        """The stored rows of a part of one chunk; the part is not empty.

        Args:
            first_tokens: Where the part begins.
            end_tokens: Where the part ends.
            with_storing: Whether entries that are being stored count, too.
            at_gap: Whether the rows before the part are not stored. The part is then searched only
                if its last row is stored.
        """
        find = self.index.present if with_storing else self.index.stored
        last = find(Kind.ROWS, self.prefix.key_at(end_tokens))
        if last is not None and last.piece.first_tokens <= first_tokens:
            return [StoredRun(first_tokens, end_tokens, (last,))]  # This is the usual case.
        if last is None:
            if not at_gap:
                end_tokens = self._end_before(first_tokens, end_tokens, with_storing)
            if at_gap or end_tokens == first_tokens:
                return []
        runs: list[StoredRun] = []
        for boundary, entry in self.walk_back(first_tokens, end_tokens, with_storing):
            begin = max(entry.piece.first_tokens, first_tokens)
            if runs and runs[-1].first_tokens == boundary:
                later = runs.pop()
                runs.append(StoredRun(begin, later.end_tokens, (entry, *later.entries)))
            else:
                runs.append(StoredRun(begin, boundary, (entry,)))
        return runs[::-1]

    def walk_back(
        self, first_tokens: int, end_tokens: int, with_storing: bool = False
    ) -> Iterator[tuple[int, Entry]]:
        """The entries with rows of a range, the last entry first.

        Yields:
            The token up to which an entry is read, and the entry.
        """
        find = self.index.present if with_storing else self.index.stored
        key_at = self.prefix.key_at
        while end_tokens > first_tokens:
            entry = find(Kind.ROWS, key_at(end_tokens))
            if entry is None:
                chunk_start = max(first_tokens, self.geometry.chunk_start(end_tokens))
                end_tokens = self._end_before(chunk_start, end_tokens, with_storing)
            else:
                yield end_tokens, entry
                end_tokens = entry.piece.first_tokens

    def missing_pieces(self, first_tokens: int, end_tokens: int) -> list[Piece]:
        """The pieces to store so that all rows up to a boundary can be read.

        Rows that are stored or being stored are left out, unless a cut would get too many pieces.

        Args:
            first_tokens: Chunks that end at or before this token are not examined.
            end_tokens: The boundary.
        """
        if not self.geometry.needs_rows:
            return []
        end_tokens = self._limit(end_tokens)
        chunk_tokens = self.geometry.chunk_tokens
        first_tokens -= first_tokens % chunk_tokens
        pieces: list[Piece] = []
        for chunk_first in range(first_tokens, end_tokens, chunk_tokens):
            chunk_end = min(chunk_first + chunk_tokens, end_tokens)
            missing: list[Piece] = []
            begins: list[int] = []  # Where the pieces before the gap begin.
            position = chunk_first
            for run in self.runs_of_chunk(chunk_first, chunk_end, with_storing=True):
                if position < run.first_tokens:
                    self._add_missing(missing, begins, position, run.first_tokens)
                begins += [entry.piece.first_tokens for entry in run.entries]
                position = run.end_tokens
            if position < chunk_end:
                self._add_missing(missing, begins, position, chunk_end)
            pieces += missing
        return pieces

    def _add_missing(
        self, missing: list[Piece], begins: list[int], gap_tokens: int, end_tokens: int
    ) -> None:
        """Add rows that are missing. A cut that is stored again as a whole needs no other piece.

        Args:
            missing: The missing pieces of the chunk before the gap, ascending.
            begins: Where the pieces of the chunk before the gap begin, ascending.
        """
        begin = self._gap_begin(gap_tokens, begins)
        while missing and missing[-1].end_tokens > begin:
            piece = missing.pop()
            if piece.first_tokens < begin:
                missing.append(Piece.rows(piece.first_tokens, begin))
        missing.append(Piece.rows(begin, end_tokens))
        del begins[bisect_left(begins, begin) :]
        begins.append(begin)

    def _gap_begin(self, gap_tokens: int, begins: Sequence[int]) -> int:
        """Where to begin to store rows that are missing from a token on.

        Args:
            begins: Where the pieces before this token begin, ascending.
        """
        cut_start = self.geometry.cut_start(gap_tokens)
        num_pieces = 1 + len(begins) - bisect_right(begins, cut_start)
        return gap_tokens if num_pieces < MAX_PIECES else cut_start

    def keys_of(self, piece: Piece) -> tuple[bytes, ...]:
        """The keys of the boundaries at which a piece can be found, ascending.

        Raises:
            TierError: If the piece is not cut at units, or reaches into a second chunk.
        """
        kind, first_tokens, end_tokens = piece
        geometry = self.geometry
        unit_tokens = self.geometry.unit_tokens
        if first_tokens >= 0 and not (first_tokens % unit_tokens or end_tokens % unit_tokens):
            if kind is Kind.TAILS and 0 < first_tokens <= end_tokens:
                return (self.prefix.key_at(end_tokens),)
            if kind is Kind.ROWS and geometry.chunk_start(end_tokens) <= first_tokens < end_tokens:
                return tuple(self.prefix.keys_at(self._boundaries(first_tokens, end_tokens)))
        raise TierError(
            f"host tier: expected rows within one chunk of {geometry.chunk_tokens} tokens, or "
            f"tails at one boundary, cut at multiples of {unit_tokens}, found {piece}; store the "
            "pieces that missing_pieces names"
        )

    def _end_before(self, first_tokens: int, boundary_tokens: int, with_storing: bool) -> int:
        """The last boundary within a range, before the end of the range, whose rows are stored.

        The method is called only if the rows before the end of the range are not stored. One slice
        of keys takes less time than a look-up per boundary.
        """
        upto = self.index.upto_present if with_storing else self.index.upto_stored
        unit_tokens = self.geometry.unit_tokens
        first = first_tokens - first_tokens % unit_tokens + unit_tokens
        boundaries = range(first, boundary_tokens, unit_tokens)
        num_before = upto(Kind.ROWS, self.prefix.keys_at(boundaries))
        return boundaries[num_before - 1] if num_before else first_tokens

    def _limit(self, limit_tokens: int) -> int:
        return self.geometry.floor(min(limit_tokens, self.prefix.num_tokens))

    def _boundaries(self, after_tokens: int, upto_tokens: int) -> range:
        """The boundaries behind a token, up to a boundary."""
        unit_tokens = self.geometry.unit_tokens
        return range(self.geometry.floor(after_tokens) + unit_tokens, upto_tokens + 1, unit_tokens)

    def _why_lost(
        self, lost: Mapping[Kind, Lost], kind: Kind, boundaries: range
    ) -> Shortfall | None:
        """Why the latest of some boundaries leads to no entry; None if that is not known."""
        for boundary in reversed(boundaries):
            key = self.prefix.key_at(boundary)
            if self.index.stored(kind, key) is not None:
                continue
            if self.index.storing(kind, key) is not None:
                return Shortfall.BEING_STORED
            reason = lost[kind].get(key)
            if reason is not None:
                return reason
        return None
