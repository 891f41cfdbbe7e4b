# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The expected pages of a request that reuses segments in its prompt.

A reused token has the digest that it had in its segment, and was moved. What is computed behind the
token depends on all digests before, moved ones included, and not on the tokens alone::

    exact        digest = mix(digest before, token)
    reused       digest of the segment, moved by the shift; mixed into what follows
    computed     digest = mix(everything before, token)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from support.scheduler.token_stream import TokenStream, mix


class Moved(NamedTuple):
    """The row of a reused token: its digest where it was computed, and its move in positions."""

    digest: int
    shift_tokens: int


class BlendedStream(TokenStream):
    """A stream in which some rows may be placed. All other rows are computed."""

    def __init__(self, prompt: Sequence[int], seed: str = "") -> None:
        self._mixtures: list[int] = []  # By token: the mixture of everything up to the token.
        self.placed: Mapping[int, Moved] = {}
        super().__init__(prompt, seed)

    @property
    def last_digest(self) -> int:
        return self._mixtures[len(self) - 1] if len(self) else self._origin

    @property
    def shifts(self) -> list[int]:
        """By row: the number of positions by which the row was moved."""
        computed = Moved(0, 0)
        return [self.placed.get(index, computed).shift_tokens for index in range(len(self))]

    def place(self, placed: Mapping[int, Moved]) -> None:
        """Set the reused rows, by position."""
        self.placed = placed
        tokens = self.tokens.copy()
        self.replace(())
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            index = len(self)
            before = self.last_digest
            moved = self.placed.get(index)
            if moved is None:
                digest = mixture = mix(before, token)
            else:
                digest = moved.digest
                mixture = mix(mix(before, digest), moved.shift_tokens)
            self.tokens.append(token)
            self.digests.append(digest)
            self._mixtures[index:] = [mixture]

    def beginning(self, num_tokens: int) -> TokenStream:
        stream = super().beginning(num_tokens)
        stream._mixtures = self._mixtures[:num_tokens]
        return stream
