# SPDX-License-Identifier: Apache-2.0
"""How a prefix is cut into pieces, and which of them are not stored yet.

A chunk is stored as a whole, or in pieces that were added as the prompt grew, `MAX_PIECES` at most.
Before it gets more it is stored once more, as one, and its pieces go.
"""

from __future__ import annotations

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.store.entries import Kind, Piece
from vllm_ascend_kvext.store.lookup import Lookup
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry

MAX_PIECES = 4
"""Each piece costs a load one more section per group; storing a chunk again costs all its rows."""


def keys_of(geometry: TierGeometry, prefix: Prefix, piece: Piece) -> tuple[bytes, ...]:
    """Of the boundaries at which a piece can be found, ascending.

    Raises:
        TierError: It is not cut at units, or reaches into a second chunk.
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
        return tuple(prefix.keys_at(boundaries))
    raise TierError(
        f"host tier: expected rows within one chunk of {geometry.chunk_tokens} tokens, or tails at "
        f"one boundary, cut at multiples of {unit_tokens}, found {piece}; store the pieces that "
        "missing_pieces names"
    )


def missing_pieces(lookup: Lookup, first_tokens: int, end_tokens: int) -> list[Piece]:
    """What to store so that the rows of a prefix can be read up to a boundary.

    What is stored, or being stored, is left out.

    Args:
        first_tokens: Chunks that end at or before it are not looked at.
    """
    geometry = lookup.geometry
    end_tokens = geometry.floor(min(end_tokens, lookup.prefix.num_tokens))
    chunk_tokens = geometry.chunk_tokens
    pieces: list[Piece] = []
    for chunk_first in range(first_tokens - first_tokens % chunk_tokens, end_tokens, chunk_tokens):
        chunk_end = min(chunk_first + chunk_tokens, end_tokens)
        gaps: list[Piece] = []
        num_present, position = 0, chunk_first
        for run in lookup.runs_of_chunk(chunk_first, chunk_end, with_storing=True):
            if position < run.first_tokens:
                gaps.append(Piece.rows(position, run.first_tokens))
            num_present += len(run.entries)
            position = run.end_tokens
        if position < chunk_end:
            gaps.append(Piece.rows(position, chunk_end))
        if gaps and num_present + len(gaps) > MAX_PIECES:
            gaps = [Piece.rows(chunk_first, chunk_end)]
        pieces += gaps
    return pieces
