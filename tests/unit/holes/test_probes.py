# SPDX-License-Identifier: Apache-2.0
"""A request is looked at before its holes are computed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from vllm_ascend_kvext.holes.hole_queue import MOST_PROBE_STEPS, HoleQueue, HoleRow, ProbePlan
from vllm_ascend_kvext.holes.probe_blocks import ProbeBlocks
from vllm_ascend_kvext.holes.span_plan import Run, without

MANY = 10_000
PAGE_TOKENS = 4
OWN_IDS = [[101, 102, 103, 104, 105]]
"""Of a request that goes on behind its 18th token."""


class Block(NamedTuple):
    block_id: int


@dataclass
class Pool:
    """Hands out blocks by number, and takes them back."""

    free: list[Block] = field(default_factory=lambda: [Block(number) for number in range(1, 9)])

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, num_blocks: int) -> list[Block]:
        assert num_blocks <= len(self.free)
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return taken

    def release(self, blocks: list[Block]) -> None:
        assert not set(blocks) & set(self.free)
        self.free += blocks


@pytest.fixture
def pool() -> Pool:
    return Pool()


HOLES = [Run(0, 4), Run(8, 12)]
PLAN = ProbePlan(Run(18, 26), (Run(2, 4),))


@pytest.fixture
def queue(pool: Pool) -> HoleQueue:
    """With a request that has been loaded, and waits for its probe."""
    queue = HoleQueue(probe_blocks=ProbeBlocks(pool, {0: PAGE_TOKENS}))
    assert queue.begin_dense("a", HOLES, 0, 0, OWN_IDS, PLAN) == {}
    queue.note_load_ended("a")
    return queue


def take(queue: HoleQueue, most_tokens: int = MANY, most_rows: int = MANY) -> list[HoleRow]:
    return queue.take_rows(most_tokens, most_rows, MANY)


def runs(rows: list[HoleRow]) -> list[Run]:
    return [row.run for row in rows]


def test_what_is_missing_comes_with_the_probe_and_is_thrown_away(queue: HoleQueue) -> None:
    missing, probe = take(queue)
    assert (missing.run, missing.is_probe, missing.is_kept) == (Run(2, 4), False, False)
    assert (probe.run, probe.is_probe, probe.is_kept) == (Run(18, 26), True, False)
    assert probe.tables(OWN_IDS) == ([*OWN_IDS[0], 1, 2],)
    assert missing.tables(OWN_IDS) == (OWN_IDS[0],)


def test_holes_are_computed_with_what_was_learnt(queue: HoleQueue) -> None:
    probe = take(queue)[-1]
    assert queue.probed_request(probe.row_id) == "a"
    assert queue.end_step() == [] == take(queue)
    queue.end_probe("a", [Run(5, 8), Run(13, 14)])
    assert queue.probed_request(probe.row_id) is None
    assert queue.end_step() == []
    rows = take(queue)
    assert runs(rows) == [Run(0, 4), Run(5, 12), Run(13, 14)]
    assert all(row.is_kept for row in rows)
    assert queue.end_step() == ["a"]
    assert not queue


def test_blocks_of_a_probe_are_free_after_its_step(queue: HoleQueue, pool: Pool) -> None:
    take(queue)
    assert pool.num_free == 6
    queue.end_step()
    assert pool.num_free == 8


@pytest.mark.parametrize("end", ["drop", "restart"])
def test_request_that_goes_leaves_no_blocks(queue: HoleQueue, pool: Pool, end: str) -> None:
    probe = take(queue)[-1]
    getattr(queue, end)("a")
    assert queue.probed_request(probe.row_id) is None
    assert queue.end_step() == (["a"] if end == "drop" else [])
    assert pool.num_free == 8
    assert not queue


def test_nothing_is_computed_before_the_load_ends(pool: Pool) -> None:
    queue = HoleQueue(probe_blocks=ProbeBlocks(pool, {0: PAGE_TOKENS}))
    queue.begin_dense("a", [], 0, 0, OWN_IDS, ProbePlan(Run(18, 20), ()))
    assert take(queue) == [] == queue.end_step()
    assert queue.note_load_ended("a")
    assert queue.end_step() == []
    assert runs(take(queue)) == [Run(18, 20)]
    queue.end_probe("a", [])
    assert queue.end_step() == ["a"]


def test_probe_waits_for_a_step_that_has_room_for_all_of_it(queue: HoleQueue) -> None:
    assert runs(take(queue, most_tokens=9)) == [Run(2, 4)]
    assert take(queue, most_tokens=7) == []
    assert take(queue, most_rows=0) == []
    assert runs(take(queue, most_tokens=8)) == [Run(18, 26)]


def test_probe_is_no_longer_than_a_row_may_be(queue: HoleQueue) -> None:
    rows = queue.take_rows(MANY, MANY, 3)
    assert runs(rows) == [Run(2, 4), Run(18, 21)]
    assert len(rows[-1].tables(OWN_IDS)[0]) == 6


def test_later_requests_do_not_take_what_a_probe_waits_for(queue: HoleQueue) -> None:
    queue.begin("b", [Run(0, 4)], 0)
    assert runs(take(queue, most_tokens=9)) == [Run(2, 4)]
    assert take(queue, most_tokens=7) == []
    assert runs(take(queue)) == [Run(18, 26), Run(0, 4)]


@pytest.mark.parametrize("lack", ["tokens", "blocks"])
def test_probe_without_room_is_given_up(queue: HoleQueue, pool: Pool, lack: str) -> None:
    if lack == "blocks":
        pool.free = []
    most_tokens = 9 if lack == "tokens" else MANY
    assert runs(take(queue, most_tokens)) == [Run(2, 4)]
    for _ in range(MOST_PROBE_STEPS):
        assert take(queue, 0) == []  # Nobody has room: that does not count.
        assert queue.end_step() == []
        assert take(queue, 7 if lack == "tokens" else MANY) == []
    assert queue.take_lost_probes() == 1
    assert queue.take_lost_probes() == 0
    rows = take(queue)
    assert runs(rows) == HOLES
    assert all(row.is_kept for row in rows)
    assert queue.end_step() == ["a"]


def test_probe_that_nobody_speaks_of_is_given_up(queue: HoleQueue) -> None:
    probe = take(queue)[-1]
    for _ in range(MOST_PROBE_STEPS):
        assert queue.end_step() == []
        assert queue.probed_request(probe.row_id) == "a"
    assert queue.end_step() == []
    assert queue.probed_request(probe.row_id) is None
    assert queue.take_lost_probes() == 1
    assert runs(take(queue)) == HOLES
    assert queue.end_step() == ["a"]


def test_a_probe_of_a_request_that_began_anew_is_another(queue: HoleQueue) -> None:
    before = take(queue)[-1]
    queue.restart("a")
    queue.begin_dense("a", HOLES, 0, 0, OWN_IDS, PLAN)
    queue.note_load_ended("a")
    assert queue.probed_request(before.row_id) is None
    after = take(queue)[-1]
    assert queue.probed_request(after.row_id) == "a"
    assert queue.probed_request(before.row_id) is None


def test_pages_are_taken_of_every_group(pool: Pool) -> None:
    blocks = ProbeBlocks(pool, {0: 4, 1: 8})
    assert blocks.take([5, 3], 26) == {0: [1, 2], 1: [3]}
    assert blocks.take([5, 1], 20) == {0: [], 1: [4, 5]}
    assert blocks.take([0, 9], 16) is None
    assert len(blocks) == 5
    blocks.end_step()
    assert (len(blocks), pool.num_free) == (0, 8)


def test_runs_without_others() -> None:
    some = [Run(0, 10), Run(20, 30)]
    assert without(some, []) == tuple(some)
    assert without(some, [Run(0, 10), Run(22, 24), Run(29, 40)]) == (Run(20, 22), Run(24, 29))
    assert without(some, [Run(5, 25)]) == (Run(0, 5), Run(25, 30))
