# SPDX-License-Identifier: Apache-2.0
"""The order of free blocks: those that are not cached, surplus, those that checkpoints need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.sample import sampled
from unit.retention.manager_model import ModelCache
from unit.retention.pool_model import ModelBlock, ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry

NUM_BLOCKS = 40
LAYOUT = (GroupGeometry(GroupKind.FULL, 4), GroupGeometry(GroupKind.WINDOW, 4, 5))


def make_cache(num_blocks: int = NUM_BLOCKS) -> ModelCache:
    return ModelCache(HitGeometry(LAYOUT, 4), num_blocks)


def put(cache: ModelCache, blocks: list[ModelBlock]) -> None:
    """Cache blocks that hold what no prompt does."""
    for block in blocks:
        block._block_hash = b"loose %d" % block.block_id
        cache.pool.key_table.insert(block._block_hash, block)


def served(cache: ModelCache, text: str) -> bool:
    request = ModelRequest.of(f"r{text}", text)
    if not cache.step(request, len(text)):
        return False
    cache.finish(request)
    return True


class FreeOrderMachine(RuleBasedStateMachine):
    """Blocks are allocated, cached, freed, hit, needed, and needed no more, in any order.

    Those that this test allocates it knows the exact order of. What requests do to the others is
    checked by what has to hold of any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.pool, self.books = self.cache.pool, self.cache.books
        self.used: list[ModelBlock] = []
        self.hit_blocks: set[int] = set()
        self._record_hits()

    def _record_hits(self) -> None:
        touch = self.pool.touch

        def record(block: ModelBlock) -> None:
            self.hit_blocks.add(block.block_id)
            touch(block)

        self.pool.touch = record  # type: ignore[method-assign]

    def parts(self) -> tuple[list[ModelBlock], list[ModelBlock], list[ModelBlock]]:
        queue = self.pool.queue
        unneeded = [b for b in queue if not self.books.num_needs(b.block_id)]
        uncached = [b for b in unneeded if b._block_hash is None]
        surplus = [b for b in unneeded if b._block_hash is not None]
        return uncached, surplus, queue[len(unneeded) :]

    @rule(number=st.integers(1, 8))
    def allocate(self, number: int) -> None:
        """Of what nothing needs: the first ones, in order."""
        uncached, surplus, needed = self.parts()
        number = min(number, len(uncached) + len(surplus))
        taken = self.pool.allocate(number)
        assert taken == (uncached + surplus)[:number]
        assert self.parts() == (
            uncached[number:],
            surplus[max(0, number - len(uncached)) :],
            needed,
        )
        self.used += taken

    @precondition(lambda self: self.used)
    @rule(data=st.data(), is_cached=st.booleans())
    def free_some(self, data: st.DataObject, is_cached: bool) -> None:
        blocks = self._draw(data, self.used)
        if is_cached:
            put(self.cache, [block for block in blocks if block._block_hash is None])
        uncached, surplus, needed = self.parts()
        self.pool.free(blocks)
        freed = blocks[::-1]
        self.used = [block for block in self.used if block not in blocks]
        assert self.parts() == (
            [block for block in freed if block._block_hash is None] + uncached,
            surplus + [b for b in freed if b._block_hash is not None and not self._is_needed(b)],
            needed + [b for b in freed if self._is_needed(b)],
        )

    def _is_needed(self, block: ModelBlock) -> bool:
        return self.books.num_needs(block.block_id) > 0

    def _draw(self, data: st.DataObject, blocks: list[ModelBlock]) -> list[ModelBlock]:
        ids = [block.block_id for block in blocks]
        drawn = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
        return [self.pool.blocks[index] for index in drawn]

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Once freed again, they go to the end of the surplus, as `free_some` checks."""
        _, surplus, _ = self.parts()
        if surplus:
            blocks = self._draw(data, surplus)
            for block in blocks:
                self.pool.touch(block)
            self.used += blocks

    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        uncached, surplus, needed = self.parts()
        if not surplus:
            return
        blocks = self._draw(data, surplus)
        self.pool.discard(blocks)
        left = [block for block in surplus if block not in blocks]
        assert self.parts() == (blocks + uncached, left, needed)

    @rule(units=st.lists(st.sampled_from("aab"), min_size=1, max_size=5))
    def serve(self, units: list[str]) -> None:
        """Checkpoints come, and where room is short some go."""
        self._compare_surplus(lambda: served(self.cache, "".join(u * 4 for u in units) + "x"))

    @rule(number=st.integers(1, 6))
    def make_room(self, number: int) -> None:
        self._compare_surplus(
            lambda: self.books.make_room(min(len(self.books.surplus()) + number, NUM_BLOCKS))
        )

    def _compare_surplus(self, event: Callable[[], Any]) -> None:
        """What was surplus and stays it comes first, in the order that it had."""
        _, surplus, _ = self.parts()
        before = [(block, block._block_hash) for block in surplus]
        self.hit_blocks.clear()
        event()
        _, surplus, _ = self.parts()
        stayed = [
            block
            for block, key in before
            if block in surplus
            and block._block_hash is key
            and block.block_id not in self.hit_blocks
        ]
        assert surplus[: len(stayed)] == stayed

    @precondition(lambda self: not self.used)
    @rule()
    def reset(self) -> None:
        self.cache.reset()
        assert self.parts() == (self.pool.queue, [], [])

    @invariant()
    def the_parts_follow_each_other(self) -> None:
        uncached, surplus, needed = self.parts()
        assert self.pool.queue == uncached + surplus + needed
        assert all(self.books.num_needs(block.block_id) for block in needed)
        assert self.books.surplus() == [block.block_id for block in uncached + surplus]


TestFreeOrder = FreeOrderMachine.TestCase
TestFreeOrder.settings = settings(max_examples=sampled(100), stateful_step_count=40, deadline=None)


@pytest.fixture
def cache() -> ModelCache:
    return make_cache()


def surplus_of(cache: ModelCache) -> list[ModelBlock]:
    blocks = [cache.pool.blocks[index] for index in cache.books.surplus()]
    return [block for block in blocks if block._block_hash is not None]


def loose_blocks(cache: ModelCache, number: int) -> list[ModelBlock]:
    """Cached blocks that nobody uses or needs, in the order of the queue."""
    blocks = cache.pool.allocate(number)
    put(cache, blocks)
    cache.pool.free(blocks[::-1])
    assert surplus_of(cache)[-number:] == blocks
    return blocks


def test_a_surplus_block_that_is_hit_goes_to_the_end_of_the_surplus(cache: ModelCache) -> None:
    first, second, third = loose_blocks(cache, 3)
    cache.pool.touch(second)
    cache.pool.free([second])
    assert surplus_of(cache) == [first, third, second]
    cache.pool.touch(first)
    cache.pool.free([first])
    assert surplus_of(cache) == [third, second, first]


def test_a_block_that_two_use_is_not_free_when_one_frees_it(cache: ModelCache) -> None:
    first, second = loose_blocks(cache, 2)
    cache.pool.touch(first)
    cache.pool.touch(first)
    cache.pool.free([first])
    assert surplus_of(cache) == [second]
    cache.pool.free([first])
    assert surplus_of(cache) == [second, first]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_block_uncached_in_place_does_no_harm(cache: ModelCache, place: int) -> None:
    """As a connector has it done whose load failed."""
    served(cache, "a" * 8 + "x")
    blocks = loose_blocks(cache, 3)
    cache.pool.uncache(blocks[place])
    more = loose_blocks(cache, 2)
    left = [block for block in blocks if block is not blocks[place]]
    assert [block for block in surplus_of(cache) if block in left + more] == left + more
    needed = [b for b in cache.pool.queue if cache.books.num_needs(b.block_id)]
    assert needed and cache.pool.queue[-len(needed) :] == needed
    served(cache, "b" * 12 + "x")
    assert len(cache.pool.queue) == NUM_BLOCKS


def test_a_needed_block_uncached_in_place_is_reallocated_in_the_end(cache: ModelCache) -> None:
    served(cache, "a" * 8 + "x")
    needed = [b for b in cache.pool.queue if cache.books.num_needs(b.block_id)]
    for block in needed:
        cache.pool.uncache_unasked(block)
    cache.books.make_room(NUM_BLOCKS)
    assert len(cache.books.surplus()) == NUM_BLOCKS
    assert len(cache.pool.allocate(NUM_BLOCKS)) == NUM_BLOCKS


def test_the_first_tokens_are_the_last_to_be_reallocated(cache: ModelCache) -> None:
    served(cache, "a" * 40 + "x")
    while any(node["tail"] for node in cache.books.describe()):
        cache.books.make_room(len(cache.books.surplus()) + 1)
    keys = [block._block_hash for block in surplus_of(cache)]
    full = [key for key in keys if key and key.endswith(b"\0\0\0\0")]
    assert full == sorted(full, key=len, reverse=True)


@pytest.mark.parametrize("number", [0, -1, 10**6])
def test_room_of_any_size_may_be_asked_for(cache: ModelCache, number: int) -> None:
    served(cache, "a" * 8 + "x")
    num_checkpoints = cache.stats.checkpoints
    cache.books.make_room(number)
    assert cache.stats.checkpoints == (0 if number > 0 else num_checkpoints)


def test_no_block_is_lost_while_many_come_and_go(cache: ModelCache) -> None:
    served(cache, "a" * 8 + "x")
    for number in range(20_000):
        (block,) = cache.pool.allocate(1)
        if number % 3:
            put(cache, [block])
        cache.pool.free([block])
    assert len(set(cache.pool.queue)) == NUM_BLOCKS
