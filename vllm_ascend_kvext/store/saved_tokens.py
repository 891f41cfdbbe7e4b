# SPDX-License-Identifier: Apache-2.0
"""What an entry saves.

- Rows save their own tokens.
- Tails save what would have to be computed up to their boundary: back to the next boundary that has
  tails, or to the next gap. If the rows just before them are gone, they save nothing: computing
  those rows computes the tails, too.
"""

from __future__ import annotations

from vllm_ascend_kvext.store.entries import Kind, Piece
from vllm_ascend_kvext.store.index import Index
from vllm_ascend_kvext.store.prefix import Prefix, TierGeometry


def saved_tokens(index: Index, geometry: TierGeometry, prefix: Prefix, piece: Piece) -> int:
    """Tokens that a piece saves, whatever else is computed.

    Takes time in proportion to the units that tails save.
    """
    if piece.kind is Kind.ROWS:
        return piece.end_tokens - piece.first_tokens
    first_tokens = piece.end_tokens
    while first_tokens > 0:
        key = prefix.key_at(first_tokens)
        if geometry.needs_rows and index.present(Kind.ROWS, key) is None:
            break
        if first_tokens < piece.end_tokens and index.present(Kind.TAILS, key) is not None:
            break
        first_tokens -= geometry.unit_tokens
    return piece.end_tokens - first_tokens
