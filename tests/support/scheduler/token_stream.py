# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Replaces a model by integers. The module knows nothing of vLLM.

The *digest* of a position stands for the KV there. Like KV, it depends on every token up to and
including this position, on the adapter, and on the images. The next token is a function of the last
digest, so scheduling does not change the tokens of a request.
"""

from __future__ import annotations

import copy
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

VOCAB_SIZE = 61
"""The vocabulary is small, so stop tokens and equal continuations occur."""

_MASK = (1 << 64) - 1
_PRIME = 0x9E3779B97F4A7C15


@dataclass(frozen=True, slots=True)
class Image:
    """One multi-modal item. Its KV depends on its ``identifier``, not on its placeholder tokens."""

    identifier: str
    offset_tokens: int
    length_tokens: int


def mix(digest: int, value: int) -> int:
    """A 64-bit hash of a digest and one more number. It is the same in every process."""
    digest = ((digest ^ (value + 1)) * _PRIME) & _MASK
    return digest ^ (digest >> 29)


def next_token(digest: int) -> int:
    """The token that a greedy model would sample after a prefix."""
    return (digest >> 16) % VOCAB_SIZE


def draft_tokens(digest: int, num_tokens: int) -> list[int]:
    """The drafts after a prefix. About three of five are right."""
    drafts = []
    for _ in range(num_tokens):
        token = next_token(digest)
        if (digest >> 40) % 5 >= 3:
            token = (token + 1) % VOCAB_SIZE
        drafts.append(token)
        digest = mix(digest, token)
    return drafts


class TokenStream:
    """The tokens of one request and the digest at every position.

    ``seed`` stands for everything else that the KV depends on: adapter, cache salt.
    """

    def __init__(self, prompt: Sequence[int], seed: str = "", images: Sequence[Image] = ()) -> None:
        self.tokens: list[int] = []
        self.digests: list[int] = []
        self._origin = mix(zlib.crc32(seed.encode()), 0)
        self._image_at = {
            image.offset_tokens + i: zlib.crc32(image.identifier.encode()) + i
            for image in images
            for i in range(image.length_tokens)
        }
        self.extend(prompt)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def last_digest(self) -> int:
        return self.digests[-1] if self.digests else self._origin

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            content = self._image_at.get(len(self.tokens), token)
            self.digests.append(mix(self.last_digest, content))
            self.tokens.append(token)

    def beginning(self, num_tokens: int) -> TokenStream:
        """Another stream, with the first tokens of this stream."""
        stream = copy.copy(self)
        stream.tokens = self.tokens[:num_tokens]
        stream.digests = self.digests[:num_tokens]
        return stream

    def replace(self, tokens: Sequence[int]) -> None:
        """Make the stream hold exactly ``tokens``. Keep the digests of the common prefix."""
        keep = 0
        while keep < min(len(self), len(tokens)) and self.tokens[keep] == tokens[keep]:
            keep += 1
        del self.tokens[keep:], self.digests[keep:]
        self.extend(tokens[keep:])

    def generate(self, max_tokens: int, stop_tokens: Sequence[int] = ()) -> list[int]:
        """Append and return the tokens that a request with these limits generates."""
        generated: list[int] = []
        while len(generated) < max_tokens:
            token = next_token(self.last_digest)
            generated.append(token)
            self.extend((token,))
            if token in stop_tokens:
                break
        return generated
