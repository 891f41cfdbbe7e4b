# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The compiled module refuses unknown objects with a message. It changes nothing then."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.retention import inspection
from unit.retention.small_cache import UNIT_TOKENS, ModelCache, ModelKeyTable, ModelRequest

from vllm_ascend_kvext._native import RetainedCache, RetainedRequest
from vllm_ascend_kvext.retention.reasons import Origin


@dataclass(eq=False, slots=True)
class BlockWithoutLinks:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False


@pytest.fixture(params=[False, True], ids=["quiet", "events"])
def cache(request: pytest.FixtureRequest) -> ModelCache:
    return ModelCache("full and window", 60, has_events=request.param)


def make_cache_state(cache: ModelCache, blocks: Any, head: Any = None) -> RetainedCache:
    retention, queue = cache.retention, cache.pool.free_block_queue
    return RetainedCache(
        blocks=blocks,
        head=queue.fake_free_list_head if head is None else head,
        tail=queue.fake_free_list_tail,
        hash_block_tokens=cache.pool.hash_block_size,
        geometry=retention.policy.tables,
        sparse_groups=retention.sparse_groups,
        full_groups=retention.full_groups,
        quiet_sparse_groups=[True],
        quiet_full_groups=[True],
    )


@pytest.mark.parametrize(
    ("block", "slot"),
    [
        (SimpleNamespace(block_id=0), "block_id"),
        (BlockWithoutLinks(0), "prev_free_block"),
        (0, "block_id"),
    ],
)
def test_blocks_without_slots_are_refused(cache: ModelCache, block: Any, slot: str) -> None:
    message = f"the slot {slot}, found .*{type(block).__name__} without it.*status"
    with pytest.raises(TypeError, match=message):
        make_cache_state(cache, [block])


@pytest.mark.parametrize(
    "change",
    [
        lambda blocks: blocks[1:],
        lambda blocks: blocks[::-1],
        lambda blocks: [*blocks, None],
        lambda blocks: [*blocks[:-1], object()],
        lambda blocks: [*blocks, blocks[0]],
    ],
    ids=["no first", "reversed", "none", "another class", "twice"],
)
def test_blocks_out_of_place_are_refused(cache: ModelCache, change: Any) -> None:
    with pytest.raises(TypeError, match="each at the place of its id"):
        make_cache_state(cache, change(cache.pool.blocks))


def test_a_pool_without_blocks_is_refused(cache: ModelCache) -> None:
    with pytest.raises(TypeError, match="at least one"):
        make_cache_state(cache, [])
    with pytest.raises(TypeError):
        make_cache_state(cache, tuple(cache.pool.blocks))


def test_ends_of_a_queue_that_are_no_blocks_are_refused(cache: ModelCache) -> None:
    with pytest.raises(TypeError, match="ends of the class of its blocks"):
        make_cache_state(cache, cache.pool.blocks, head=object())


@pytest.mark.parametrize(
    ("hashes", "message"),
    [
        ((b"a",) * 3, "expected a list"),
        (None, "expected a list"),
        (["a"] * 3, "expected bytes"),
        ([1, 2, 3], "expected bytes"),
    ],
)
def test_hashes_that_are_no_list_of_bytes_are_refused(
    cache: ModelCache, hashes: Any, message: str
) -> None:
    cache.serve("b" * 12 + "x")
    request = ModelRequest("r", "a" * 12 + "x")
    for manager in cache.managers:
        manager.extend("r", 12)
    request.block_hashes = hashes
    state = RetainedRequest(cache.cache_state, request)
    with pytest.raises(TypeError, match=message):
        state.find_prefixes(cache.pool.cached_block_hash_to_block, 0, 12)
    with pytest.raises(TypeError, match=message):
        cache.retention.cache(request, 12)
    assert not any(block._block_hash for block in cache.managers[0].req_to_blocks["r"])
    request.block_hashes = []
    request.hash_blocks(UNIT_TOKENS)
    cache.retention.cache(request, 12)
    assert all(block._block_hash for block in cache.managers[0].req_to_blocks["r"])


def test_a_full_block_without_a_hash_is_refused() -> None:
    cache = ModelCache("full and window", 60)
    request = ModelRequest("r", "a" * 12 + "x")
    for manager in cache.managers:
        manager.extend("r", 12)
    with pytest.raises(IndexError):
        cache.retention.cache(request, 12)


def test_more_tokens_than_a_request_has_hashes_for_are_refused(cache: ModelCache) -> None:
    cache.serve("a" * 12 + "x")
    cache.cache_state.make_room(60)
    state = RetainedRequest(cache.cache_state, ModelRequest("r", "a" * 12))
    key_table = cache.pool.cached_block_hash_to_block
    with pytest.raises(IndexError, match="hashes"):
        state.find_prefixes(key_table, 0, 12)
    for tokens in (12, 0):
        with pytest.raises(IndexError, match="hashes"):
            state.plan([(tokens, Origin.WANTED, 0)], [], [], 0)


def test_a_key_table_without_a_dict_is_refused(cache: ModelCache) -> None:
    request = cache.request("r", "a" * 12)

    table = ModelKeyTable()
    table._cache = [b"a"]  # type: ignore[assignment]
    state = RetainedRequest(cache.cache_state, request)
    with pytest.raises(TypeError, match="expected a dict"):
        state.find_prefixes(table, 0, 12)
    with pytest.raises(AttributeError):
        state.find_prefixes(object(), 0, 12)


@pytest.mark.parametrize("call", ["split_freed", "note_surplus", "note_uncached"])
@pytest.mark.parametrize("wrong", [None, 3, BlockWithoutLinks(0)])
def test_what_is_no_block_of_the_pool_is_not_freed(
    cache: ModelCache, call: str, wrong: Any
) -> None:
    more = [1] if call == "note_surplus" else []
    with pytest.raises(TypeError, match="blocks of the pool"):
        getattr(cache.cache_state, call)([wrong], *more)
    cache.check()


@pytest.mark.parametrize("block_id", [-1, 60, 10**6])
def test_needs_of_no_block_are_refused(cache: ModelCache, block_id: int) -> None:
    with pytest.raises(IndexError, match="no such block"):
        inspection.num_needs(cache.cache_state, block_id)


def test_a_request_keeps_its_cache_alive() -> None:
    cache = ModelCache("full and window", 60)
    cache.serve("a" * 12 + "x")
    state = RetainedRequest(cache.cache_state, cache.request("r", "a" * 12 + "x"))
    key_table = cache.pool.cached_block_hash_to_block
    del cache
    assert state.find_prefixes(key_table, 0, 12) == ([12], 0)
