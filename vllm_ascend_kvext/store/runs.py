# SPDX-License-Identifier: Apache-2.0
"""Which rows of a prefix are stored, with gaps between them.

Changes nothing. Takes time in proportion to the chunks of the prefix, and to the units of those
chunks whose neighbour is there: a prompt that nobody has stored costs one question per chunk.
"""

from __future__ import annotations

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
    runs: list[StoredRun] = []
    position = after_tokens
    while position < limit_tokens:
        chunk_end = position - position % geometry.chunk_tokens + geometry.chunk_tokens
        target = min(chunk_end, limit_tokens)
        is_next = position == (runs[-1].end_tokens if runs else after_tokens)
        for run in _runs_of_chunk(index, geometry, prefix, position, target, is_next):
            if runs and runs[-1].end_tokens == run.first_tokens:
                before = runs.pop()
                run = StoredRun(before.first_tokens, run.end_tokens, before.entries + run.entries)
            runs.append(run)
        position = target
    return runs


def _runs_of_chunk(
    index: Index,
    geometry: TierGeometry,
    prefix: Prefix,
    first_tokens: int,
    end_tokens: int,
    is_next: bool,
) -> list[StoredRun]:
    """Walks back from the end; gives up there if nothing before the chunk is stored either."""
    runs: list[StoredRun] = []
    entries: list[Entry] = []
    boundary = run_end = end_tokens
    while boundary > first_tokens:
        entry = index.stored(Kind.ROWS, prefix.key_at(boundary))
        if entry is not None:
            entries.append(entry)
            boundary = entry.piece.first_tokens
            continue
        if entries:
            runs.append(StoredRun(boundary, run_end, tuple(entries[::-1])))
            entries = []
        elif boundary == end_tokens and not is_next:
            return []
        boundary -= geometry.unit_tokens
        run_end = boundary
    if entries:
        runs.append(StoredRun(max(boundary, first_tokens), run_end, tuple(entries[::-1])))
    return runs[::-1]
