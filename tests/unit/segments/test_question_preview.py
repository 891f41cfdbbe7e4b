# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""When a request's question is computed, in which blocks, and when this is given up."""

from __future__ import annotations

import pytest
from support.holes.block_pool import (
    GROUP,
    PAGE_TOKENS,
    WINDOW_PAGES,
    BlockPool,
    no_windows,
    window_blocks,
)

from vllm_ascend_kvext.holes.hole_queue import HoleQueue, HoleRow
from vllm_ascend_kvext.segments.counters import SegmentCounters
from vllm_ascend_kvext.segments.scheduler.dense_windows import DenseWindows
from vllm_ascend_kvext.segments.scheduler.question_preview import (
    MAX_STEPS,
    PreviewPlan,
    QuestionPreview,
)
from vllm_ascend_kvext.token_range import TokenRange

MANY = 10_000
OWN_IDS = [[101, 102, 103, 104, 105]]
"""The blocks of a request that continues behind its 18th token."""

HOLES = [TokenRange(0, 4), TokenRange(8, 12)]
PLAN = PreviewPlan(TokenRange(18, 26), (TokenRange(2, 4),))


class Waiting:
    """A request that has loaded, and waits for its question."""

    def __init__(self, pool: BlockPool) -> None:
        self.queue = HoleQueue(no_windows(pool, {0: PAGE_TOKENS}))
        self.counters = SegmentCounters()
        self.begun: list[HoleRow] = []
        windows = DenseWindows(self.queue.blocks)
        tables = windows.begin("a", 0, OWN_IDS)
        assert tables is not None and tables.by_group == {}
        self.preview = QuestionPreview(
            "a",
            PLAN,
            HOLES,
            [len(OWN_IDS[0])],
            self.queue,
            windows,
            self.counters,
            self.begun.append,
        )
        self.queue.park("a", PLAN.missing, 0, tables, True, self.preview)
        assert self.rows() == [] == self.queue.end_step()
        self.queue.note_load_ended("a")

    def rows(
        self, max_tokens: int = MANY, max_rows: int = MANY, max_row_tokens: int = MANY
    ) -> list[HoleRow]:
        return self.queue.take_rows(max_tokens, max_rows, max_row_tokens)

    def runs(self, *limits: int) -> list[tuple[int, int]]:
        return [tuple(row.run) for row in self.rows(*limits)]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool()


@pytest.fixture
def waiting(pool: BlockPool) -> Waiting:
    return Waiting(pool)


def test_what_is_computed_for_it_is_thrown_away(waiting: Waiting, pool: BlockPool) -> None:
    queue = waiting.queue
    missing, question = waiting.rows()
    assert (missing.run, missing.has_last_tokens, missing.is_kept) == (
        PLAN.missing[0],
        False,
        False,
    )
    assert (question.run, question.has_last_tokens, question.is_kept) == (PLAN.run, True, False)
    assert question.tables(OWN_IDS) == ([*OWN_IDS[0], 1, 2],)
    assert missing.tables(OWN_IDS) == (OWN_IDS[0],)
    assert waiting.begun == [question] and waiting.preview.row_id == question.row_id
    assert waiting.counters.probed_tokens == 2 + 8
    assert queue.preview_of("a") is waiting.preview
    assert pool.num_free == 18
    assert queue.end_step() == [] == waiting.rows()
    assert pool.num_free == 20
    waiting.preview.end([TokenRange(5, 8), TokenRange(13, 14)])
    assert queue.preview_of("a") is None
    assert queue.end_step() == []
    kept = waiting.rows()
    assert [tuple(row.run) for row in kept] == [(0, 4), (5, 12), (13, 14)]
    assert all(row.is_kept for row in kept)
    assert waiting.counters.probed_tokens == 2 + 8
    assert queue.end_step() == ["a"]
    assert not queue


@pytest.mark.parametrize("end", ["drop", "restart"])
def test_request_that_goes_waits_for_nothing(waiting: Waiting, pool: BlockPool, end: str) -> None:
    waiting.rows()
    getattr(waiting.queue, end)("a")
    assert waiting.queue.preview_of("a") is None
    assert waiting.queue.end_step() == (["a"] if end == "drop" else [])
    assert pool.num_free == 20
    assert not waiting.queue


