# SPDX-License-Identifier: Apache-2.0
"""Which pieces of a prefix lie one behind the other, and which are not there yet.

A chunk is stored as a whole, or in pieces that were added as the prompt grew. Whoever reads a
prefix walks back from a boundary: the entry that its key leads to begins at an earlier boundary of
the same prefix, and so on. An entry never reaches into the next chunk, and a chunk has at most
`MOST_PIECES` pieces. Before it gets more it is stored once more, as one, and its pieces go.
"""

from __future__ import annotations

from vllm_ascend_kvext.store.entries import Entry, Kind, Piece
from vllm_ascend_kvext.store.errors import TierError
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry

MOST_PIECES = 4
"""Each piece costs a load one more section per group; storing a chunk again costs all its rows."""


def keys_of(geometry: TierGeometry, prefix: Prefix, piece: Piece) -> tuple[bytes, ...]:
    """Of the boundaries at which a piece can be found, ascending.

    Raises:
        TierError: If it is not cut at units, or reaches into a second chunk.
    """
    kind, first_tokens, end_tokens = piece
    unit_tokens = geometry.unit_tokens
    is_cut_right = first_tokens >= 0 and not (
        first_tokens % unit_tokens or end_tokens % unit_tokens
    )
    if kind is Kind.TAILS and is_cut_right and 0 < first_tokens == end_tokens:
        return (prefix.key_at(end_tokens),)
    if (
        kind is Kind.ROWS
        and is_cut_right
        and geometry.chunk_start(end_tokens) <= first_tokens < end_tokens
    ):
        boundaries = range(first_tokens + unit_tokens, end_tokens + 1, unit_tokens)
        return tuple([prefix.key_at(boundary) for boundary in boundaries])
    raise TierError(
        f"host tier: expected rows within one chunk of {geometry.chunk_tokens} tokens, or tails at "
        f"one boundary, cut at multiples of {unit_tokens}, found {piece}; store the pieces that "
        "missing_pieces names"
    )


def chain_to(
    index: Index, prefix: Prefix, boundary_tokens: int, after_tokens: int
) -> list[Entry] | None:
    """The STORED entries with the rows from one token up to a boundary of the same chunk.

    Returns:
        In ascending order, without a gap; the first may begin before ``after_tokens``. None if
        rows are missing.
    """
    entries = []
    while boundary_tokens > after_tokens:
        entry = index.stored(Kind.ROWS, prefix.key_at(boundary_tokens))
        if entry is None:
            return None
        entries.append(entry)
        boundary_tokens = entry.piece.first_tokens
    entries.reverse()
    return entries


def present_tokens(index: Index, geometry: TierGeometry, prefix: Prefix, limit_tokens: int) -> int:
    """Up to which boundary the rows of a prefix are stored, or being stored, without a gap.

    Takes time in proportion to the chunks that are there, and to the units of the first that is
    not.
    """
    limit_tokens = geometry.floor(min(limit_tokens, prefix.num_tokens))
    position = 0
    while position < limit_tokens:
        chunk_end = min(position + geometry.chunk_tokens, limit_tokens)
        for boundary in range(chunk_end, position, -geometry.unit_tokens):
            if index.present(Kind.ROWS, prefix.key_at(boundary)) is None:
                continue
            gaps, _ = _gaps_of_chunk(index, geometry, prefix, position, boundary)
            if not gaps:
                break
        else:
            return position
        if boundary < chunk_end:
            return boundary
        position = boundary
    return position


def missing_pieces(
    index: Index, geometry: TierGeometry, prefix: Prefix, first_tokens: int, end_tokens: int
) -> list[Piece]:
    """What to store so that the rows of a prefix can be read up to a boundary.

    What is stored, or being stored, is left out. Takes time in proportion to the units of the
    range.

    Args:
        first_tokens: Chunks that end at or before it are not looked at.
        end_tokens: What is over a multiple of the unit is left out.

    Returns:
        Pieces in ascending order; some may begin before ``first_tokens``, within its chunk.
    """
    end_tokens = geometry.floor(min(end_tokens, prefix.num_tokens))
    chunk_tokens = geometry.chunk_tokens
    pieces: list[Piece] = []
    for chunk_first in range(first_tokens - first_tokens % chunk_tokens, end_tokens, chunk_tokens):
        chunk_end = min(chunk_first + chunk_tokens, end_tokens)
        gaps, num_present = _gaps_of_chunk(index, geometry, prefix, chunk_first, chunk_end)
        if gaps and num_present + len(gaps) > MOST_PIECES:
            gaps = [Piece.rows(chunk_first, chunk_end)]
        pieces += gaps
    return pieces


def _gaps_of_chunk(
    index: Index, geometry: TierGeometry, prefix: Prefix, chunk_first: int, chunk_end: int
) -> tuple[list[Piece], int]:
    gaps: list[Piece] = []
    num_present = 0
    gap_end = boundary = chunk_end
    while boundary > chunk_first:
        entry = index.present(Kind.ROWS, prefix.key_at(boundary))
        if entry is None:
            boundary -= geometry.unit_tokens
            continue
        if boundary < gap_end:
            gaps.append(Piece.rows(boundary, gap_end))
        num_present += 1
        gap_end = boundary = entry.piece.first_tokens
    if chunk_first < gap_end:
        gaps.append(Piece.rows(chunk_first, gap_end))
    return gaps[::-1], num_present
