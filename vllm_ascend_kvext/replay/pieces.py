# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The tokens and block hashes of logged requests, and the prefixes that were computed.

A request is a row of *pieces*: consecutive tokens with one id. A piece has a key, which identifies
the piece with everything before it. So equal keys are equal prefixes, and no token has to be
hashed. The module imports nothing of vLLM.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.replay.trace import LoggedRequest

_KEY_BYTES = 28
"""The size of a key. A block hash is a key and four bytes for the place in the piece, as long as
vLLM's SHA-256."""

_PLACE_BYTES = 4

_VOCABULARY_TOKENS = 1 << 15
"""Tokens are smaller. No request needs real ones, and each model has more."""

_UNKNOWN_ANSWER = b"answer"


class RequestPieces:
    """The pieces of one request: its prompt, and behind it the answer.

    If the log does not have the ids of the answer, the answer is unlike everything else.

    Args:
        logged: The request.

    Attributes:
        ends: The number of tokens up to the end of each piece, ascending.
        keys: The key of each piece.
    """

    __slots__ = ("_ids", "ends", "keys", "logged")

    def __init__(self, logged: LoggedRequest) -> None:
        self.logged = logged
        block_tokens = logged.block_tokens
        num_full = logged.prompt_tokens // block_tokens
        if logged.output_ids:
            self._ids = [*logged.prompt_ids[:num_full], *logged.output_ids]
            ends = list(range(block_tokens, logged.num_tokens, block_tokens))
        else:
            self._ids = [*logged.prompt_ids]
            ends = list(range(block_tokens, logged.prompt_tokens, block_tokens))
            ends.append(logged.prompt_tokens)
        ends.append(logged.num_tokens)
        self.ends = ends
        self.keys = list(self._make_keys())

    def _make_keys(self) -> Iterator[bytes]:
        # Ids of different lengths stand for different tokens.
        key = self.logged.block_tokens.to_bytes(8, "big")
        for each in self._ids:
            key = _key_behind(key, each.to_bytes(8, "big", signed=True))
            yield key
        if not self.logged.output_ids:
            yield _key_behind(key, _UNKNOWN_ANSWER + self.logged.line.to_bytes(8, "big"))

    def tokens(self) -> list[int]:
        """The tokens of prompt and answer. Equal ids have equal tokens."""
        logged = self.logged
        known = _tokens_of(np.array(self._ids, np.int64), logged.block_tokens)
        if logged.output_ids:
            return [*known[: logged.num_tokens].tolist()]
        # No id is negative by itself, so that these are other tokens with near certainty.
        numbers = np.array([-logged.line], np.int64)
        answer = _tokens_of(numbers, logged.output_tokens)
        return [*known[: logged.prompt_tokens].tolist(), *answer.tolist()]

    def block_hashes(self, block_tokens: int) -> list[bytes]:
        """The hashes of the full blocks in order. A hash stands for everything up to its block."""
        hashes: list[bytes] = []
        start = 0
        for end, key in zip(self.ends, self.keys, strict=True):
            first = start + block_tokens - start % block_tokens
            hashes += [
                key + (block_end - start).to_bytes(_PLACE_BYTES, "big")
                for block_end in range(first, end + 1, block_tokens)
            ]
            start = end
        return hashes


class ComputedPrefixes:
    """Remembers how many tokens of each piece some request has computed."""

    def __init__(self) -> None:
        self._tokens: dict[bytes, int] = {}

    def longest(self, pieces: RequestPieces) -> int:
        """The number of tokens of the prompt that an endless cache would have."""
        start = 0
        for end, key in zip(pieces.ends, pieces.keys, strict=True):
            computed_tokens = self._tokens.get(key, 0)
            if computed_tokens < end - start:
                break
            start = end
            computed_tokens = 0
        return min(start + computed_tokens, pieces.logged.prompt_tokens)

    def note(self, pieces: RequestPieces, start: int, end: int) -> None:
        """Note that a request has computed its tokens from ``start`` to ``end``."""
        first = bisect_right(pieces.ends, start)
        last = bisect_left(pieces.ends, end)
        begins = pieces.ends[first - 1] if first else 0
        for index in range(first, last + 1):
            piece_end = pieces.ends[index]
            num_tokens = min(end, piece_end) - begins
            key = pieces.keys[index]
            if num_tokens > self._tokens.get(key, 0):
                self._tokens[key] = num_tokens
            begins = piece_end


def _key_behind(key: bytes, name: bytes) -> bytes:
    return hashlib.blake2b(key + name, digest_size=_KEY_BYTES).digest()


def _tokens_of(ids: npt.NDArray[np.int64], block_tokens: int) -> npt.NDArray[np.int64]:
    """The tokens of some ids, one after the other. shape: [ids * block_tokens]

    A token is the hash of its id and its place, by the finalizer of SplitMix64.
    """
    places = np.arange(block_tokens, dtype=np.uint64)
    mixed = ids.astype(np.uint64)[:, None] * np.uint64(0x9E3779B97F4A7C15) + places
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    tokens: npt.NDArray[np.int64] = (mixed % np.uint64(_VOCABULARY_TOKENS)).astype(np.int64)
    return tokens.ravel()