def test_it_and_all_behind_it_wait_for_room_for_all_of_it(waiting: Waiting) -> None:
    waiting.queue.begin("b", [TokenRange(0, 4)], 0)
    assert waiting.runs(9) == [(2, 4)]
    assert waiting.runs(7) == waiting.runs(MANY, 0) == []
    assert waiting.runs(8) == [(18, 26)]
    assert waiting.runs() == [(0, 4)]


def test_it_is_no_longer_than_a_row_may_be(waiting: Waiting) -> None:
    assert waiting.runs(MANY, MANY, 3) == [(2, 4), (18, 21)]


@pytest.mark.parametrize("lack", ["tokens", "blocks", "answer"])
def test_without_room_or_answer_it_is_given_up(
    waiting: Waiting, pool: BlockPool, lack: str
) -> None:
    if lack == "blocks":
        pool.free = []
    room = 7 if lack == "tokens" else MANY
    assert waiting.runs(9 if lack == "tokens" else MANY)[0] == (2, 4)
    for _ in range(MAX_STEPS):
        assert waiting.counters.lost_probes == 0
        assert waiting.rows(0) == []  # No request has room, so this wait does not count.
        assert waiting.queue.end_step() == []
        assert waiting.rows(room) == []
    if lack == "answer":
        assert waiting.queue.end_step() == []
    assert waiting.counters.lost_probes == 1
    assert waiting.runs() == [tuple(hole) for hole in HOLES]
    assert waiting.queue.end_step() == ["a"]
    assert waiting.counters.lost_probes == 1


def test_it_takes_pages_of_every_group(pool: BlockPool) -> None:
    blocks = no_windows(pool, {0: 4, 1: 8})
    windows = DenseWindows(blocks)
    assert windows.take_behind([5, 3], 26) == {0: [1, 2], 1: [3]}
    assert windows.take_behind([5, 1], 20) == {0: [], 1: [4, 5]}
    assert windows.take_behind([0, 9], 100) is None
    assert pool.num_free == 15
    blocks.end_step()
    assert pool.num_free == 20


# Windows of blended requests.


@pytest.mark.parametrize("num_missing", [0, 1, 4])
def test_held_windows_become_part_of_the_tables_as_far_as_the_request_has_no_own(
    pool: BlockPool, num_missing: int
) -> None:
    windows = DenseWindows(window_blocks(pool))
    cached = pool.free[:WINDOW_PAGES]
    windows.hold("a", {GROUP: cached})
    assert windows.is_held("a")
    assert not set(cached) & set(pool.free)
    tables = windows.begin("a", 16, [[], [0] * (2 + num_missing) + [99]])
    assert tables is not None
    table = tables.by_group[GROUP]
    assert table.blocks[:WINDOW_PAGES] == cached[:num_missing]
    assert table.all_block_ids[2 + num_missing :] == [99]
    assert tables.extend(TokenRange(16, 30)) is tables.by_group
    tables.leave(30, is_end_of_hole=True)  # A later row may read the blocks that this row leaves.
    windows.release_held()  # The request has begun, so no block is held for it.
    assert pool.num_free == 20 - num_missing
    tables.release()
    tables.release()
    assert pool.num_free == 20


def test_windows_of_a_request_that_got_no_blocks_are_released(pool: BlockPool) -> None:
    windows = DenseWindows(window_blocks(pool))
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    windows.release_held()
    assert pool.num_free == 20 and not windows.is_held("a")
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    pool.allocate(pool.num_free)
    assert windows.begin("a", 16, [[], [0] * 9]) is None
    assert pool.num_free == WINDOW_PAGES


@pytest.mark.parametrize("reads_loaded_windows", [False, True])
def test_a_hole_behind_held_windows_does_not_wait_for_the_load(
    pool: BlockPool, reads_loaded_windows: bool
) -> None:
    queue = HoleQueue(window_blocks(pool))
    windows = DenseWindows(queue.blocks)
    tables = windows.begin("a", 16, [[], [0] * 9])
    assert tables is not None
    queue.park("a", [TokenRange(16, 20)], 16, tables, reads_loaded_windows)
    rows = queue.take_rows(MANY, MANY, MANY)
    assert [tuple(row.run) for row in rows] == ([] if reads_loaded_windows else [(16, 20)])
