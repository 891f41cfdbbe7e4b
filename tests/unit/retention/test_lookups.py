# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""How many blocks the compiled module looks up. Keys count how often they are found."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from unit.retention.small_cache import UNIT_TOKENS, ModelBlock, ModelCache, ModelKeyTable

from vllm_ascend_kvext._native import RetainedRequest


class CountedKey(bytes):
    """A key that counts how often it is compared. It is compared each time that it is found."""

    num_found = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.num_found += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


class SomeDict(dict):  # type: ignore[type-arg]
    """A dict of another type. Code that adds to it has to ask the table."""


class CountedTable(ModelKeyTable):
    def __init__(self) -> None:
        self._cache = SomeDict()

    def insert(self, key: bytes, block: ModelBlock) -> None:
        super().insert(CountedKey(key), block)


def make_cache(layout: str, num_blocks: int) -> ModelCache:
    cache = ModelCache(layout, num_blocks)
    cache.pool.cached_block_hash_to_block = CountedTable()
    return cache


def test_the_lookups_of_a_request_do_not_grow_with_its_siblings() -> None:
    """Few other prompts begin like this prompt, and then many do."""
    counts = []
    for num_siblings in (20, 400):
        cache = make_cache("full and window", 8000)
        for number in range(num_siblings):
            cache.serve("s" * 40 + chr(0x4E00 + number) * 12 + "x")
        before = CountedKey.num_found
        cache.serve("s" * 40 + "y" * 12 + "x")
        counts.append(CountedKey.num_found - before)
        cache.check()
    assert counts[0] and counts[1] < 1.2 * counts[0]


@settings(max_examples=100)
@given(
    num_cached=st.integers(0, 40),
    num_prompt_tokens=st.integers(1, 170),
    hit_units=st.integers(0, 20),
)
def test_what_full_attention_shares_is_found(
    num_cached: int, num_prompt_tokens: int, hit_units: int
) -> None:
    """The search doubles its steps first, and then halves them."""
    cache = make_cache("blocks below the unit", 400)
    request = cache.request("r", "a" * 170)
    expected = []
    for manager in cache.managers[:2]:
        block_tokens = manager.geometry.block_tokens
        num_blocks = num_cached * UNIT_TOKENS // block_tokens
        manager.req_to_blocks["r"] = cache.pool.allocate(num_blocks)
        cache.pool.cache(request, manager.group, range(num_blocks))
        expected.append(min(num_prompt_tokens // block_tokens, num_blocks) * block_tokens)
    hit_tokens = min(hit_units * UNIT_TOKENS, *(tokens // 4 * 4 for tokens in expected))
    state = RetainedRequest(cache.cache_state, request)
    key_table = cache.pool.cached_block_hash_to_block
    assert state.find_prefixes(key_table, hit_tokens, num_prompt_tokens) == (expected, 0)
