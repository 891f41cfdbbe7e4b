# SPDX-License-Identifier: Apache-2.0
"""What is not as the compiled books know it is refused in words, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelBlock, ModelKeyTable, ModelRequest
from unit.retention.test_checkpoint_tree import LAYOUTS, UNIT_TOKENS, check, served

from vllm_ascend_kvext._native import RetainedCache, RetainedRequest
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.native_tables import GeometryTables, GroupTables


@dataclass(eq=False)
class BlockWithoutSlots:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False
    prev_free_block: Any = None
    next_free_block: Any = None


@dataclass(eq=False, slots=True)
class BlockWithoutLinks:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False


@pytest.fixture(params=[False, True], ids=["quiet", "events"])
def cache(request: pytest.FixtureRequest) -> ModelCache:
    geometry = HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS)
    return ModelCache(geometry, 60, has_events=request.param)


def make_books(cache: ModelCache, blocks: Any, head: Any = None, tail: Any = None) -> RetainedCache:
    retention, queue = cache.retention, cache.pool.free_queue
    policy = retention.policy
    return RetainedCache(
        blocks=blocks,
        head=queue.fake_free_list_head if head is None else head,
        tail=queue.fake_free_list_tail if tail is None else tail,
        geometry=GeometryTables.of(policy, retention.sparse_groups, retention.full_groups),
        sparse_groups=[GroupTables.of(g, policy, 4) for g in retention.sparse_groups],
        full_groups=[GroupTables.of(g, policy, 4) for g in retention.full_groups],
        skips_by_tokens=False,
        has_events=False,
    )


@pytest.mark.parametrize(
    ("block_class", "slot"),
    [(BlockWithoutSlots, "block_id"), (BlockWithoutLinks, "prev_free_block"), (int, "block_id")],
)
def test_blocks_without_slots_are_refused(cache: ModelCache, block_class: Any, slot: str) -> None:
    message = f"the slot {slot}, found {block_class.__name__} without it.*status"
    with pytest.raises(TypeError, match=message):
        make_books(cache, [block_class(index) for index in range(3)])


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
        make_books(cache, change(cache.pool.blocks))


def test_a_pool_without_blocks_is_refused(cache: ModelCache) -> None:
    with pytest.raises(TypeError, match="at least one"):
        make_books(cache, [])
    with pytest.raises(TypeError):
        make_books(cache, tuple(cache.pool.blocks))


def test_ends_of_a_queue_that_are_no_blocks_are_refused(cache: ModelCache) -> None:
    with pytest.raises(TypeError, match="ends of the class of its blocks"):
        make_books(cache, cache.pool.blocks, head=object())


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
    served(cache, "b" * 12 + "x")
    request = ModelRequest.of("r", "a" * 12 + "x", None)
    for manager in cache.managers:
        manager.extend("r", 12)
    request.block_hashes = hashes
    books = RetainedRequest(cache.books, request)
    with pytest.raises(TypeError, match=message):
        books.find_shared(cache.pool.key_table, 0, 12)
    with pytest.raises(TypeError, match=message):
        cache.retention.cache(request, 12)
    assert not any(block._block_hash for block in cache.managers[0].req_to_blocks["r"])
    request.block_hashes = []
    request.hash_blocks(UNIT_TOKENS)
    cache.retention.cache(request, 12)
    assert all(block._block_hash for block in cache.managers[0].req_to_blocks["r"])


def test_a_full_block_without_a_hash_is_refused() -> None:
    cache = ModelCache(HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS), 60)
    request = ModelRequest.of("r", "a" * 12 + "x")
    for manager in cache.managers:
        manager.extend("r", 12)
    with pytest.raises(IndexError):
        cache.retention.cache(request, 12)


def test_more_tokens_than_a_request_has_hashes_for_are_refused(cache: ModelCache) -> None:
    served(cache, "a" * 12 + "x")
    cache.books.make_room(60)
    books = RetainedRequest(cache.books, ModelRequest.of("r", "a" * 12))
    for refused in (lambda: books.find_evicted(0, 12), lambda: books.want(12)):
        with pytest.raises(IndexError, match="hashes"):
            refused()
    with pytest.raises(IndexError, match="hashes"):
        books.want(0)


def test_a_key_table_without_a_dict_is_refused(cache: ModelCache) -> None:
    request = cache.request("r", "a" * 12)

    table = ModelKeyTable()
    table._cache = [b"a"]  # type: ignore[assignment]
    books = RetainedRequest(cache.books, request)
    with pytest.raises(TypeError, match="expected a dict"):
        books.find_shared(table, 0, 12)
    with pytest.raises(AttributeError):
        books.find_shared(object(), 0, 12)


@pytest.mark.parametrize("call", ["split_freed", "note_surplus", "note_uncached"])
@pytest.mark.parametrize("wrong", [None, 3, BlockWithoutLinks(0)])
def test_what_is_no_block_of_the_pool_is_not_freed(
    cache: ModelCache, call: str, wrong: Any
) -> None:
    more = [1] if call == "note_surplus" else []
    with pytest.raises(TypeError, match="blocks of the pool"):
        getattr(cache.books, call)([wrong], *more)
    check(cache)


def test_more_surplus_than_was_freed_is_refused(cache: ModelCache) -> None:
    with pytest.raises(ValueError, match="2 of 1"):
        cache.books.note_surplus([cache.pool.blocks[0]], 2)
    check(cache)


@pytest.mark.parametrize("block_id", [-1, 60, 10**6])
def test_needs_of_no_block_are_refused(cache: ModelCache, block_id: int) -> None:
    with pytest.raises(IndexError, match="no such block"):
        cache.books.num_needs(block_id)


def test_a_request_keeps_its_cache_alive() -> None:
    geometry = HitGeometry(LAYOUTS["full and window"], UNIT_TOKENS)
    cache = ModelCache(geometry, 60)
    served(cache, "a" * 12 + "x")
    books = RetainedRequest(cache.books, cache.request("r", "a" * 12 + "x"))
    key_table = cache.pool.key_table
    del cache
    assert books.find_shared(key_table, 0, 12) == [12]
    assert books.find_evicted(0, 12) == 0


def test_blocks_of_a_subclass_are_refused(cache: ModelCache) -> None:
    class Other(ModelBlock):
        pass

    with pytest.raises(TypeError, match="of one class"):
        make_books(cache, [*cache.pool.blocks, Other(60)])
