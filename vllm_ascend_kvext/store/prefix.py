# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Says how prefixes are cut, and which keys they have.

A key is vLLM's chained hash of all tokens before a boundary. Equal keys mean equal prefixes, with
equal adapters, multi-modal input and salt. The module knows nothing of what is stored.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from vllm_ascend_kvext.errors import TierError


class Prefix(Protocol):
    """The tokens of a request that have hashes."""

    @property
    def key_space(self) -> str:
        """The name of a space of keys; empty for hashes of prompts. Spaces share no key."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens that have keys."""

    def key_at(self, boundary_tokens: int) -> bytes:
        """The chained hash of the tokens before a boundary, a multiple of the tier's unit."""

    def keys_at(self, boundaries: range) -> Sequence[bytes]:
        """The chained hashes of many boundaries."""


@dataclass(frozen=True, slots=True)
class HashedPrefix:
    """A request's block hashes. The list may grow, and the prefix grows with it.

    Attributes:
        hashes: One hash per ``tokens_per_hash`` tokens. Each hash covers all tokens before its end.
        tokens_per_hash: Tokens between two hashes; the tier's unit is a multiple of it.
        upstream: The same tokens with vLLM's own hashes; None if ``hashes`` are vLLM's own.
    """

    hashes: Sequence[bytes]
    tokens_per_hash: int
    upstream: HashedPrefix | None = None

    @property
    def key_space(self) -> str:
        return ""

    @property
    def num_tokens(self) -> int:
        return len(self.hashes) * self.tokens_per_hash

    def key_at(self, boundary_tokens: int) -> bytes:
        index = boundary_tokens // self.tokens_per_hash
        if index * self.tokens_per_hash != boundary_tokens or not 0 < index <= len(self.hashes):
            raise TierError(
                f"prefix: expected a multiple of {self.tokens_per_hash} from "
                f"{self.tokens_per_hash} to {self.num_tokens} tokens, found {boundary_tokens}; "
                "ask at boundaries that are hashed"
            )
        return self.hashes[index - 1]

    def keys_at(self, boundaries: range) -> Sequence[bytes]:
        if not boundaries:
            return ()
        tokens = self.tokens_per_hash
        first, last = boundaries[0], boundaries[-1]
        if boundaries.step % tokens:
            raise TierError(
                f"prefix: expected boundaries a multiple of {tokens} tokens apart, found "
                f"{boundaries.step}; ask at boundaries that are hashed"
            )
        if first % tokens or first < tokens or last > self.num_tokens:
            self.key_at(first)  # One of the two calls raises.
            self.key_at(last)
        return self.hashes[first // tokens - 1 : last // tokens : boundaries.step // tokens]


MIN_CUT_TOKENS = 128
"""The least tokens of a cut. A copy between pages and host memory never crosses the end of a cut,
so smaller cuts cost more copies. Larger cuts lose more hits where memory is short."""


@dataclass(frozen=True, slots=True)
class TierGeometry:
    """Where prefixes are cut, and what a resume needs.

    Attributes:
        chunk_tokens: The tokens of a chunk. Rows are stored in whole chunks or in pieces of a
            chunk.
        unit_tokens: The row unit of the layout. Pieces begin and end at multiples of it, and
            requests resume there. It divides ``chunk_tokens``.
        cut_tokens: Rows are evicted from their end on, up to a multiple of this number of tokens.
            It divides ``chunk_tokens``, and is a multiple of the unit. 0 stands for a whole chunk.
        needs_rows: Whether the model has full-attention rows.
        needs_tails: Whether the model has window tails or states.

    Raises:
        TierError: If the numbers do not fit each other.
    """

    chunk_tokens: int
    unit_tokens: int
    needs_rows: bool = True
    needs_tails: bool = True
    cut_tokens: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.unit_tokens <= self.chunk_tokens or self.chunk_tokens % self.unit_tokens:
            raise TierError(
                f"host tier: expected a chunk of a multiple of the unit of {self.unit_tokens} "
                f"tokens, found {self.chunk_tokens}; choose another chunk size"
            )
        if not (self.needs_rows or self.needs_tails):
            raise TierError(
                "host tier: expected a model with rows or tails, found neither; leave the tier out"
            )
        if not self.cut_tokens:
            object.__setattr__(self, "cut_tokens", self.chunk_tokens)
        if self.cut_tokens % self.unit_tokens or self.chunk_tokens % self.cut_tokens:
            raise TierError(
                f"host tier: expected a cut of a multiple of {self.unit_tokens} tokens that "
                f"divides the chunk of {self.chunk_tokens}, found {self.cut_tokens}; choose "
                "another size"
            )

    def floor(self, tokens: int) -> int:
        """The last boundary at or before a token."""
        return tokens - tokens % self.unit_tokens

    def chunk_start(self, boundary_tokens: int) -> int:
        """The beginning of the chunk that has the last token before a boundary."""
        last = boundary_tokens - 1
        return last - last % self.chunk_tokens

    def chunk_end(self, tokens: int) -> int:
        """The end of the chunk that has the first token behind ``tokens`` tokens."""
        return tokens - tokens % self.chunk_tokens + self.chunk_tokens

    def cut_start(self, tokens: int) -> int:
        """The last multiple of the cut at or before a token."""
        return tokens - tokens % self.cut_tokens

    def cut_end(self, tokens: int) -> int:
        """The first multiple of the cut at or behind a token."""
        return tokens + -tokens % self.cut_tokens

    def cut_ends(self, first_tokens: int, end_tokens: int) -> list[int]:
        """The ends of the cuts of a piece of rows, ascending. The last one is the piece's end."""
        cut_tokens = self.cut_tokens
        first_end = first_tokens - first_tokens % cut_tokens + cut_tokens
        return [*range(first_end, end_tokens, cut_tokens), end_tokens]


def cut_tokens_of(unit_tokens: int, chunk_tokens: int = 0) -> int:
    """The tokens of a cut: the least multiple of the unit that has `MIN_CUT_TOKENS` or more.

    Args:
        chunk_tokens: If given, the cut also divides the chunk, and may be larger.
    """
    cut_tokens = unit_tokens * -(-MIN_CUT_TOKENS // unit_tokens)
    if not chunk_tokens:
        return cut_tokens
    cuts = range(cut_tokens, chunk_tokens, unit_tokens)
    return next((each for each in cuts if chunk_tokens % each == 0), chunk_tokens)
