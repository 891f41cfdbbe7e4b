# SPDX-License-Identifier: Apache-2.0
"""The blocks that one request keeps in one sparse group."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from unit.retention.manager_model import ModelManager
from unit.retention.pool_model import NULL, ModelBlock, ModelPool, ModelRequest

from vllm_ascend_kvext.retention.geometry import GroupGeometry, GroupKind
from vllm_ascend_kvext.retention.protocols import Block
from vllm_ascend_kvext.retention.tails import GroupTails

BLOCK_TOKENS = 4
TEXT = "aaaabbbbccccdddd"


@dataclass
class Needed:
    """Stands in for the tree: the blocks that some checkpoint's tail has."""

    blocks: list[ModelBlock] = field(default_factory=list)

    def is_in_tail(self, block: ModelBlock) -> bool:
        return block in self.blocks

    def make_room(self, num_blocks: int) -> None:
        pass


class World:
    def __init__(self) -> None:
        self.pool = ModelPool(24)
        self.needed = self.pool.tree = Needed()
        geometry = GroupGeometry(GroupKind.WINDOW, BLOCK_TOKENS, 9)
        self.manager = ModelManager(0, geometry, self.pool)

    def request(self, request_id: str, num_tokens: int = len(TEXT)) -> GroupTails:
        """A request that has computed some tokens, and cached nothing."""
        self.manager.extend(request_id, num_tokens)
        return GroupTails(ModelRequest.of(request_id, TEXT), self.manager.group, self.pool)

    def blocks(self, request_id: str) -> list[ModelBlock]:
        return self.manager.req_to_blocks[request_id]

    def cached(self, request_id: str) -> list[int]:
        blocks = self.blocks(request_id)
        return [i for i, block in enumerate(blocks) if block._block_hash is not None]


@pytest.fixture
def world() -> World:
    return World()


def cached_block(tails: GroupTails, block_index: int) -> Block:
    ((block, block_hash),) = tails.cached_blocks(range(block_index, block_index + 1)) or []
    assert block._block_hash is block_hash
    return block


@pytest.fixture
def tails(world: World) -> GroupTails:
    return world.request("r")


def test_only_full_blocks_are_cached(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 2)], 7)
    assert world.cached("r") == [0]
    tails.keep_for_now(range(1, 4), 12)
    assert world.cached("r") == [0, 1, 2]


def test_blocks_kept_for_now_go_unless_they_are_asked_for_again(
    world: World, tails: GroupTails
) -> None:
    tails.keep_for_now(range(0, 3), 16)
    tails.drop_all_but([range(1, 2), range(2, 3)])
    assert world.cached("r") == [1, 2]
    tails.drop_all_but([])
    assert world.cached("r") == []


def test_blocks_of_a_checkpoint_do_not_go(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 2), 16)
    world.needed.blocks = [world.blocks("r")[0]]
    tails.drop_all_but([])
    assert world.cached("r") == [0]


def test_without_checkpoints_what_another_request_reads_does_not_go(
    world: World, tails: GroupTails
) -> None:
    world.pool.tree = None
    tails.keep_for_now(range(0, 2), 16)
    world.pool.touch(world.blocks("r")[1])
    tails.drop_all_but([])
    assert world.cached("r") == [1]


def test_with_checkpoints_only_these_say_what_stays(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 2), 16)
    world.pool.touch(world.blocks("r")[1])
    tails.drop_all_but([])
    assert world.cached("r") == []


def test_a_block_that_left_the_window_goes_too(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 1), 16)
    block = world.blocks("r")[0]
    world.manager.remove_skipped_blocks("r", 16)
    assert world.blocks("r")[0] is NULL and block._block_hash is not None
    assert cached_block(tails, 0) is block
    tails.drop_all_but([])
    assert block._block_hash is None
    assert world.pool.queue[0] is block, "nothing is of less use"


def test_a_block_that_was_reallocated_is_another(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 1), 16)
    block = world.blocks("r")[0]
    world.manager.remove_skipped_blocks("r", 16)
    world.pool.uncache(block)
    block._block_hash = b"of another request"
    world.pool.copies[block._block_hash][block.block_id] = block
    assert tails.cached_blocks(range(0, 1)) is None
    tails.drop_all_but([])
    assert block._block_hash == b"of another request"
    assert tails.cached_blocks(range(0, 1)) is None


def test_leaving_blocks_are_kept_until_they_are_dropped(world: World, tails: GroupTails) -> None:
    tails.keep_leaving(range(0, 4), 16, 16)
    assert world.cached("r") == [0, 1], "a window of 9 tokens has left 8 of 16"


# cached_blocks


