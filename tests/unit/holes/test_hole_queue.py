# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which holes a step computes, in which blocks, and when their requests continue.

``test_request_machine`` checks what holes read and write. It runs random requests on vLLM's real
scheduler.
"""

from __future__ import annotations

import pytest
from support.holes.block_pool import GROUP, PAGE_TOKENS, BlockPool, no_windows, window_blocks

from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow
from vllm_ascend_kvext.token_range import TokenRange

MANY = 10_000


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool()


def parked(
    *holes: tuple[int, int], after_tokens: int = 0, pool: BlockPool | None = None
) -> HoleQueue:
    """A queue with a request that waits for its holes. The model has windows if there is a pool."""
    queue = HoleQueue(window_blocks(pool) if pool else no_windows(BlockPool(), {0: PAGE_TOKENS}))
    queue.begin("a", [TokenRange(*hole) for hole in holes], after_tokens)
    return queue


def rows(
    queue: HoleQueue, max_tokens: int = MANY, max_rows: int = MANY, max_row_tokens: int = MANY
) -> list[HoleRow]:
    return queue.take_rows(max_tokens, max_rows, max_row_tokens)


def runs(queue: HoleQueue, *limits: int) -> list[tuple[int, int]]:
    return [tuple(row.run) for row in rows(queue, *limits)]


def test_only_the_hole_behind_the_rows_of_the_device_does_not_wait_for_the_load() -> None:
    queue = parked((20, 50), (60, 70), after_tokens=20)
    assert runs(queue, 12) == [(20, 32)]
    assert runs(queue) == [(32, 50)]
    assert runs(queue) == []
    assert not queue.restart("a")  # The load of the request writes to its blocks.
    assert queue.note_load_ended("a")
    assert runs(queue) == [(60, 70)]
    assert queue.restart("a")
    assert not queue.restart("a")
    assert queue.end_step() == []
    assert not queue


def test_no_hole_is_computed_beside_a_load_that_writes_where_drafts_are_written() -> None:
    queue = HoleQueue(no_windows(BlockPool(), {0: PAGE_TOKENS}), waits_for_load=True)
    queue.begin("a", [TokenRange(20, 50), TokenRange(60, 70)], after_tokens=20)
    assert runs(queue) == []
    assert queue.note_load_ended("a")
    assert runs(queue) == [(20, 50), (60, 70)]


def test_request_goes_on_a_step_after_its_last_hole_and_its_load() -> None:
    queue = parked((0, 50))
    rows(queue)
    assert queue.end_step() == []
    queue.note_load_ended("a")
    assert queue.end_step() == ["a"]
    assert queue.end_step() == []
    assert not queue
    assert not queue.note_load_ended("a")
    queue.begin("a", [TokenRange(40, 50)], 0)
    queue.note_load_ended("a")
    assert queue.end_step() == []
    rows(queue)
    assert queue.end_step() == ["a"]


def test_what_a_load_lacks_is_computed_in_its_turn() -> None:
    queue = parked((20, 50), (70, 80), after_tokens=20)
    assert runs(queue, 10) == [(20, 30)]
    queue.add("a", [TokenRange(80, 90), TokenRange(60, 64)])
    queue.note_load_ended("a")
    assert runs(queue) == [(30, 50), (60, 64), (70, 90)]


def test_a_step_has_so_many_rows_and_tokens_of_all_requests() -> None:
    queue = parked((40, 60), (80, 85))
    queue.begin("b", [TokenRange(0, 10)], 0)
    assert runs(queue, 0) == runs(queue, -5) == runs(queue, MANY, 0) == []
    assert queue.lacks_room
    queue.note_load_ended("a")
    # A row reads all rows before it. So if only a part of a hole is computed, it is the last row of
    # its request in the step.
    assert [(row.request_id, *row.run) for row in rows(queue, 12, MANY, 8)] == [
        ("a", 40, 48),
        ("b", 0, 4),
    ]
    assert runs(queue, MANY, 2) == [(48, 60), (80, 85)]
    assert queue.lacks_room
    assert runs(queue) == [(4, 10)]
    assert not queue.lacks_room


def test_no_row_has_the_id_of_a_request() -> None:
    queue = parked((0, 10))
    (row,) = queue.take_rows(MANY, MANY, MANY, {"a", "a-hole-1", "a-hole-2"})
    assert row.row_id == "a-hole-3"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_request_that_ends_is_named_if_nothing_else_says_that_it_is_loaded(is_loaded: bool) -> None:
    queue = parked((40, 50))
    if is_loaded:
        queue.note_load_ended("a")
    queue.drop("a")
    queue.drop("a")
    assert runs(queue) == []
    assert queue.end_step() == ["a"] * is_loaded
    assert not queue


# Blocks of windows.


def test_rows_move_the_window_on(pool: BlockPool) -> None:
    windows = window_blocks(pool)
    tables = windows.begin([16, 40])
    assert tables is not None
    assert [(each[GROUP].first_page, len(each[GROUP].blocks)) for each in tables.by_hole] == [
        (2, 2),
        (8, 2),
    ]
    first = tables.extend(TokenRange(16, 26))
    assert first is not None
    ids = first[GROUP].all_block_ids
    assert len(ids) == 7 and ids[:2] == [0, 0] and 0 not in ids[2:]
    tables.leave(26, is_end_of_hole=False)
    assert pool.num_free == 13  # The step may still use the blocks that it leaves.
    windows.end_step()
    assert pool.num_free == 16
    second = tables.extend(TokenRange(26, 32))
    assert second is not None
    assert second[GROUP].all_block_ids[:7] == [0] * 5 + ids[5:7]
    tables.leave(32, is_end_of_hole=True)
    windows.end_step()
    assert pool.num_free == 18


def test_nothing_is_taken_where_blocks_are_too_few(pool: BlockPool) -> None:
    windows = window_blocks(pool)
    pool.free = pool.free[:3]
    assert windows.begin([16, 40]) is None
    tables = windows.begin([16])
    assert tables is not None
    assert tables.extend(TokenRange(16, 26)) is None
    assert pool.num_free == 1
    tables.release()
    assert pool.num_free == 3


@pytest.mark.parametrize("first_tokens", [0, 16])
def test_only_the_hole_that_reads_no_window_is_computed_beside_the_load(
    pool: BlockPool, first_tokens: int
) -> None:
    queue = parked((first_tokens, 20), after_tokens=first_tokens, pool=pool)
    assert runs(queue) == ([] if first_tokens else [(0, 20)])


def test_row_is_as_short_as_the_free_blocks_are_few(pool: BlockPool) -> None:
    queue = parked((0, 40), pool=pool)
    queue.begin("b", [TokenRange(0, 4)], 0)
    held = list(pool.allocate(20))
    assert rows(queue) == []  # Later requests do not take the blocks that this one waits for.
    pool.release(held[17:])
    assert runs(queue) == [(0, 10)]
    queue.end_step()
    # One block is free. The first row has three blocks. The two before token 10 stay.
    assert runs(queue) == [(10, 13)]
    pool.release(held[:17])
    queue.end_step()
    assert [(row.request_id, *row.run) for row in rows(queue)] == [("a", 13, 40), ("b", 0, 4)]


@pytest.mark.parametrize(("is_loaded", "end"), [(False, "drop"), (True, "drop"), (True, "restart")])
@pytest.mark.parametrize("num_steps", range(6))
def test_all_blocks_come_back(pool: BlockPool, num_steps: int, is_loaded: bool, end: str) -> None:
    queue = parked((0, 12), (24, 28), pool=pool)
    if is_loaded:
        queue.note_load_ended("a")
    for _ in range(num_steps):
        queue.end_step()
        rows(queue, 4)
    getattr(queue, end)("a")
    if not is_loaded:
        assert pool.num_free < 20  # A load writes to these blocks.
        assert not queue.note_load_ended("a")
    queue.end_step()
    assert pool.num_free == 20
