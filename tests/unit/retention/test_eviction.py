# SPDX-License-Identifier: Apache-2.0
"""The least worthy checkpoint gives way first, and none that a request holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.retention.pool_model import ModelBlock, hash_of

from vllm_ascend_kvext.retention.checkpoints import Checkpoint, TailCounts
from vllm_ascend_kvext.retention.eviction import HALF_LIFE, EvictionOrder
from vllm_ascend_kvext.retention.protocols import CachedBlock
from vllm_ascend_kvext.retention.reasons import Origin, Reason, UseRates

PROMPT, LADDER = Reason(Origin.PROMPT), Reason(Origin.LADDER)


class World:
    def __init__(self) -> None:
        self.rates = UseRates()
        self.counts = TailCounts()
        self.order = EvictionOrder(self.rates, self.counts)
        self.root = Checkpoint(b"", 0, None, PROMPT)
        self._ids = itertools.count()

    def blocks(self, number: int) -> list[CachedBlock]:
        found = []
        for block_id in itertools.islice(self._ids, number):
            block_hash = hash_of("prefix", block_id)
            found.append((ModelBlock(block_id, _block_hash=block_hash), block_hash))
        return found

    def checkpoint(
        self,
        span_tokens: int,
        parent: Checkpoint | None = None,
        reason: Reason = PROMPT,
        num_tail_blocks: int = 1,
        num_run_blocks: int = 0,
    ) -> Checkpoint:
        parent = parent or self.root
        boundary_tokens = parent.boundary_tokens + span_tokens
        node = Checkpoint(b"%d" % boundary_tokens, boundary_tokens, parent, reason)
        parent.children.add(node)
        node.runs = (self.blocks(num_run_blocks),)
        node.tail = self.blocks(num_tail_blocks)
        self.counts.add(node.tail)
        self.order.renew(node)
        return node

    def pop(self) -> Checkpoint | None:
        """As the tree does: what is popped loses its tail."""
        node = self.order.pop()
        if node is not None:
            self.counts.remove(node.tail)
            node.tail = []
            if not node.children:
                node.parent.children.discard(node)
        return node


@pytest.fixture
def world() -> World:
    return World()


def test_nothing_to_pop(world: World) -> None:
    assert world.pop() is None


def test_what_saves_less_goes_first(world: World) -> None:
    nodes = [world.checkpoint(tokens) for tokens in (64, 16, 32)]
    assert [world.pop() for _ in range(4)] == [nodes[1], nodes[2], nodes[0], None]


def test_what_takes_more_blocks_goes_first(world: World) -> None:
    small = world.checkpoint(64)
    wide = world.checkpoint(64, num_tail_blocks=4)
    long = world.checkpoint(64, num_run_blocks=8)
    assert [world.pop() for _ in range(3)] == [long, wide, small]


def test_what_is_expected_to_be_used_goes_last(world: World) -> None:
    world.rates.count_use(PROMPT)
    world.rates.count_eviction(LADDER)
    useful = world.checkpoint(64)
    useless = world.checkpoint(64, reason=LADDER)
    assert [world.pop(), world.pop()] == [useless, useful]


def test_worth_halves_in_a_half_life(world: World) -> None:
    older = world.checkpoint(64)
    world.order.advance(0.9 * HALF_LIFE)
    younger = world.checkpoint(32)
    assert world.pop() is younger
    world.order.advance(0.2 * HALF_LIFE)
    youngest = world.checkpoint(32)
    assert [world.pop(), world.pop()] == [older, youngest]


def test_renewal_counts_from_anew(world: World) -> None:
    first, second = world.checkpoint(64), world.checkpoint(64)
    world.order.advance(HALF_LIFE)
    world.order.renew(first)
    assert [world.pop(), world.pop(), world.pop()] == [second, first, None]


def test_blocks_that_tails_share_are_shared_out(world: World) -> None:
    """Two that overlap take three blocks together, not four."""
    lone = world.checkpoint(64, num_tail_blocks=2)
    overlapping = [world.checkpoint(64, num_tail_blocks=2) for _ in range(2)]
    shared = overlapping[0].tail[0]
    world.counts.remove(overlapping[1].tail[:1])
    overlapping[1].tail[0] = shared
    world.counts.add([shared])
    for node in overlapping:
        world.order.update(node)
    assert world.pop() is lone


def test_neighbours_do_not_vouch_for_each_other(world: World) -> None:
    """Three that share a window save little; that none could be evicted alone protects none."""
    lone = world.checkpoint(1024, num_tail_blocks=64)
    parent, close = world.root, []
    for _ in range(3):
        parent = world.checkpoint(16, parent, num_tail_blocks=0)
        parent.tail = close[0].tail if close else world.blocks(64)
        world.counts.add(parent.tail)
        close.append(parent)
    for node in close:
        world.order.update(node)
    assert {world.pop(), world.pop(), world.pop()} == set(close)
    assert world.pop() is lone


def test_tokens_are_saved_from_the_last_checkpoint_before(world: World) -> None:
    parent = world.checkpoint(1024)
    child = world.checkpoint(16, parent)
    assert world.pop() is child


def test_the_way_to_a_boundary_goes_with_the_last_one_behind_it(world: World) -> None:
    """A boundary without a tail is there for its child only, and goes with it."""
    via = world.checkpoint(64, num_run_blocks=15)
    world.counts.remove(via.tail)
    via.tail = []
    end = world.checkpoint(64, via, num_run_blocks=16)
    direct = world.checkpoint(128, num_run_blocks=30)
    assert [world.pop(), world.pop()] == [end, direct]


@pytest.mark.parametrize("holder", ["child", "pin"])
def test_a_way_that_something_else_needs_is_not_freed(world: World, holder: str) -> None:
    node = world.checkpoint(64, num_run_blocks=15)
    if holder == "child":
        world.checkpoint(4096, node)
    else:
        node.pins = 1
    world.order.update(node)
    other = world.checkpoint(64, num_run_blocks=7)
    assert world.pop() is other, "it yields eight blocks, the first one only its tail"


def test_what_a_request_holds_is_passed_over_and_found_again(world: World) -> None:
    held, free = world.checkpoint(16), world.checkpoint(64)
    held.tail[0][0].ref_cnt = 1
    assert world.pop() is free
    assert world.pop() is None
    held.tail[0][0].ref_cnt = 0
    assert world.pop() is held, "at once, for nothing else is left"


def test_what_was_held_takes_its_place_again_in_time(world: World) -> None:
    held = world.checkpoint(1)
    held.tail[0][0].ref_cnt = 1
    others = [world.checkpoint(1024) for _ in range(8)]
    assert world.pop() in others
    held.tail[0][0].ref_cnt = 0
    world.order.advance(0.1)
    assert world.pop() is held


def test_what_lost_a_block_goes_though_a_request_holds_the_rest(world: World) -> None:
    node = world.checkpoint(64, num_tail_blocks=2)
    node.tail[0][0]._block_hash = None
    node.tail[1][0].ref_cnt = 1
    assert world.pop() is node


def test_nothing_is_left_after_clear(world: World) -> None:
    held, _ = world.checkpoint(16), world.checkpoint(64)
    held.tail[0][0].ref_cnt = 1
    assert world.order.pop() is not None
    world.order.clear()
    held.tail[0][0].ref_cnt = 0
    assert world.order.pop() is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.integers(1, 64)),
            st.tuples(st.sampled_from(["renew", "update", "hold", "release"]), st.integers(0, 63)),
            st.tuples(st.just("advance"), st.integers(1, 9)),
            st.tuples(st.just("pop"), st.just(0)),
        ),
        max_size=200,
    )
)
def test_all_that_are_free_are_popped_once(events: list[tuple[str, int]]) -> None:
    world = World()
    alive: list[Checkpoint] = []
    for event, number in [*events, *[("renew", i) for i in range(64)] * 6]:
        if event == "new":
            alive.append(world.checkpoint(number))
        elif event == "advance":
            world.order.advance(number / 100)
        elif event == "pop":
            is_free = any(not node.tail[0][0].ref_cnt for node in alive)
            node = world.pop()
            assert (node is not None) is is_free
            if node is not None:
                alive.remove(node)
        elif alive:
            node = alive[number % len(alive)]
            if event == "hold":
                node.tail[0][0].ref_cnt = 1
            elif event == "release":
                node.tail[0][0].ref_cnt = 0
            else:
                getattr(world.order, event)(node)
    for node in alive:
        node.tail[0][0].ref_cnt = 0
    popped = [world.pop() for _ in alive]
    assert set(popped) == set(alive)
    assert world.pop() is None


def test_entries_do_not_pile_up(world: World) -> None:
    node = world.checkpoint(64)
    for _ in range(5000):
        world.order.renew(node)
    assert len(world.order._heap) < 200
    assert world.pop() is node
