# SPDX-License-Identifier: Apache-2.0
"""Which rows of a prefix are stored, with gaps between them, and at which boundaries tails are.

Changes nothing. Looking for rows takes time in proportion to the chunks of the prefix, and to the
units of those chunks whose neighbour is there: a prompt that nobody has stored costs one question
per chunk. Looking for tails takes time in proportion to the units of the range.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from vllm_ascend_kvext.store.entries import Entry, Kind
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry


class StoredRun(NamedTuple):
    """STORED rows without a gap.

    Attributes:
        first_tokens: Where they begin; the first entry may begin before.
        end_tokens: Where they end, a boundary.
        entries: That have them, in ascending order.
    """

    first_tokens: int
    end_tokens: int
    entries: tuple[Entry, ...]


def find_runs(
    index: Index,
    geometry: TierGeometry,
    prefix: Prefix,
    limit_tokens: int,
    after_tokens: int = 0,
) -> list[StoredRun]:
    """The stored rows of a prefix, in ascending order.

    Rows in the middle of a chunk whose neighbours are not stored either may be left out.

    Args:
        limit_tokens: Rows behind it are left out.
        after_tokens: Rows before it are left out.
    """
    limit_tokens = geometry.floor(min(limit_tokens, prefix.num_tokens))
    runs: list[_GrowingRun] = []
    position = after_tokens
    while position < limit_tokens:
        chunk_end = position - position % geometry.chunk_tokens + geometry.chunk_tokens
        target = min(chunk_end, limit_tokens)
        is_next = position == (runs[-1].end_tokens if runs else after_tokens)
        last = index.stored(Kind.ROWS, prefix.key_at(target))
        if last is not None and last.piece.first_tokens <= position:
            _append(runs, _GrowingRun(position, target, [last]))  # Most chunks are one entry.
        elif last is not None or is_next:
            end = target if last else _stored_before(index, geometry, prefix, position, target)
            for run in _runs_of_chunk(index, geometry, prefix, position, end):
                _append(runs, run)
        position = target
    return [StoredRun(run.first_tokens, run.end_tokens, tuple(run.entries)) for run in runs]


def find_all_tails(
    index: Index,
    geometry: TierGeometry,
    prefix: Prefix,
    limit_tokens: int,
    after_tokens: int = 0,
) -> list[Entry]:
    """The stored tails of a prefix, in ascending order.

    Args:
        limit_tokens: Tails behind it are left out.
        after_tokens: Tails before it are left out, those at it are not.
    """
    unit_tokens = geometry.unit_tokens
    limit_tokens = geometry.floor(min(limit_tokens, prefix.num_tokens))
    first_tokens = max(unit_tokens, -(-after_tokens // unit_tokens) * unit_tokens)
    boundaries = range(first_tokens, limit_tokens + 1, unit_tokens)
    return index.all_stored(Kind.TAILS, prefix.keys_at(boundaries))


@dataclass(slots=True)
class _GrowingRun:
    """See `StoredRun`; a chunk after the other is put to its end."""

    first_tokens: int
    end_tokens: int
    entries: list[Entry]


def _append(runs: list[_GrowingRun], run: _GrowingRun) -> None:
    if runs and runs[-1].end_tokens == run.first_tokens:
        runs[-1].end_tokens = run.end_tokens
        runs[-1].entries += run.entries
    else:
        runs.append(run)


def _runs_of_chunk(
    index: Index,
    geometry: TierGeometry,
    prefix: Prefix,
    first_tokens: int,
    end_tokens: int,
) -> list[_GrowingRun]:
    """Walks back from the end."""
    runs: list[_GrowingRun] = []
    entries: list[Entry] = []
    boundary = run_end = end_tokens
    while boundary > first_tokens:
        entry = index.stored(Kind.ROWS, prefix.key_at(boundary))
        if entry is not None:
            entries.append(entry)
            boundary = entry.piece.first_tokens
            continue
        if entries:
            runs.append(_GrowingRun(boundary, run_end, entries[::-1]))
            entries = []
        boundary = run_end = _stored_before(index, geometry, prefix, first_tokens, boundary)
    if entries:
        runs.append(_GrowingRun(max(boundary, first_tokens), run_end, entries[::-1]))
    return runs[::-1]


def _stored_before(
    index: Index, geometry: TierGeometry, prefix: Prefix, first_tokens: int, boundary_tokens: int
) -> int:
    """The last boundary in a range whose rows are stored, or a boundary at its beginning.

    One slice of keys takes less time than a question per boundary.
    """
    unit_tokens = geometry.unit_tokens
    floor_tokens = geometry.floor(first_tokens)
    keys = prefix.keys_at(range(floor_tokens + unit_tokens, boundary_tokens, unit_tokens))
    return floor_tokens + unit_tokens * index.upto_stored(Kind.ROWS, keys)
