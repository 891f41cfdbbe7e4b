# SPDX-License-Identifier: Apache-2.0
"""The blocks that one request keeps in one sparse group."""

from __future__ import annotations

import pytest
from unit.retention.manager_model import ModelManager
from unit.retention.pool_model import NULL, ModelBlock, ModelPool, ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry
from vllm_ascend_kvext.retention.tails import GroupTails

BLOCK_TOKENS = 4
TEXT = "aaaabbbbccccdddd"


class World:
    def __init__(self) -> None:
        self.pool = ModelPool(24)
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


def test_what_another_request_reads_does_not_go(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 2), 16)
    world.pool.touch(world.blocks("r")[1])
    tails.drop_all_but([])
    assert world.cached("r") == [1]


def test_a_block_that_left_the_window_goes_too(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 1), 16)
    block = world.blocks("r")[0]
    world.manager.remove_skipped_blocks("r", 16)
    assert world.blocks("r")[0] is NULL and block._block_hash is not None
    tails.drop_all_but([])
    assert block._block_hash is None
    assert world.pool.queue[0] is block, "nothing is of less use"


def test_a_block_that_was_reallocated_is_another(world: World, tails: GroupTails) -> None:
    tails.keep_for_now(range(0, 1), 16)
    block = world.blocks("r")[0]
    world.manager.remove_skipped_blocks("r", 16)
    world.pool.uncache(block)
    block._block_hash = b"of another request"
    world.pool.key_table.insert(block._block_hash, block)
    tails.drop_all_but([])
    assert block._block_hash == b"of another request"


def test_leaving_blocks_are_kept_until_they_are_dropped(world: World, tails: GroupTails) -> None:
    tails.keep_leaving(range(0, 4), 16, 16)
    assert world.cached("r") == [0, 1], "a window of 9 tokens has left 8 of 16"


def test_holds_what_is_in_the_table_or_cached_for_it(world: World, tails: GroupTails) -> None:
    assert tails.holds(range(0, 4))
    assert tails.holds(range(0))
    assert not tails.holds(range(3, 5))
    tails.keep_for_now(range(1, 2), 16)
    world.manager.remove_skipped_blocks("r", 16)
    assert not tails.holds(range(0, 1))
    assert tails.holds(range(1, 4))


def test_a_copy_computed_later_replaces_the_one_that_left(world: World, tails: GroupTails) -> None:
    """After a preemption a request computes a block again that it had kept for now."""
    tails.keep_for_now(range(0, 2), 16)
    older = world.blocks("r")[1]
    world.manager.free("r")
    world.manager.extend("r", 16)
    tails.keep([range(1, 2)], 16)
    assert older._block_hash is None
    assert world.cached("r") == [1]


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
