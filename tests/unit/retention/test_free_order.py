# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The order of free blocks: uncached blocks, surplus blocks, blocks that checkpoints need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from support.retention import inspection
from support.sample import sampled
from unit.retention.small_cache import FULL, WINDOW, ModelBlock, ModelCache, ModelRequest, spelled

from vllm_ascend_kvext.retention.geometry import GroupGeometry

NUM_BLOCKS = 40


def make_cache() -> ModelCache:
    return ModelCache((GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 5)), NUM_BLOCKS)


def put(cache: ModelCache, blocks: list[ModelBlock]) -> None:
    """Cache blocks with contents that no prompt has."""
    for block in blocks:
        block._block_hash = b"loose %d" % block.block_id
        cache.pool.cached_block_hash_to_block.insert(block._block_hash, block)


def served(cache: ModelCache, text: str) -> bool:
    request = ModelRequest(f"r{text}", text)
    if not cache.step(request, len(text)):
        return False
    cache.finish(request)
    return True


class FreeOrderMachine(RuleBasedStateMachine):
    """Blocks are allocated, cached, freed, hit, needed, and no longer needed, in any order.

    The test knows the exact order of the blocks that it allocates itself. For the blocks of
    requests, it checks the rules that hold for any order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = make_cache()
        self.pool, self.cache_state = self.cache.pool, self.cache.cache_state
        self.used: list[ModelBlock] = []
        self.touch = self.pool.touch = mock.Mock(wraps=self.pool.touch)  # type: ignore[method-assign]

    def parts(self) -> tuple[list[ModelBlock], list[ModelBlock], list[ModelBlock]]:
        queue = self.pool.queue
        unneeded = [b for b in queue if not inspection.num_needs(self.cache_state, b.block_id)]
        uncached = [b for b in unneeded if b._block_hash is None]
        surplus = [b for b in unneeded if b._block_hash is not None]
        return uncached, surplus, queue[len(unneeded) :]

    @rule(number=st.integers(1, 8))
    def allocate(self, number: int) -> None:
        """Allocate the first blocks that nothing needs, in the order in which they are free."""
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
        return inspection.num_needs(self.cache_state, block.block_id) > 0

    def _draw(self, data: st.DataObject, blocks: list[ModelBlock]) -> list[ModelBlock]:
        ids = [block.block_id for block in blocks]
        drawn = data.draw(st.lists(st.sampled_from(ids), min_size=1, unique=True))
        return [self.pool.blocks[index] for index in drawn]

    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        """Hit blocks.

        When they are freed again, they join the surplus at its end; see `free_some`.
        """
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
        """Checkpoints come. If there is little room, others are evicted."""
        self._compare_surplus(lambda: served(self.cache, spelled(units)))

    @rule(number=st.integers(1, 6))
    def make_room(self, number: int) -> None:
        self._compare_surplus(
            lambda: self.cache_state.make_room(
                min(len(inspection.surplus(self.cache_state)) + number, NUM_BLOCKS)
            )
        )

    def _compare_surplus(self, event: Callable[[], Any]) -> None:
        """Blocks that were surplus before and after come first. Their order does not change."""
        _, surplus, _ = self.parts()
        before = [(block, block._block_hash) for block in surplus]
        self.touch.reset_mock()
        event()
        hit_blocks = [call.args[0] for call in self.touch.call_args_list]
        _, surplus, _ = self.parts()
        stayed = [
            block
            for block, key in before
            if block in surplus and block._block_hash is key and block not in hit_blocks
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
        assert all(inspection.num_needs(self.cache_state, block.block_id) for block in needed)
        assert inspection.surplus(self.cache_state) == [
            block.block_id for block in uncached + surplus
        ]


TestFreeOrder = FreeOrderMachine.TestCase
TestFreeOrder.settings = settings(max_examples=sampled(100), stateful_step_count=40)


def test_a_needed_block_uncached_in_place_is_reallocated_in_the_end() -> None:
    cache = make_cache()
    served(cache, "a" * 8 + "x")
    needed = [b for b in cache.pool.queue if inspection.num_needs(cache.cache_state, b.block_id)]
    for block in needed:
        cache.pool.uncache_unasked(block)
    cache.cache_state.make_room(NUM_BLOCKS)
    assert len(inspection.surplus(cache.cache_state)) == NUM_BLOCKS
    assert len(cache.pool.allocate(NUM_BLOCKS)) == NUM_BLOCKS


def test_the_first_tokens_are_the_last_to_be_reallocated() -> None:
    cache = make_cache()
    served(cache, "a" * 40 + "x")
    while any(node["tail"] for node in inspection.describe(cache.cache_state)):
        cache.cache_state.make_room(len(inspection.surplus(cache.cache_state)) + 1)
    keys = [cache.pool.blocks[index]._block_hash for index in inspection.surplus(cache.cache_state)]
    full = [key for key in keys if key and key.endswith(b"\0\0\0\0")]
    assert full == sorted(full, key=len, reverse=True)


def test_no_block_is_lost_while_many_come_and_go() -> None:
    cache = make_cache()
    served(cache, "a" * 8 + "x")
    for number in range(20_000):
        (block,) = cache.pool.allocate(1)
        if number % 3:
            put(cache, [block])
        cache.pool.free([block])
    assert len(set(cache.pool.queue)) == NUM_BLOCKS
