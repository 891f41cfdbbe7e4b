# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which planned stores begin, and which give way.

A store of 10 MB takes 1 s, a step 0.5 s, and a token 0.1 s of computing. The pool has 100 blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_ascend_kvext.connector.common.block_references import BlockReferences
from vllm_ascend_kvext.connector.scheduler.store_queue import (
    MAX_ASKED,
    MAX_STEPS_OF_COPIES,
    StoreQueue,
)
from vllm_ascend_kvext.connector.scheduler.transfer_cost import TransferCost

MB = 1_000_000
STEP_S = 0.5


@dataclass(eq=False)
class Block:
    """A block with as many references as holders."""

    ref_cnt: int = 1


class Pool:
    """A pool whose blocks are counted, and never allocated."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free

    def touch(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks: Any) -> None:
        for block in blocks:
            block.ref_cnt -= 1
            self.num_free += not block.ref_cnt

    def get_num_free_blocks(self) -> int:
        return self.num_free


class World:
    """A queue, and the stores that are planned in it by the name of their request."""

    def __init__(self, num_running: int = 1, num_free: int = 0, is_measured: bool = True) -> None:
        self.num_running = num_running
        self.now_s = 0.0
        self.pool: Any = Pool(num_free)
        self.cost = TransferCost()
        self.waiting: list[bool] = []
        self.references = BlockReferences(self.pool)
        self.queue = StoreQueue(
            self.references,
            self.cost,
            100,
            lambda: self.num_running,
            self.waiting.append,
            lambda: self.now_s,
        )
        self.queue.step_s = STEP_S
        if is_measured:
            self.cost.note_copies("store", 10 * MB, 1.0)
            self.cost.note_step(1000, 100.0)
        self.begun: list[Any] = []

    def plan(
        self,
        name: str,
        megabytes: float = 1,
        num_tokens: int = 10,
        num_blocks: int = 5,
        has_ended: bool = True,
        blocks: Sequence[Block] = (),
        before: str | None = None,
    ) -> None:
        """Plan a store of a request.

        Args:
            has_ended: Whether only the store has the blocks.
            before: The store of the rows before.
        """
        pages: Any = dict(enumerate(blocks or [Block() for _ in range(num_blocks)]))
        entry = SimpleNamespace(name=name, keys=(name,), key_before=before)
        stored: Any = SimpleNamespace(entry=entry, progress=name)
        num_bytes = int(megabytes * MB)
        self.queue.add(pages, SimpleNamespace(), stored, num_bytes, num_tokens)  # type: ignore[arg-type]
        for block in pages.values():
            block.ref_cnt -= has_ended

    def begin(self) -> list[str]:
        self.begun = list(self.queue.begin())
        return [name_of(store) for store in self.begun]

    def give_way(self, to_running: bool = False) -> str | None:
        return " ".join(map(name_of, self.queue.give_way(to_running))) or None


def name_of(store: Any) -> str:
    return str(store.stored[0].entry.name)


# Which stores begin.


def test_one_store_begins_before_the_speed_of_copies_is_known() -> None:
    world = World(is_measured=False)
    world.queue.lacks_blocks = True
    assert world.queue.may_plan(5, MB, 10)
    world.plan("first")
    world.plan("second")
    assert world.begin() == ["first"]
    begun = world.begun
    assert world.begin() == []
    world.queue.note_ended(begun[0])
    assert world.begin() == ["second"]


def test_stores_begin_in_order_while_they_are_copied_within_some_steps() -> None:
    world = World(num_running=0)
    megabytes = MAX_STEPS_OF_COPIES * STEP_S * 10 / 4
    for name in ("1", "2", "3", "4", "5"):
        world.plan(name, megabytes)
    assert world.begin() == ["1", "2", "3", "4"]
    begun = world.begun
    assert world.begin() == []
    world.queue.note_ended(begun[0])
    assert world.begin() == ["5"]


def test_a_large_store_begins_alone() -> None:
    world = World(num_running=0)
    world.plan("large", 1000)
    world.plan("small", 0.1)
    assert world.begin() == ["large"]
    assert world.begin() == []


def test_stores_of_one_request_and_step_are_one() -> None:
    world = World()
    world.plan("first", num_blocks=5)
    world.plan("first", num_blocks=7)
    world.plan("second")
    assert len(world.queue) == 2
    assert world.begin() == ["first", "second"]
    assert (len(world.begun[0].pages), len(world.begun[0].chunks)) == (7, 2)
    assert (world.begun[0].num_bytes, world.begun[0].num_tokens) == (2 * MB, 20)
    world.plan("first")
    assert world.begin() == ["first"]


@pytest.mark.parametrize(
    ("megabytes", "num_tokens", "num_blocks", "num_running", "begins"),
    [
        (5, 0, 50, 0, True),  # The copy ends within a step.
        (5.1, 0, 50, 0, False),
        (8, 65, 50, 0, True),  # 0.8 s is an eighth of the 6.4 s that 64 tokens take.
        (8, 63, 50, 0, False),
        (8, 33, 50, 1, True),  # If a request runs, a store of half of the pool costs half.
        (8, 31, 50, 1, False),
    ],
)
def test_while_a_request_lacks_blocks_stores_begin_that_are_worth_a_wait(
    megabytes: float, num_tokens: int, num_blocks: int, num_running: int, begins: bool
) -> None:
    world = World(num_running, num_free=100)
    world.queue.lacks_blocks = True
    assert world.queue.may_plan(num_blocks, int(megabytes * MB), num_tokens) is begins
    world.plan("store", megabytes, num_tokens, num_blocks)
    assert world.begin() == ["store"] * begins


@pytest.mark.parametrize(
    ("num_running", "num_free", "begins"), [(0, 0, True), (1, 24, False), (1, 25, True)]
)
def test_a_slow_store_begins_where_a_quarter_of_the_pool_is_free_or_nothing_runs(
    num_running: int, num_free: int, begins: bool
) -> None:
    world = World(num_running, num_free)
    world.plan("slow", 100, 10)
    assert world.begin() == ["slow"] * begins


def test_no_slow_store_is_planned_while_a_request_lacks_blocks() -> None:
    world = World(num_running=0)
    assert world.queue.may_plan(5, 100 * MB, 10)
    world.queue.lacks_blocks = True
    assert not world.queue.may_plan(5, 100 * MB, 10)
    assert world.queue.may_plan(5, 5 * MB, 10)
    world.plan("ahead", 3)
    assert not world.queue.may_plan(5, 5 * MB, 10), "the store ahead of it is copied first"
    world.begin()
    assert not world.queue.may_plan(5, 5 * MB, 10), "the store ahead of it is copied first"
    world.queue.note_ended(world.begun[0])
    assert world.queue.may_plan(5, 5 * MB, 10)


def test_a_slow_store_begins_in_a_step_that_computes_nothing() -> None:
    """A paused scheduler keeps the requests that run, and the engine ends its work."""
    world = World(num_running=1)
    world.plan("slow", 50)
    assert world.begin() == []
    world.queue.is_idle = True
    world.queue.lacks_blocks = True
    assert world.begin() == []
    world.queue.lacks_blocks = False
    assert world.begin() == ["slow"]


def test_a_slow_store_begins_from_time_to_time_however_long_requests_lack_blocks() -> None:
    world = World(num_running=0)
    world.queue.lacks_blocks = True
    begun_at_s = []
    for second in range(1000):
        world.now_s = second
        if world.queue.may_plan(5, 50 * MB, 10):
            world.plan("slow", 50)
            assert world.give_way() is None
            assert world.begin() == ["slow"]
            begun_at_s.append(second)
            world.queue.note_ended(world.begun[0])
    assert begun_at_s == [160 * number for number in range(2, 7, 2)]  # 5 s of 320 s.


# Which stores give way.


def test_the_latest_store_gives_way_first() -> None:
    world = World(is_measured=False)
    for name in ("1", "2", "3"):
        world.plan(name)
    assert world.begin() == ["1"]
    assert [world.give_way() for _ in range(3)] == ["3", "2", None]
    assert world.pool.num_free == 10
    assert world.references.num_references == 5, "a store that has begun keeps its blocks"


def test_what_lies_behind_rows_gives_way_with_them() -> None:
    world = World(is_measured=False)
    world.plan("rows")
    world.plan("other", has_ended=False)
    world.plan("more rows", has_ended=False, before="rows")
    world.plan("tails", has_ended=False, before="more rows")
    world.plan("other tails", has_ended=False, before="other")
    assert world.give_way() == "rows more rows tails"
    assert world.give_way() is None
    assert world.begin() == ["other"]


@pytest.mark.parametrize("to_running", [False, True])
def test_a_store_gives_way_only_if_blocks_become_free(to_running: bool) -> None:
    world = World(is_measured=False)
    world.plan("ended")
    world.plan("running", has_ended=False)
    assert [world.give_way(to_running) for _ in range(2)] == ["ended", None]


def test_stores_with_the_same_blocks_give_way_if_nothing_runs() -> None:
    """Windows of neighbouring boundaries may lie in the same pages."""
    world = World(num_running=0, is_measured=False)
    blocks = [Block(ref_cnt=0)]
    world.plan("1", blocks=blocks, has_ended=False)
    world.plan("2", blocks=blocks, has_ended=False)
    assert world.give_way() == "2"
    assert not world.pool.num_free
    assert [world.give_way() for _ in range(2)] == ["1", None]
    assert world.pool.num_free == 1


def test_a_store_that_is_worth_a_wait_gives_way_to_running_requests_only() -> None:
    world = World()
    world.plan("fast", 5)
    assert world.give_way() is None
    assert world.give_way(to_running=True) == "fast"


def test_a_store_is_worth_a_wait_only_with_all_stores_that_are_copied_before_it() -> None:
    world = World(num_running=0)
    world.plan("1", 3)
    world.plan("2", 3)
    assert world.give_way() == "2"
    assert world.give_way() is None
    assert world.begin() == ["1"]
    world.plan("3", 3)
    assert world.give_way() == "3"


def test_the_latest_stores_are_asked_for_a_request_that_waits() -> None:
    world = World(is_measured=False)
    running = [f"running {number}" for number in range(MAX_ASKED)]
    for name in ("first", "second", *running):
        world.plan(name, has_ended=name in ("first", "second"))
    assert world.give_way() is None
    assert world.give_way(to_running=True) == "second", "a request would be preempted"
    assert len(world.queue.withdraw(running[0])) == 1  # type: ignore[arg-type]
    assert world.give_way() == "first"


def test_what_lies_behind_stores_that_are_gone_is_not_known() -> None:
    world = World(is_measured=False)
    for _ in range(2):
        world.plan("rows")
        world.plan("tails", has_ended=False, before="rows")
        world.plan("more tails", has_ended=False, before="tails")
        assert world.give_way() == "rows tails more tails"
    assert not world.queue._behind
    world.plan("rows")
    world.plan("tails", has_ended=False, before="rows")
    world.queue.withdraw("tails")  # type: ignore[arg-type]
    assert world.give_way() == "rows"
    world.plan("tails", before="rows")
    assert world.begin() == ["tails"]
    assert not world.queue._behind


# What a queue holds.


def test_what_is_taken_back_holds_nothing() -> None:
    world = World(is_measured=False)
    world.plan("1")
    world.plan("2")
    assert world.begin() == ["1"]
    assert world.queue.withdraw("1") == [], "it has begun"  # type: ignore[arg-type]
    world.plan("2", 3)
    world.plan("3")
    assert world.references.num_references == 20
    assert world.queue.num_bytes_of("2") == 4 * MB  # type: ignore[arg-type]
    taken = world.queue.withdraw("2")  # type: ignore[arg-type]
    assert [store.num_bytes for store in taken] == [MB, 3 * MB]
    assert world.references.num_references == 10
    assert [name_of(store) for store in world.queue.withdraw_all()] == ["3"]
    assert world.references.num_references == 5
    assert not world.queue


def test_the_block_manager_is_told_when_stores_begin_to_wait_and_when_none_waits() -> None:
    world = World(is_measured=False)
    for name in ("1", "2", "3"):
        world.plan(name)
    assert world.waiting == [True]
    world.begin()
    world.give_way()
    assert world.waiting == [True]
    world.give_way()
    assert world.waiting == [True, False]