def test_the_own_block_is_found_first(world: World, tails: GroupTails) -> None:
    world.request("other")
    world.pool.cache(ModelRequest.of("other", TEXT), world.manager.group, range(0, 3))
    tails.keep([range(0, 1)], 16)
    assert cached_block(tails, 0) is world.blocks("r")[0]
    assert cached_block(tails, 1) is world.blocks("other")[1], "a copy, where the own has no hash"
    found = [world.blocks("r")[0], *world.blocks("other")[1:3]]
    assert [block for block, _ in tails.cached_blocks(range(0, 3)) or []] == found
    assert tails.cached_blocks(range(0, 4)) is None, "the last one is missing"
    assert tails.cached_blocks(range(3, 4)) is None
    assert tails.cached_blocks(range(9, 10)) is None


def test_a_null_block_is_not_found(world: World, tails: GroupTails) -> None:
    world.manager.remove_skipped_blocks("r", 16)
    assert world.blocks("r")[0] is NULL
    assert tails.cached_blocks(range(0, 1)) is None


# holds


def test_holds_what_is_in_the_table_or_cached_for_it(world: World, tails: GroupTails) -> None:
    assert tails.holds(range(0, 4))
    assert tails.holds(range(0))
    assert not tails.holds(range(3, 5))
    tails.keep_for_now(range(1, 2), 16)
    world.manager.remove_skipped_blocks("r", 16)
    assert not tails.holds(range(0, 1))
    assert tails.holds(range(1, 4))


# let_go


def test_lets_go_what_was_cached_for_good_and_nobody_needs(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 3)], 16)
    tails.make_last([range(0, 3)])
    world.needed.blocks = [world.blocks("r")[1]]
    tails.let_go(range(0, 9))
    assert world.cached("r") == [1]


def test_lets_go_of_nothing_outside_the_run(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 4)], 16)
    tails.make_last([range(0, 4)])
    tails.let_go(range(1, 3))
    assert world.cached("r") == [0, 3]


def test_does_not_let_go_what_is_kept_for_now(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 2), 16)
    tails.let_go(range(0, 2))
    assert world.cached("r") == [0, 1]


def test_lets_go_past_null_blocks(world: World, tails: GroupTails) -> None:
    tails.keep([range(1, 3)], 16)
    tails.make_last([range(1, 3)])
    world.manager.remove_skipped_blocks("r", 16)
    tails.let_go(range(0, 4))
    assert world.cached("r") == []


# The end of a request


def test_what_no_checkpoint_took_goes_with_the_request(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 2)], 16)
    tails.keep_for_now(range(2, 4), 16)
    world.needed.blocks = [world.blocks("r")[0], world.blocks("r")[3]]
    tails.settle()
    assert world.cached("r") == [0, 3]


def test_settling_does_not_wait_for_other_readers(world: World, tails: GroupTails) -> None:
    """They go on reading, and leave checkpoints of their own."""
    tails.keep_for_now(range(0, 2), 16)
    world.pool.touch(world.blocks("r")[0])
    tails.settle()
    assert world.cached("r") == []


def test_settling_does_not_touch_what_was_reallocated(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 1), 16)
    block = world.blocks("r")[0]
    world.manager.remove_skipped_blocks("r", 16)
    world.pool.uncache(block)
    block._block_hash = b"of another request"
    world.pool.copies[block._block_hash][block.block_id] = block
    tails.settle()
    assert block._block_hash == b"of another request"


def test_a_copy_computed_later_replaces_the_one_that_left(world: World, tails: GroupTails) -> None:
    """After a preemption a request computes a block again that it had kept for now."""
    tails.keep_for_now(range(0, 2), 16)
    older = world.blocks("r")[1]
    world.manager.free("r")
    world.manager.extend("r", 16)
    tails.keep([range(1, 2)], 16)
    assert older._block_hash is None
    assert cached_block(tails, 1) is world.blocks("r")[1]


def test_what_was_behind_the_hit_is_cached_once(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 3)], 16)
    second = world.request("s")
    second.admit(range(2, 3))
    second.keep_for_now(range(1, 4), 16)
    assert world.cached("s") == [1, 3], "of block 2 there is a copy"
    second.keep([range(2, 3)], 16)
    assert world.cached("s") == [1, 2, 3], "what is to last is its own"


def test_what_is_behind_the_hit_is_not_reallocated_next(world: World, tails: GroupTails) -> None:
    tails.keep([range(0, 3)], 16)
    blocks = world.blocks("r")[:3]
    world.manager.free("r")
    second = world.request("s", 4)
    second.admit(range(0, 1))
    assert world.pool.queue[-1] is blocks[0]
