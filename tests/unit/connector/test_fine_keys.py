# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keys between vLLM's hashes: equal for equal tokens, and vLLM's own where it hashes."""

from __future__ import annotations

import random
from hashlib import sha256
from typing import Any

from vllm_ascend_kvext.connector.common.fine_keys import FineKeys

HASH, KEY = 32, 8


class Prompt:
    """A request with hashes of blocks, which covers all tokens that it knows."""

    def __init__(self, tokens: list[int]) -> None:
        self.all_token_ids = list(tokens)
        self.block_hashes: list[bytes] = []
        self.grow([])

    @property
    def num_tokens(self) -> int:
        return len(self.all_token_ids)

    def grow(self, tokens: list[int]) -> None:
        self.all_token_ids += tokens
        while (len(self.block_hashes) + 1) * HASH <= self.num_tokens:
            first = len(self.block_hashes) * HASH
            before = self.block_hashes[-1] if self.block_hashes else None
            self.block_hashes.append(hashed(before, self, first, first + HASH))


def hashed(before: bytes | None, request: Any, first: int, end: int) -> bytes:
    return sha256((before or b"") + bytes(request.all_token_ids[first:end])).digest()


def keys() -> FineKeys:
    return FineKeys(KEY, HASH, hashed)


def test_keys_of_equal_beginnings_are_equal_and_no_others() -> None:
    rng = random.Random(3)
    beginning = [rng.randrange(4) for _ in range(100)]
    found: dict[bytes, tuple[int, ...]] = {}
    fine = keys()
    for _ in range(60):
        shared = beginning[: rng.randrange(100)]
        prompt = Prompt([*shared, *(rng.randrange(4) for _ in range(rng.randrange(60)))])
        prefix = fine.prefix(prompt)  # type: ignore[arg-type]
        assert prefix.num_tokens == prompt.num_tokens // KEY * KEY
        for end in range(KEY, prefix.num_tokens + 1, KEY):
            tokens = tuple(prompt.all_token_ids[:end])
            assert found.setdefault(prefix.key_at(end), tokens) == tokens
    assert len(found) == len(set(found.values()))


def test_where_vllm_hashes_its_hash_is_the_key() -> None:
    prompt = Prompt([number % 7 for number in range(130)])
    prefix = keys().prefix(prompt)  # type: ignore[arg-type]
    for number, block_hash in enumerate(prompt.block_hashes, 1):
        assert prefix.key_at(number * HASH) == block_hash
    assert prefix.upstream is not None
    assert prefix.upstream.hashes is prompt.block_hashes


def test_keys_grow_with_a_request() -> None:
    rng = random.Random(4)
    prompt, fine = Prompt([]), keys()
    for _ in range(50):
        prompt.grow([rng.randrange(9) for _ in range(rng.randrange(7))])
        anew = keys().prefix(prompt)  # type: ignore[arg-type]
        assert fine.prefix(prompt) == anew  # type: ignore[arg-type]


def test_keys_of_replaced_tokens_are_forgotten() -> None:
    prompt, fine = Prompt(list(range(100))), keys()
    fine.prefix(prompt)  # type: ignore[arg-type]
    prompt.all_token_ids[90:] = [1] * 20
    fine.forget(prompt)  # type: ignore[arg-type]
    assert fine.prefix(prompt) == keys().prefix(prompt)  # type: ignore[arg-type]
    # Hashes that were replaced are noticed without a word.
    prompt.block_hashes[-1] = b"private"
    assert fine.prefix(prompt) == keys().prefix(prompt)  # type: ignore[arg-type]


def test_a_request_that_is_not_hashed_so_far_has_keys_up_to_there() -> None:
    prompt = Prompt(list(range(100)))
    del prompt.block_hashes[1:]
    assert keys().prefix(prompt).num_tokens == 2 * HASH - KEY  # type: ignore[arg-type]
