# SPDX-License-Identifier: Apache-2.0
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
        """The name of a space of keys. Spaces share no key. It is empty for hashes of prompts."""

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
    """

    hashes: Sequence[bytes]
    tokens_per_hash: int

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


@dataclass(frozen=True, slots=True)
class TierGeometry:
    """Where prefixes are cut, and what a resume needs.

    Attributes:
        chunk_tokens: The tokens of a chunk. Rows are stored in whole chunks or in pieces of a
            chunk.
        unit_tokens: The row unit of the layout. Pieces begin and end at multiples of it, and
            requests resume there. It divides ``chunk_tokens``.
        needs_rows: Whether the model has full-attention rows.
        needs_tails: Whether the model has window tails or states.

    Raises:
        TierError: If the numbers do not fit each other.
    """

    chunk_tokens: int
    unit_tokens: int
    needs_rows: bool = True
    needs_tails: bool = True

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
