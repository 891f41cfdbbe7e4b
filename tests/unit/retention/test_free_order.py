# SPDX-License-Identifier: Apache-2.0
"""The order of free blocks against three plain lists: not cached, surplus, needed."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from unit.retention.pool_model import ModelBlock, ModelQueue

from vllm_ascend_kvext.retention.free_order import FreeOrder

NUM_BLOCKS = 12


class FreeOrderMachine(RuleBasedStateMachine):
    """Blocks are allocated, cached, freed, hit, needed, and needed no more, in any order."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [ModelBlock(index) for index in range(NUM_BLOCKS)]
        self.queue = ModelQueue(blocks)
        self.needs = [0] * NUM_BLOCKS
        self.order = FreeOrder(self.queue, NUM_BLOCKS, self.needs)
        self.uncached: list[ModelBlock] = list(blocks)
        self.surplus: list[ModelBlock] = []
        self.needed: list[ModelBlock] = []
        self.used: list[ModelBlock] = []

    @property
    def free(self) -> list[ModelBlock]:
        return self.uncached + self.surplus + self.needed

    @rule(number=st.integers(1, NUM_BLOCKS))
    def allocate(self, number: int) -> None:
        for block in (self.uncached + self.surplus)[:number]:
            (self.uncached if block in self.uncached else self.surplus).remove(block)
            self.queue.remove(block)
            block._block_hash = None
            block.ref_cnt = 1
            self.used.append(block)

    @precondition(lambda self: self.used)
    @rule(data=st.data(), is_cached=st.booleans(), is_needed=st.booleans())
    def free_some(self, data: st.DataObject, is_cached: bool, is_needed: bool) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.used), min_size=1, unique_by=id))
        for block in blocks:
            self.used.remove(block)
            block.ref_cnt = 0
            if is_cached and block._block_hash is None:
                block._block_hash = b"%d" % block.block_id
        if not is_cached:
            blocks = [b for b in blocks if b._block_hash is None] or []
        uncached = [b for b in blocks if b._block_hash is None]
        cached = [b for b in blocks if b._block_hash is not None]
        if uncached:
            self.queue.prepend_n(uncached)
            self.order.note_prepended(uncached)
            self.uncached = uncached + self.uncached
        elif is_needed:
            for block in cached:
                self.needs[block.block_id] = 1
            self.queue.append_n(cached)
            self.needed += cached
        else:
            self.queue.append_n(cached)
            self.order.note_appended(cached)
            self.surplus += cached

    @precondition(lambda self: self.surplus or self.needed)
    @rule(data=st.data())
    def hit(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.surplus + self.needed))
        (self.surplus if block in self.surplus else self.needed).remove(block)
        self.needs[block.block_id] = 0
        self.queue.remove(block)
        block.ref_cnt = 1
        self.used.append(block)

    @precondition(lambda self: self.surplus)
    @rule(data=st.data())
    def need(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(self.surplus), min_size=1, unique_by=id))
        for block in blocks:
            self.needs[block.block_id] = 1
            self.surplus.remove(block)
        self.order.move_to_back(blocks)
        self.needed += blocks

    @precondition(lambda self: self.needed or self.surplus)
    @rule(data=st.data())
    def need_no_more(self, data: st.DataObject) -> None:
        """Or refresh what is surplus already; blocks in use are left alone."""
        choice = self.needed + self.surplus
        blocks = data.draw(st.lists(st.sampled_from(choice), min_size=1, unique_by=id))
        for block in blocks:
            self.needs[block.block_id] = 0
            (self.needed if block in self.needed else self.surplus).remove(block)
        self.order.move_to_surplus([*blocks, *self.used])
        self.surplus += blocks

    @rule()
    def reset(self) -> None:
        if not self.used:
            for block in self.surplus + self.needed:
                block._block_hash = None
                self.needs[block.block_id] = 0
            self.uncached, self.surplus, self.needed = self.free, [], []
            self.order.clear()

    @invariant()
    def is_the_order_of_the_lists(self) -> None:
        assert self.queue.get_all_free_blocks() == self.free

    @invariant()
    def counts_what_nothing_needs(self) -> None:
        num_unneeded = len(self.uncached) + len(self.surplus)
        assert self.order.count_next(NUM_BLOCKS) == num_unneeded
        assert self.order.count_next(2) == min(2, num_unneeded)
        assert self.order.next_blocks(3) == self.free[:3]


TestFreeOrder = FreeOrderMachine.TestCase
TestFreeOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)


def test_entries_do_not_pile_up() -> None:
    blocks = [ModelBlock(index) for index in range(8)]
    queue = ModelQueue(blocks)
    order = FreeOrder(queue, 8, [0] * 8)
    for number in range(2000):
        block = queue.get_all_free_blocks()[0]
        queue.remove(block)
        if number % 3:
            block._block_hash = b"%d" % number
            queue.append_n([block])
            order.note_appended([block])
        else:
            block._block_hash = None
            queue.prepend_n([block])
            order.note_prepended([block])
    assert len(order._surplus) + len(order._uncached) < 40
