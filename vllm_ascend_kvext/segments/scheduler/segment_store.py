# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The segments in a host tier: their keys, their stored parts, and their missing parts.

Segments share the tier with prompts: its room, its order of eviction, and its counters. The keys of
prompts are vLLM's hashes, chained from block to block. The keys of segments are hashes of all that
their rows depend on: the tokens up to a boundary, the sink, and the salt. This module moves no
bytes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from vllm_ascend_kvext.holes.load_plan import Span
from vllm_ascend_kvext.segments.scheduler.segment_contexts import SegmentContexts, Sink
from vllm_ascend_kvext.segments.token_rows import SegmentLayout, SegmentRows
from vllm_ascend_kvext.store.counters import Refusal
from vllm_ascend_kvext.store.entries import Entry, Kind, Piece
from vllm_ascend_kvext.store.tier import HostTier

_ID_TYPE = "q"


class SegmentPrefix:
    """The tokens of a segment behind a sink; a ``store.prefix.Prefix``.

    ``num_tokens`` is rounded up to a multiple of a unit; ``num_segment_tokens`` is not.
    """

    key_space = "S"

    def __init__(self, sink: Sink, packed_ids: bytes, unit_tokens: int) -> None:
        self.sink = sink
        self.packed_ids = packed_ids
        self._keys: dict[int, bytes] = {}
        self._digest = hashlib.sha256(sink.space)
        self._digested_tokens = 0
        self.num_segment_tokens = len(packed_ids) // array(_ID_TYPE).itemsize
        self.num_tokens = -(-self.num_segment_tokens // unit_tokens) * unit_tokens

    @property
    def has_context(self) -> bool:
        """Whether the segment is stored behind a context."""
        return self.sink.has_context

    @property
    def sink_tokens(self) -> int:
        """The number of tokens before the segment when it is computed."""
        return len(self.sink.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the segment: a copy."""
        return array(_ID_TYPE, self.packed_ids).tolist()

    def key_at(self, boundary_tokens: int) -> bytes:
        key = self._keys.get(boundary_tokens)
        if key is None:
            digest = self._digest_up_to(boundary_tokens).copy()
            digest.update(boundary_tokens.to_bytes(8, "little"))
            key = self._keys[boundary_tokens] = digest.digest()
        return key

    def _digest_up_to(self, boundary_tokens: int) -> hashlib._Hash:
        """The digest of all tokens before a boundary. Ascending boundaries read each token once."""
        if boundary_tokens < self._digested_tokens:
            self._digest = hashlib.sha256(self.sink.space)
            self._digested_tokens = 0
        self._digest.update(self.ids_of(self._digested_tokens, boundary_tokens))
        self._digested_tokens = boundary_tokens
        return self._digest

    def keys_at(self, boundaries: range) -> Sequence[bytes]:
        return [self.key_at(boundary) for boundary in boundaries]

    def ids_of(self, first_tokens: int, end_tokens: int) -> bytes:
        """The packed token ids of a range, up to the end of the segment."""
        width = array(_ID_TYPE).itemsize
        return self.packed_ids[first_tokens * width : end_tokens * width]


class StoredTokens(NamedTuple):
    """The tokens of a segment's entry, and their position; the entry's ``row_map``.

    A hit compares the tokens, and not only their hash.
    """

    packed_ids: bytes
    num_rows: int
    first_position: int


class SegmentStore:
    """The segments of one engine, behind the sinks of ``contexts``. All workers have one layout.

    Segments are stored in chunks, so that long segments are evicted from their ends on, as prompts
    are. The last chunk is rounded up to a unit.
    """

    def __init__(
        self, tier: HostTier, layout: SegmentLayout, contexts: SegmentContexts[Any]
    ) -> None:
        self._tier = tier
        self._layout = layout
        self.contexts = contexts

    @property
    def num_sections(self) -> int:
        """The number of sections of an entry."""
        return self._layout.num_sections

    def keep_apart(self, num_workers: int) -> None:
        """Entries have a section for each of the workers of a host from now on."""
        self._layout = replace(self._layout, num_sections=num_workers)

    def prefix(self, token_ids: Sequence[int], sink: Sink) -> SegmentPrefix:
        """A segment behind a sink, with its keys."""
        return self._prefix(sink, array(_ID_TYPE, token_ids).tobytes())

    def prefixes(
        self, token_ids: Sequence[int], cache_salt: str | None, num_before: int = 0
    ) -> list[SegmentPrefix]:
        """A segment behind each of its sinks, the best sinks first; see `SegmentContexts.sinks`."""
        packed_ids = array(_ID_TYPE, token_ids).tobytes()  # Waiting requests hold one copy.
        sinks = self.contexts.sinks(cache_salt, token_ids, num_before)
        return [self._prefix(sink, packed_ids) for sink in sinks]

    def _prefix(self, sink: Sink, packed_ids: bytes) -> SegmentPrefix:
        return SegmentPrefix(sink, packed_ids, self._tier.geometry.unit_tokens)

    def find(self, prefixes: Iterable[SegmentPrefix], first_tokens: int) -> list[Span]:
        """The stored spans of a segment that stands at ``first_tokens``, without a gap.

        The spans come from the first prefix that is stored whole, or else from the prefix of which
        the most tokens are stored.
        """
        most: list[Span] = []
        for each in prefixes:
            found = self._find(each, first_tokens)
            num_found = found[-1].end_tokens - first_tokens if found else 0
            if num_found == each.num_segment_tokens:
                return found
            if not most or (found and found[-1].end_tokens > most[-1].end_tokens):
                most = found
        return most

    def _find(self, prefix: SegmentPrefix, first_tokens: int) -> list[Span]:
        runs = self._tier.lookup(prefix).find_runs(prefix.num_tokens, 0)
        found: list[Span] = []
        if not runs or runs[0].first_tokens:
            return found
        for entry, begin, end_tokens in runs[0].rows:
            end = min(end_tokens, prefix.num_segment_tokens)
            ids = prefix.ids_of(begin, end)
            stored = entry.row_map
            if not isinstance(stored, StoredTokens) or not stored.packed_ids.startswith(ids):
                break
            found.append(Span(first_tokens + begin, first_tokens + end, entry, begin))
        return found

    def is_missing(self, prefix: SegmentPrefix) -> bool:
        """Whether a part of a segment is neither stored nor being stored."""
        lookup = self._tier.lookup(prefix)
        if lookup.index.present(Kind.ROWS, prefix.key_at(prefix.num_tokens)) is None:
            return True  # Nearly every incomplete segment lacks its end.
        return bool(lookup.missing_pieces(0, prefix.num_tokens))

    def to_learn(
        self, prefixes: Sequence[SegmentPrefix], learns_new: bool
    ) -> Sequence[SegmentPrefix]:
        """The prefixes of a segment that are to be computed, if they are missing.

        The first prefix that is not past is one of them. If no prefix is stored, the prefix without
        a context is another, because it serves every place in a prompt. Without ``learns_new``,
        only the first prefix is computed, and only if this prefix has a context and the segment is
        stored behind some sink.
        """
        first = next(each for each in prefixes if not each.sink.is_past)
        is_new = all(map(self.is_missing, prefixes))
        if learns_new:
            return [first, _alone(prefixes)] if is_new else [first]
        return [first] if first.has_context and not is_new else []

    def lacking(self, prefixes: Sequence[SegmentPrefix]) -> Iterator[tuple[SegmentPrefix, Piece]]:
        """The chunks of a segment that are not stored; chunks that are being stored are included.

        Engines share only segments without a context, because each engine has its own contexts.
        """
        prefix = _alone(prefixes)
        if not all(self.is_missing(each) for each in prefixes if each.has_context):
            return
        index = self._tier.lookup(prefix).index
        chunk_tokens = self._tier.geometry.chunk_tokens
        for first in range(0, prefix.num_tokens, chunk_tokens):
            end = min(first + chunk_tokens, prefix.num_tokens)
            if not index.stored(Kind.ROWS, prefix.key_at(end)):
                yield prefix, Piece.rows(first, end)

    def begin_store(self, prefix: SegmentPrefix) -> list[Entry] | Refusal:
        """Take places for the missing pieces of a segment: one entry per piece, ascending.

        The store is refused if there is no room for one of the pieces. Then no piece is stored.
        """
        use = self._tier.next_use()
        preference = partial(self._preference, prefix.has_context)
        entries: list[Entry] = []
        for piece in self._tier.lookup(prefix).missing_pieces(0, prefix.num_tokens):
            num_bytes = self.num_bytes(self.contents(prefix, piece))
            entry = self._tier.begin_store(prefix, piece, num_bytes, use, preference)
            if isinstance(entry, Refusal):
                for begun in entries:
                    self._tier.fail_store(begun)
                return entry
            entries.append(entry)
        return entries

    def _preference(self, has_context: bool, entry: Entry) -> int:
        """Prefer to keep entries without a context, which serve every place in a prompt.

        The segments behind contexts are learned from them, too.
        """
        if not isinstance(entry.row_map, StoredTokens):
            return 0
        return int(has_context) - int(self.has_context(entry))

    def rows_of(self, prefix: SegmentPrefix, entry: Entry, token_ids: Sequence[int]) -> SegmentRows:
        """The rows that workers store for one entry of a segment, computed behind its sink."""
        first = entry.piece.first_tokens
        _, num_rows, position = self.contents(prefix, entry.piece)
        return SegmentRows(
            position,
            position + num_rows,
            entry.offset_bytes,
            num_rows,
            0,
            token_ids=tuple(token_ids[first : first + num_rows]),
        )

    def finish_store(self, prefix: SegmentPrefix, entry: Entry) -> bool:
        """Finish a store that all workers have ended. Returns whether the entry can be found."""
        return self._tier.finish_store(entry, self.contents(prefix, entry.piece))

    def contents(self, prefix: SegmentPrefix, piece: Piece) -> StoredTokens:
        """The tokens of an entry for a piece, without the rounding up."""
        first, end = piece.first_tokens, min(piece.end_tokens, prefix.num_segment_tokens)
        return StoredTokens(prefix.ids_of(first, end), end - first, prefix.sink_tokens + first)

    def has_context(self, entry: Entry) -> bool:
        """Whether an entry of a segment was computed behind a context."""
        sink_tokens = entry.row_map.first_position - entry.piece.first_tokens
        return bool(sink_tokens != len(self.contexts.sink_ids))

    def num_bytes(self, stored: StoredTokens) -> int:
        """The host bytes of an entry."""
        return self._layout.num_bytes(stored.num_rows)


def _alone(prefixes: Sequence[SegmentPrefix]) -> SegmentPrefix:
    """The prefix without a context. Every segment has such a prefix."""
    return next(each for each in prefixes if not each.has_context)


def rows_to_load(span: Span) -> SegmentRows:
    """The rows that workers load for a span of `SegmentStore.find`."""
    assert span.entry is not None
    stored = span.entry.row_map
    assert isinstance(stored, StoredTokens)
    first_row = span.entry_tokens - span.entry.piece.first_tokens
    return SegmentRows(
        span.first_tokens,
        span.end_tokens,
        span.entry.offset_bytes,
        stored.num_rows,
        first_row,
        shift_tokens=span.first_tokens - stored.first_position - first_row,
    )
