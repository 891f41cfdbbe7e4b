# SPDX-License-Identifier: Apache-2.0
"""What the pages of a request are to hold in whose prompt segments are reused.

A reused token has the digest that it had in its segment, and was moved. What is computed behind it
depends on all that lies before, as it is: on the moved digests, and not on the tokens alone::

    exact        digest = mix(digest before, token)
    reused       digest of the segment, moved by the shift; mixed into what follows
    computed     digest = mix(everything before, token)
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from support.scheduler.token_stream import TokenStream, mix


class Moved(NamedTuple):
    """The row of a reused token: the digest that it had where it was computed, and its move."""

    digest: int
    shift_tokens: int


class BlendedStream(TokenStream):
    """A stream some of whose rows may be placed; ``shifts`` are their moves in positions."""

    def __init__(self, prompt: Sequence[int], seed: str = "") -> None:
        self.shifts: list[int] = []
        self._mixtures: list[int] = []  # by token: of everything up to it
        self.placed: Mapping[int, Moved] = {}
        super().__init__(prompt, seed)

    @property
    def last_digest(self) -> int:
        return self._mixtures[-1] if self._mixtures else self._origin

    def place(self, placed: Mapping[int, Moved]) -> None:
        """These are the reused rows, by position; all others are computed."""
        self.placed = placed
        tokens = self.tokens
        self._cut(0)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            before = self.last_digest
            moved = self.placed.get(len(self.tokens))
            if moved is None:
                digest = mixture = mix(before, token)
            else:
                digest = moved.digest
                mixture = mix(mix(before, digest), moved.shift_tokens)
            self.digests.append(digest)
            self.shifts.append(0 if moved is None else moved.shift_tokens)
            self._mixtures.append(mixture)
            self.tokens.append(token)

    def beginning(self, num_tokens: int) -> BlendedStream:
        stream = copy.copy(self)
        stream._cut(num_tokens)
        return stream

    def replace(self, tokens: Sequence[int]) -> None:
        keep = 0
        while keep < min(len(self), len(tokens)) and self.tokens[keep] == tokens[keep]:
            keep += 1
        self._cut(keep)
        self.extend(tokens[keep:])

    def _cut(self, num_tokens: int) -> None:
        self.tokens, self.digests = self.tokens[:num_tokens], self.digests[:num_tokens]
        self.shifts, self._mixtures = self.shifts[:num_tokens], self._mixtures[:num_tokens]
