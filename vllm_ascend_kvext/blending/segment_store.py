# SPDX-License-Identifier: Apache-2.0
"""The segments in a host tier: what is stored of one, and what has to be stored.

Segments share the tier with prompts: its room, its order of eviction, its counters. Their keys are
their own, see ``segment_prefix``. They are stored by chunks, the last one rounded up to a unit, so
that long segments are evicted from their ends on like prompts. Moves no bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vllm_ascend_kvext.blending.segment_prefix import SegmentPrefix, key_space
from vllm_ascend_kvext.blending.segment_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry
from vllm_ascend_kvext.store.lookup import PlacedRows
from vllm_ascend_kvext.store.tier import HostTier


class StoredTokens(NamedTuple):
    """What an entry of a segment holds; the entry's ``row_map``.

    Attributes:
        packed_ids: Its tokens: on a hit they are compared, not only their hash.
        num_rows: Their number, and that of the rows of its section.
        first_position: At which the first of them was computed.
    """

    packed_ids: bytes
    num_rows: int
    first_position: int


class SegmentStore:
    """Segments of one engine.

    Args:
        tier: Of the engine.
        layout: Of the workers' rows.
        fingerprint: Of all workers' layouts.
        sink_ids: Token ids that segments are computed behind.

    Attributes:
        fingerprint: See the arguments.
        sink_ids: The same.
    """

    def __init__(
        self, tier: HostTier, layout: SegmentLayout, fingerprint: str, sink_ids: Sequence[int]
    ) -> None:
        self._tier = tier
        self._layout = layout
        self.fingerprint = fingerprint
        self.sink_ids = tuple(sink_ids)

    def prefix(self, token_ids: Sequence[int], cache_salt: str | None) -> SegmentPrefix:
        """The keys of a segment."""
        space = key_space(self.fingerprint, self.sink_ids, cache_salt)
        return SegmentPrefix(space, token_ids, self._tier.geometry.unit_tokens)

    def find(self, prefix: SegmentPrefix, first_tokens: int) -> list[PlacedRows]:
        """What is stored of a segment, from its first token on, without a gap.

        Args:
            prefix: Of the segment.
            first_tokens: Where the segment stands.
        """
        runs = self._tier.find_runs(prefix, prefix.num_tokens)
        found: list[PlacedRows] = []
        if not runs or runs[0].first_tokens:
            return found
        entries = runs[0].entries
        # An entry may go on where the next one begins.
        ends = [*(entry.piece.first_tokens for entry in entries[1:]), runs[0].end_tokens]
        for entry, end_tokens in zip(entries, ends, strict=True):
            begin = entry.piece.first_tokens
            end = min(end_tokens, prefix.num_segment_tokens)
            ids = prefix.ids_of(begin, end)
            stored = entry.row_map
            if not isinstance(stored, StoredTokens) or not stored.packed_ids.startswith(ids):
                break
            found.append(PlacedRows(entry, first_tokens + begin, first_tokens + end, begin))
        return found

    def is_missing(self, prefix: SegmentPrefix) -> bool:
        """Whether some of a segment is neither stored nor on its way."""
        return bool(self._tier.missing_pieces(prefix, 0, prefix.num_tokens))

    def begin_store(self, prefix: SegmentPrefix) -> list[Entry] | Refusal:
        """Take places for what is missing of a segment.

        Returns:
            An entry for each piece, ascending; none if all is there, or on its way. A refusal if
            there is no room for some of it: the rest is not stored either.
        """
        use = self._tier.next_use()
        entries: list[Entry] = []
        for piece in self._tier.missing_pieces(prefix, 0, prefix.num_tokens):
            num_rows = min(piece.end_tokens, prefix.num_segment_tokens) - piece.first_tokens
            num_bytes = self._layout.num_bytes(num_rows)
            entry = self._tier.begin_store(prefix, piece, num_bytes, use)
            if isinstance(entry, Refusal):
                for begun in entries:
                    self._tier.fail_store(begun)
                return entry
            entries.append(entry)
        return entries

    def rows_of(self, prefix: SegmentPrefix, entry: Entry, token_ids: Sequence[int]) -> SegmentRows:
        """What workers store of a segment that is computed behind the sink, for one entry.

        Args:
            token_ids: Of the segment.
        """
        first, end = self._range_of(prefix, entry)
        sink_tokens = len(self.sink_ids)
        return SegmentRows(
            sink_tokens + first,
            sink_tokens + end,
            entry.offset_bytes,
            end - first,
            0,
            token_ids=tuple(token_ids[first:end]),
        )

    def finish_store(self, prefix: SegmentPrefix, entry: Entry) -> None:
        """The rows of an entry are in place, on all workers."""
        first, end = self._range_of(prefix, entry)
        stored = StoredTokens(prefix.ids_of(first, end), end - first, len(self.sink_ids) + first)
        self._tier.finish_store(entry, stored)

    def fail_store(self, entry: Entry) -> None:
        """The store of an entry has ended, and what it wrote is worth nothing."""
        self._tier.fail_store(entry)

    def _range_of(self, prefix: SegmentPrefix, entry: Entry) -> tuple[int, int]:
        """First and end token of an entry's rows, without what it was rounded up by."""
        piece = entry.piece
        return piece.first_tokens, min(piece.end_tokens, prefix.num_segment_tokens)


def rows_to_load(placed: PlacedRows) -> SegmentRows:
    """What workers load of rows that `SegmentStore.find` has found."""
    stored = placed.entry.row_map
    assert isinstance(stored, StoredTokens)
    first_row = placed.entry_tokens - placed.entry.piece.first_tokens
    return SegmentRows(
        placed.first_tokens,
        placed.end_tokens,
        placed.entry.offset_bytes,
        stored.num_rows,
        first_row,
        shift_tokens=placed.first_tokens - stored.first_position - first_row,
    )


def is_segment(entry: Entry) -> bool:
    """Whether an entry that was stored is one of a segment."""
    return isinstance(entry.row_map, StoredTokens)
