# SPDX-License-Identifier: Apache-2.0
"""The least worthy checkpoint gives way first, and none that a request holds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.retention.checkpoints import (
    NO_BLOCKS,
    BlockIds,
    BlockNeeds,
    Checkpoint,
    block_ids,
)
from vllm_ascend_kvext.retention.eviction import HALF_LIFE, MOST_PUT_BACK, EvictionOrder
from vllm_ascend_kvext.retention.reasons import Origin, Reason, UseRates

PROMPT, LADDER = Reason(Origin.PROMPT), Reason(Origin.LADDER)


class World:
    def __init__(self) -> None:
        self.rates = UseRates()
        self.needs = BlockNeeds(20_000)
        self.in_use: set[Checkpoint] = set()
        self.order = EvictionOrder(self.rates, self.needs, self.in_use.__contains__)
        self.root = Checkpoint(b"", 0, None, PROMPT)
        self._ids = itertools.count()

    def blocks(self, number: int) -> BlockIds:
        return block_ids(list(itertools.islice(self._ids, number)))

    def checkpoint(
        self,
        span_tokens: int,
        parent: Checkpoint | None = None,
        reason: Reason = PROMPT,
        num_tail_blocks: int = 1,
        num_run_blocks: int = 0,
        tail: BlockIds | None = None,
    ) -> Checkpoint:
        parent = parent or self.root
        boundary_tokens = parent.boundary_tokens + span_tokens
        node = Checkpoint(b"%d" % boundary_tokens, boundary_tokens, parent, reason)
        parent.children.add(node)
        node.runs = (self.blocks(num_run_blocks),)
        node.tail = self.blocks(num_tail_blocks) if tail is None else tail
        self.needs.add(node.tail)
        self.order.add(node)
        return node

    def pop(self) -> Checkpoint | None:
        """As the tree does: what is popped loses its tail."""
        node = self.order.pop()
        if node is not None:
            self.needs.remove(node.tail)
            node.tail = NO_BLOCKS
            if not node.children:
                node.parent.children.discard(node)
                if node.parent.has_tail:
                    self.order.lower(node.parent)
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
    first, middle, last = world.blocks(3)
    world.checkpoint(64, tail=block_ids([first, middle]))
    world.checkpoint(64, tail=block_ids([middle, last]))
    assert world.pop() is lone


def test_an_overlap_with_neighbours_does_not_protect_all_of_them(world: World) -> None:
    """Three that share a window save little; that none alone yields blocks protects none."""
    lone = world.checkpoint(1024, num_tail_blocks=64)
    parent, close, tail = world.root, [], world.blocks(64)
    for _ in range(3):
        parent = world.checkpoint(16, parent, tail=tail)
        close.append(parent)
    assert {world.pop(), world.pop(), world.pop()} == set(close)
    assert world.pop() is lone


def test_tokens_are_saved_from_the_last_checkpoint_before(world: World) -> None:
    parent = world.checkpoint(1024)
    child = world.checkpoint(16, parent)
    assert world.pop() is child


def test_full_attention_counts_only_where_nothing_is_behind_it(world: World) -> None:
    node = world.checkpoint(64, num_run_blocks=15)
    world.checkpoint(4096, node)
    other = world.checkpoint(64, num_run_blocks=7)
    world.order.lower(node)
    assert world.pop() is other, "it yields eight blocks, the first one only its tail"


def test_a_checkpoint_is_worth_less_without_what_was_behind_it(world: World) -> None:
    node = world.checkpoint(64, num_run_blocks=15)
    behind = world.checkpoint(1, node)
    other = world.checkpoint(64, num_run_blocks=7)
    assert [world.pop(), world.pop(), world.pop()] == [behind, node, other]


def test_what_is_in_use_is_passed_over_until_a_request_has_gone(world: World) -> None:
    used, other, third = (world.checkpoint(tokens) for tokens in (16, 64, 128))
    world.in_use.add(used)
    assert world.pop() is other
    world.in_use.clear()
    assert world.pop() is third, "not looked at again so far"
    world.order.look_again(8)
    assert world.pop() is used


def test_what_is_in_use_goes_when_nothing_else_is_left(world: World) -> None:
    used, other = world.checkpoint(16), world.checkpoint(64)
    world.in_use.add(used)
    assert [world.pop(), world.pop(), world.pop()] == [other, used, None]


def test_only_so_many_are_looked_at_again(world: World) -> None:
    nodes = [world.checkpoint(1) for _ in range(5)]
    last = world.checkpoint(10_000)
    world.in_use.update(nodes)
    assert world.pop() is last
    world.in_use.clear()
    world.order.look_again(2)
    assert len(world.order._heap) == 2
    assert {world.pop() for _ in range(5)} == set(nodes)


def test_only_so_many_are_put_back_at_once(world: World) -> None:
    """Their worth has grown; one call passes over a bounded number of them."""
    nodes = [world.checkpoint(1) for _ in range(3 * MOST_PUT_BACK)]
    world.checkpoint(2)
    world.order.advance(10 * HALF_LIFE)
    for node in nodes:
        world.order.renew(node)
    pushed = world.order._num_entries
    assert world.pop() is not None
    assert world.order._num_entries - pushed <= MOST_PUT_BACK + 1


def test_nothing_is_left_after_clear(world: World) -> None:
    used, _ = world.checkpoint(16), world.checkpoint(64)
    world.in_use.add(used)
    assert world.order.pop() is not None
    world.order.clear()
    assert world.order.pop() is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("new"), st.integers(1, 64)),
            st.tuples(st.sampled_from(["renew", "lower", "use", "leave"]), st.integers(0, 63)),
            st.tuples(st.sampled_from(["advance", "look"]), st.integers(1, 9)),
            st.tuples(st.just("pop"), st.just(0)),
        ),
        max_size=200,
    )
)
def test_every_checkpoint_is_popped_once(events: list[tuple[str, int]]) -> None:
    world = World()
    alive: list[Checkpoint] = []
    for event, number in events:
        if event == "new":
            alive.append(world.checkpoint(number))
        elif event == "advance":
            world.order.advance(number / 100)
        elif event == "look":
            world.order.look_again(number)
        elif event == "pop":
            node = world.pop()
            assert (node is not None) is bool(alive)
            if node is not None:
                alive.remove(node)
        elif alive:
            node = alive[number % len(alive)]
            if event == "use":
                world.in_use.add(node)
            elif event == "leave":
                world.in_use.discard(node)
            else:
                getattr(world.order, event)(node)
    popped = [world.pop() for _ in alive]
    assert set(popped) == set(alive)
    assert world.pop() is None


def test_entries_do_not_pile_up(world: World) -> None:
    node = world.checkpoint(64)
    for _ in range(5000):
        world.order.renew(node)
    assert len(world.order._heap) == 1
    assert world.pop() is node
