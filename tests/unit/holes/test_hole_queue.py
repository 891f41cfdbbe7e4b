# SPDX-License-Identifier: Apache-2.0
"""Which holes and probes a step computes, in which blocks, and when their requests go on.

What they read and leave is checked by random lives of requests on vLLM's real scheduler
(``test_request_machine``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import pytest

from vllm_ascend_kvext.holes.hole_blocks import HoleBlocks
from vllm_ascend_kvext.holes.hole_queue import MAX_PROBE_STEPS, HoleQueue, HoleRow, ProbePlan
from vllm_ascend_kvext.token_range import TokenRange

MANY = 10_000
PAGE_TOKENS = 4
WINDOW_PAGES = 2
GROUP = 1
OWN_IDS = [[101, 102, 103, 104, 105]]
"""Of a request that goes on behind its 18th token."""

HOLES = [TokenRange(0, 4), TokenRange(8, 12)]
PROBE = ProbePlan(TokenRange(18, 26), (TokenRange(2, 4),))


class Block(NamedTuple):
    block_id: int


class BlockPool:
    """Hands out blocks by number, and takes them back."""

    def __init__(self) -> None:
        self.free = [Block(number) for number in range(1, 21)]

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, num_blocks: int) -> Iterator[Block] | None:
        if num_blocks > len(self.free):
            return None
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return iter(taken)

    def take(self, blocks: list[Block]) -> None:
        self.free = [block for block in self.free if block not in blocks]

    def release(self, blocks: list[Block]) -> None:
        assert not set(blocks) & set(self.free)
        self.free = [*self.free, *blocks]


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool()


def window_blocks(pool: BlockPool) -> HoleBlocks:
    def pages(boundary_tokens: int) -> dict[int, tuple[int, int]]:
        end_page = -(-boundary_tokens // PAGE_TOKENS)
        return {GROUP: (max(0, end_page - WINDOW_PAGES), end_page)}

    return HoleBlocks(pool, pages, {0: PAGE_TOKENS, GROUP: PAGE_TOKENS})


def no_windows(pool: BlockPool, tokens_per_page: dict[int, int]) -> HoleBlocks:
    return HoleBlocks(pool, lambda _: {}, tokens_per_page)


def parked(
    *holes: tuple[int, int], after_tokens: int = 0, pool: BlockPool | None = None
) -> HoleQueue:
    """A request that waits for its holes; of a model with windows if there is a pool."""
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
    assert not queue.restart("a")  # Its load writes to its blocks.
    assert queue.note_load_ended("a")
    assert runs(queue) == [(60, 70)]
    assert queue.restart("a")
    assert not queue.restart("a")
    assert queue.end_step() == []
    assert not queue


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
    # What follows in a request reads all before it: a part of a hole is its last row.
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


# Probes.


@pytest.fixture
def probing(pool: BlockPool) -> HoleQueue:
    """With a request that has been loaded, and waits for its probe."""
    queue = HoleQueue(no_windows(pool, {0: PAGE_TOKENS}))
    assert queue.begin_dense("a", HOLES, 0, 0, OWN_IDS, PROBE) == {}
    assert rows(queue) == [] == queue.end_step()
    queue.note_load_ended("a")
    return queue


def test_what_is_computed_for_a_probe_is_thrown_away(probing: HoleQueue, pool: BlockPool) -> None:
    missing, probe = rows(probing)
    assert (missing.run, missing.is_probe, missing.is_kept) == (TokenRange(2, 4), False, False)
    assert (probe.run, probe.is_probe, probe.is_kept) == (TokenRange(18, 26), True, False)
    assert probe.tables(OWN_IDS) == ([*OWN_IDS[0], 1, 2],)
    assert missing.tables(OWN_IDS) == (OWN_IDS[0],)
    assert probing.probed_request(probe.row_id) == "a"
    assert pool.num_free == 18
    assert probing.end_step() == [] == rows(probing)
    assert pool.num_free == 20
    probing.end_probe("a", [TokenRange(5, 8), TokenRange(13, 14)])
    assert probing.probed_request(probe.row_id) is None
    assert probing.end_step() == []
    kept = rows(probing)
    assert [tuple(row.run) for row in kept] == [(0, 4), (5, 12), (13, 14)]
    assert all(row.is_kept for row in kept)
    assert probing.end_step() == ["a"]
    assert not probing


@pytest.mark.parametrize("end", ["drop", "restart"])
def test_request_that_goes_has_no_probe(probing: HoleQueue, pool: BlockPool, end: str) -> None:
    probe = rows(probing)[-1]
    getattr(probing, end)("a")
    assert probing.probed_request(probe.row_id) is None
    assert probing.end_step() == (["a"] if end == "drop" else [])
    assert pool.num_free == 20
    assert not probing


def test_probe_and_all_behind_it_wait_for_room_for_all_of_it(probing: HoleQueue) -> None:
    probing.begin("b", [TokenRange(0, 4)], 0)
    assert runs(probing, 9) == [(2, 4)]
    assert runs(probing, 7) == runs(probing, MANY, 0) == []
    assert runs(probing, 8) == [(18, 26)]
    assert runs(probing) == [(0, 4)]


def test_probe_is_no_longer_than_a_row_may_be(probing: HoleQueue) -> None:
    assert runs(probing, MANY, MANY, 3) == [(2, 4), (18, 21)]


@pytest.mark.parametrize("lack", ["tokens", "blocks", "answer"])
def test_probe_without_room_or_answer_is_given_up(
    probing: HoleQueue, pool: BlockPool, lack: str
) -> None:
    if lack == "blocks":
        pool.free = []
    room = 7 if lack == "tokens" else MANY
    assert runs(probing, 9 if lack == "tokens" else MANY)[0] == (2, 4)
    for _ in range(MAX_PROBE_STEPS):
        assert probing.take_lost_probes() == 0
        assert rows(probing, 0) == []  # Nobody has room: that does not count.
        assert probing.end_step() == []
        assert rows(probing, room) == []
    if lack == "answer":
        assert probing.end_step() == []
    assert probing.take_lost_probes() == 1
    assert probing.take_lost_probes() == 0
    assert runs(probing) == [tuple(hole) for hole in HOLES]
    assert probing.end_step() == ["a"]


def test_probe_takes_pages_of_every_group(pool: BlockPool) -> None:
    blocks = no_windows(pool, {0: 4, 1: 8})
    assert blocks.take_probe([5, 3], 26) == {0: [1, 2], 1: [3]}
    assert blocks.take_probe([5, 1], 20) == {0: [], 1: [4, 5]}
    assert blocks.take_probe([0, 9], 100) is None
    assert pool.num_free == 15
    blocks.end_step()
    assert pool.num_free == 20


# Blocks of windows.


def test_rows_move_the_window_on(pool: BlockPool) -> None:
    windows = window_blocks(pool)
    tables = windows.begin("a", [16, 40])
    assert tables is not None
    assert [(each[GROUP].first_page, len(each[GROUP].blocks)) for each in tables] == [
        (2, 2),
        (8, 2),
    ]
    first = windows.extend("a", TokenRange(16, 26))
    assert first is not None
    ids = first[GROUP].all_block_ids
    assert len(ids) == 7 and ids[:2] == [0, 0] and 0 not in ids[2:]
    windows.leave("a", 26, is_end_of_hole=False)
    assert pool.num_free == 13  # The step may still use what it leaves.
    windows.end_step()
    assert pool.num_free == 16
    second = windows.extend("a", TokenRange(26, 32))
    assert second is not None
    assert second[GROUP].all_block_ids[:7] == [0] * 5 + ids[5:7]
    windows.leave("a", 32, is_end_of_hole=True)
    windows.end_step()
    assert pool.num_free == 18


def test_nothing_is_taken_where_blocks_are_too_few(pool: BlockPool) -> None:
    windows = window_blocks(pool)
    pool.free = pool.free[:3]
    assert windows.begin("a", [16, 40]) is None
    assert windows.begin("a", [16]) is not None
    assert windows.extend("a", TokenRange(16, 26)) is None
    assert pool.num_free == 1
    windows.drop("a")
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
    assert rows(queue) == []  # Later requests do not take what this one waits for.
    pool.release(held[17:])
    assert runs(queue) == [(0, 10)]
    queue.end_step()
    # One block is free, and two of three stay: those before token 10.
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
        assert pool.num_free < 20  # What is being loaded is written to them.
        assert not queue.note_load_ended("a")
    queue.end_step()
    assert pool.num_free == 20


@pytest.mark.parametrize("num_missing", [0, 1, 4])
def test_held_windows_become_part_of_the_tables_as_far_as_the_request_has_no_own(
    pool: BlockPool, num_missing: int
) -> None:
    windows = window_blocks(pool)
    cached = pool.free[:WINDOW_PAGES]
    windows.hold("a", {GROUP: cached})
    assert windows.is_held("a")
    assert not set(cached) & set(pool.free)
    tables = windows.begin_dense("a", 16, [[], [0] * (2 + num_missing) + [99]])
    assert tables is not None
    assert tables[GROUP].blocks[:WINDOW_PAGES] == cached[:num_missing]
    assert tables[GROUP].all_block_ids[2 + num_missing :] == [99]
    windows.release_held()  # It has begun: nothing is held for it any more.
    assert pool.num_free == 20 - num_missing
    windows.drop("a")
    assert pool.num_free == 20


def test_windows_of_a_request_that_got_no_blocks_are_released(pool: BlockPool) -> None:
    windows = window_blocks(pool)
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    windows.release_held()
    assert pool.num_free == 20 and not windows.is_held("a")
    windows.hold("a", {GROUP: pool.free[:WINDOW_PAGES]})
    pool.allocate(pool.num_free)
    assert windows.begin_dense("a", 16, [[], [0] * 9]) is None
    assert pool.num_free == WINDOW_PAGES
