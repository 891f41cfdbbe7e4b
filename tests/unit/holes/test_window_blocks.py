# SPDX-License-Identifier: Apache-2.0
"""Blocks in which holes of models with windows are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.span_plan import Run
from vllm_ascend_kvext.holes.window_blocks import WindowBlocks

PAGE_TOKENS = 4
WINDOW_PAGES = 2
GROUP = 1
MANY = 1000


class Block(NamedTuple):
    block_id: int


@dataclass
class Pool:
    """Hands out blocks by number, and takes them back."""

    free: list[Block] = field(default_factory=lambda: [Block(number) for number in range(1, 21)])

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, num_blocks: int) -> Sequence[Block]:
        assert num_blocks <= len(self.free)
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def take(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            self.free.remove(block)

    def release(self, blocks: Sequence[Block]) -> None:
        assert not set(blocks) & set(self.free)
        self.free += blocks


def window_pages(boundary_tokens: int) -> dict[int, tuple[int, int]]:
    end_page = -(-boundary_tokens // PAGE_TOKENS)
    return {GROUP: (max(0, end_page - WINDOW_PAGES), end_page)}


def blocks_of(pool: Pool) -> WindowBlocks:
    return WindowBlocks(pool, window_pages, {0: PAGE_TOKENS, GROUP: PAGE_TOKENS})


def test_tails_have_blocks_of_their_own() -> None:
    pool = Pool()
    tables = blocks_of(pool).begin("a", [0, 16, 40])
    assert tables is not None
    assert [(each[GROUP].first_page, len(each[GROUP].blocks)) for each in tables] == [
        (0, 0),
        (2, 2),
        (8, 2),
    ]
    assert pool.num_free == 16


def test_rows_move_the_window_on() -> None:
    pool = Pool()
    windows = blocks_of(pool)
    windows.begin("a", [16])
    first = windows.extend("a", Run(16, 26))
    assert first is not None
    ids = first[GROUP].all_block_ids
    assert len(ids) == 7 and ids[:2] == [0, 0] and 0 not in ids[2:]
    windows.leave("a", 26, is_end_of_hole=False)
    assert pool.num_free == 15  # The step may still use what it leaves.
    windows.end_step()
    assert pool.num_free == 18
    second = windows.extend("a", Run(26, 32))
    assert second is not None
    assert second[GROUP].all_block_ids[:5] == [0] * 5
    assert second[GROUP].all_block_ids[5:7] == ids[5:7]
    windows.leave("a", 32, is_end_of_hole=True)
    assert pool.num_free < 20
    windows.end_step()
    assert pool.num_free == 20


def test_nothing_is_taken_where_blocks_are_too_few() -> None:
    pool = Pool()
    windows = blocks_of(pool)
    pool.free = pool.free[:3]
    assert windows.begin("a", [16, 40]) is None
    assert windows.begin("a", [16]) is not None
    assert windows.extend("a", Run(16, 26)) is None
    assert pool.num_free == 1
    windows.drop("a")
    assert pool.num_free == 3


def queue_of(pool: Pool, *holes: tuple[int, int], after_tokens: int = 0) -> HoleQueue:
    queue = HoleQueue(blocks_of(pool))
    queue.begin("a", [Run(*hole) for hole in holes], after_tokens)
    return queue


def test_hole_that_reads_a_window_waits_for_the_load() -> None:
    queue = queue_of(Pool(), (16, 20), after_tokens=16)
    assert not queue.take_rows(MANY, MANY, MANY)
    queue.note_load_ended("a")
    assert [row.run for row in queue.take_rows(MANY, MANY, MANY)] == [Run(16, 20)]


def test_hole_at_the_first_token_is_computed_beside_the_load() -> None:
    queue = queue_of(Pool(), (0, 20), (40, 44))
    (row,) = queue.take_rows(MANY, MANY, MANY)
    assert (row.run, len(row.window_ids[GROUP])) == (Run(0, 20), 5)


def test_later_requests_do_not_take_what_a_hole_waits_for() -> None:
    pool = Pool()
    queue = queue_of(pool, (0, 40))
    queue.begin("b", [Run(0, 4)], 0)
    held, pool.free = pool.free, []
    assert not queue.take_rows(MANY, MANY, MANY)
    pool.release(held)
    assert [row.request_id for row in queue.take_rows(MANY, MANY, MANY)] == ["a", "b"]


def test_row_is_as_short_as_the_free_blocks_are_few() -> None:
    pool = Pool()
    queue = queue_of(pool, (0, 40))
    held, pool.free = pool.free[:17], pool.free[17:]
    assert [row.run for row in queue.take_rows(MANY, MANY, MANY)] == [Run(0, 10)]
    queue.end_step()
    # One block is free, and two of three stay: those before token 10.
    assert [row.run for row in queue.take_rows(MANY, MANY, MANY)] == [Run(10, 13)]
    pool.release(held)
    queue.end_step()
    assert [row.run for row in queue.take_rows(MANY, MANY, MANY)] == [Run(13, 40)]


def test_all_blocks_come_back() -> None:
    for num_steps in range(6):
        for is_loaded in (False, True):
            pool = Pool()
            queue = queue_of(pool, (0, 12), (24, 28))
            if is_loaded:
                queue.note_load_ended("a")
            for _ in range(num_steps):
                queue.end_step()
                queue.take_rows(4, MANY, MANY)
            queue.drop("a")
            if not is_loaded:
                # What is being loaded is written to them.
                assert pool.num_free < 20
                assert not queue.note_load_ended("a")
            queue.end_step()
            assert pool.num_free == 20, (num_steps, is_loaded)


def test_held_windows_outlast_the_requests_own_blocks() -> None:
    pool = Pool()
    windows = blocks_of(pool)
    cached = pool.free[:WINDOW_PAGES]
    windows.hold("a", {GROUP: cached})
    own = pool.allocate(3)
    assert not set(own) & set(cached)
    own_ids = [[], [0, 0, 0, 0, 0, 0, *(block.block_id for block in own)]]
    tables = windows.begin_dense("a", 16, own_ids)
    assert tables is not None
    assert tables[GROUP].blocks[:WINDOW_PAGES] == cached and len(tables[GROUP].blocks) == 4
    windows.release_held()  # It has begun: nothing is held for it any more.
    assert not set(pool.free) & set(cached)
    windows.drop("a")
    assert pool.num_free == 20 - len(own)


def test_windows_of_a_request_that_got_no_blocks_are_released() -> None:
    pool = Pool()
    windows = blocks_of(pool)
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    windows.release_held()
    assert pool.num_free == 20 and not windows.is_held("a")
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    pool.allocate(pool.num_free)
    assert windows.begin_dense("a", 16, [[], [0] * 9]) is None
    assert pool.num_free == WINDOW_PAGES


def test_more_than_the_gap_is_not_held() -> None:
    pool = Pool()
    windows = blocks_of(pool)
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    tables = windows.begin_dense("a", 16, [[], [0, 0, 0, 99]])
    assert tables is not None and len(tables[GROUP].blocks) == 1
    assert pool.num_free == 19
