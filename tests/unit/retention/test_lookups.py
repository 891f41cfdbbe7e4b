# SPDX-License-Identifier: Apache-2.0
"""How many blocks the compiled books look up: keys count how often they are found."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelBlock, ModelKeyTable
from unit.retention.test_checkpoint_tree import LAYOUTS, UNIT_TOKENS, check, served

from vllm_ascend_kvext._native import RetainedRequest
from vllm_ascend_kvext.retention.geometry import HitGeometry


class CountedKey(bytes):
    """A key that counts how often it is compared: each time that it is found."""

    num_found = 0

    def __eq__(self, other: object) -> bool:
        CountedKey.num_found += 1
        return bytes.__eq__(self, other)

    __hash__ = bytes.__hash__


class SomeDict(dict):  # type: ignore[type-arg]
    """Whoever adds to it has to ask the table."""


class CountedTable(ModelKeyTable):
    def __init__(self) -> None:
        self._cache = SomeDict()

    def insert(self, key: bytes, block: ModelBlock) -> None:
        super().insert(CountedKey(key), block)


def make_cache(layout: str, num_blocks: int) -> ModelCache:
    cache = ModelCache(HitGeometry(LAYOUTS[layout], UNIT_TOKENS), num_blocks)
    cache.pool.key_table = CountedTable()
    return cache


def test_the_lookups_of_a_request_do_not_grow_with_its_siblings() -> None:
    """For one prompt among few and among many that begin alike."""
    counts = []
    for num_siblings in (20, 400):
        cache = make_cache("full and window", 8000)
        for number in range(num_siblings):
            served(cache, "s" * 40 + chr(0x4E00 + number) * 12 + "x")
        before = CountedKey.num_found
        served(cache, "s" * 40 + "y" * 12 + "x")
        counts.append(CountedKey.num_found - before)
        check(cache)
    assert counts[0] and counts[1] < 1.2 * counts[0]


@pytest.mark.parametrize("num_prompt_units", [500, 1000, 2000])
def test_shared_tokens_take_a_logarithm_of_lookups(num_prompt_units: int) -> None:
    cache = make_cache("full and window", 1100)
    request = cache.request("r", "a" * 8000)
    manager = cache.managers[0]
    manager.req_to_blocks["r"] = cache.pool.allocate(1000)
    cache.pool.cache(request, manager.group, range(1000))
    books = RetainedRequest(cache.books, request)
    before = CountedKey.num_found
    shared = books.find_shared(cache.pool.key_table, 0, num_prompt_units * UNIT_TOKENS)
    assert shared == [min(1000, num_prompt_units) * UNIT_TOKENS]
    assert 0 < CountedKey.num_found - before <= 2 * math.log2(1000) + 2


@settings(max_examples=100, deadline=None)
@given(
    num_cached=st.integers(0, 40),
    num_prompt_tokens=st.integers(1, 170),
    hit_units=st.integers(0, 20),
)
def test_what_full_attention_shares_is_found(
    num_cached: int, num_prompt_tokens: int, hit_units: int
) -> None:
    """By a search that doubles its steps, and then halves them."""
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
    books = RetainedRequest(cache.books, request)
    assert books.find_shared(cache.pool.key_table, hit_tokens, num_prompt_tokens) == expected
