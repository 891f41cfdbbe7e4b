# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Texts that share prefixes. They form a tree, so that a shared prefix exists once.

The tokens and block hashes of a passage are computed once. Two texts have a common prefix exactly
where they share passages. The module knows nothing of requests, time or vLLM.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

VOCABULARY_TOKENS = 1 << 17


class Passage:
    """A run of tokens that follows a prefix of its parent.

    Attributes:
        index: Unique in its `Library`.
        parent: The passage that it follows; None at the start of a text.
        parent_tokens: The number of tokens of the parent before it.
        start: The position of its first token in every text that has it.
        length: Its length in tokens.
    """

    __slots__ = (
        "_hashes",
        "_seed",
        "_tokens",
        "index",
        "length",
        "parent",
        "parent_tokens",
        "start",
    )

    def __init__(
        self, index: int, parent: Passage | None, parent_tokens: int, length: int, seed: int
    ) -> None:
        self.index = index
        self.parent = parent
        self.parent_tokens = parent_tokens
        self.start = parent.start + parent_tokens if parent else 0
        self.length = length
        self._seed = seed
        self._tokens: array[int] | None = None
        self._hashes: dict[int, list[bytes]] = {}

    @property
    def tokens(self) -> array[int]:
        if self._tokens is None:
            raw = random.Random(self._seed).randbytes(4 * self.length)
            self._tokens = array("I", raw)
        return self._tokens

    def block_hashes(self, block_tokens: int) -> list[bytes]:
        """Chained hashes of the blocks whose last token lies in this passage."""
        if block_tokens not in self._hashes:
            self._hashes[block_tokens] = self._hash_blocks(block_tokens)
        return self._hashes[block_tokens]

    def _hash_blocks(self, block_tokens: int) -> list[bytes]:
        first_block = self.start // block_tokens
        before = Text(self.parent, self.parent_tokens) if self.parent else None
        head = self.start - first_block * block_tokens
        tokens = array("I")
        if before and head:
            tokens = before.tokens_from(self.start - head)
        tokens.extend(self.tokens)
        data = tokens.tobytes()
        previous = before.last_block_hash(block_tokens) if before else b""
        size = 4 * block_tokens
        hashes = []
        for offset in range(0, len(data) - size + 1, size):
            previous = hashlib.sha256(previous + data[offset : offset + size]).digest()
            hashes.append(previous)
        return hashes


@dataclass(frozen=True, slots=True)
class Text:
    """The first tokens of a passage, and everything before it.

    Attributes:
        passage: The last passage.
        used_tokens: The number of its tokens that belong to the text.
    """

    passage: Passage
    used_tokens: int

    def __len__(self) -> int:
        return self.passage.start + self.used_tokens

    def path(self) -> list[Text]:
        """The parts of the text's passages, in order."""
        parts = list(self.backwards())
        parts.reverse()
        return parts

    def cut(self, num_tokens: int) -> Text:
        """The first ``num_tokens`` tokens."""
        for part in self.backwards():
            if part.passage.start < num_tokens:
                return Text(part.passage, min(part.used_tokens, num_tokens - part.passage.start))
        raise ValueError(f"a text has at least one token, asked for {num_tokens}")

    def tokens(self) -> list[int]:
        return self.tokens_from(0).tolist()

    def tokens_from(self, start: int) -> array[int]:
        tokens = array("I")
        for part in self.path():
            first = max(0, start - part.passage.start)
            if first < part.used_tokens:
                tokens.extend(part.passage.tokens[first : part.used_tokens])
        return tokens

    def block_hashes(self, block_tokens: int) -> list[bytes]:
        """Chained hashes of the full blocks, in order."""
        hashes: list[bytes] = []
        for part in self.path():
            # The first hash of a passage belongs to block ``start // block_tokens``.
            num_blocks = len(part) // block_tokens - part.passage.start // block_tokens
            hashes += part.passage.block_hashes(block_tokens)[:num_blocks]
        return hashes

    def last_block_hash(self, block_tokens: int) -> bytes:
        """The hash of the last full block; empty if there is none."""
        for part in self.backwards():
            num_blocks = len(part) // block_tokens - part.passage.start // block_tokens
            if num_blocks:
                return part.passage.block_hashes(block_tokens)[num_blocks - 1]
        return b""

    def backwards(self) -> Iterator[Text]:
        passage = self.passage
        used = self.used_tokens
        while True:
            yield Text(passage, used)
            if passage.parent is None:
                return
            used = passage.parent_tokens
            passage = passage.parent


class Library:
    """Writes passages, which are all different, and equal for equal seeds."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._num_passages = 0

    def write(self, num_tokens: int, after: Text | None = None) -> Text:
        """Write a passage of some tokens behind ``after``, or a new text."""
        if num_tokens < 1:
            raise ValueError(f"a passage has at least one token, asked for {num_tokens}")
        index = self._num_passages
        self._num_passages += 1
        seed = int.from_bytes(hashlib.sha256(f"{self._seed}/{index}".encode()).digest()[:8], "big")
        parent, used = (after.passage, after.used_tokens) if after else (None, 0)
        return Text(Passage(index, parent, used, num_tokens, seed), num_tokens)
