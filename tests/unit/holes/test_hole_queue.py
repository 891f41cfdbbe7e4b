# SPDX-License-Identifier: Apache-2.0
"""Which holes a step computes, and when their requests go on."""

from __future__ import annotations

from vllm_ascend_kvext.holes.hole_queue import HoleQueue
from vllm_ascend_kvext.holes.span_plan import Run

MANY = 10_000


def runs(queue: HoleQueue, most_tokens: int = MANY, most_rows: int = MANY) -> list[tuple[str, Run]]:
    return [(row.request_id, row.run) for row in queue.take_rows(most_tokens, most_rows, MANY)]


def parked(*holes: tuple[int, int], after_tokens: int = 0) -> HoleQueue:
    queue = HoleQueue()
    queue.begin("a", [Run(*hole) for hole in holes], after_tokens)
    return queue


def test_holes_wait_for_what_is_loaded_before_them() -> None:
    queue = parked((40, 50), (60, 70), after_tokens=20)
    assert runs(queue) == []
    assert queue.note_load_ended("a")
    assert runs(queue) == [("a", Run(40, 50)), ("a", Run(60, 70))]


def test_hole_behind_the_rows_of_the_device_does_not_wait() -> None:
    queue = parked((20, 50), (60, 70), after_tokens=20)
    assert runs(queue, most_tokens=12) == [("a", Run(20, 32))]
    assert runs(queue) == [("a", Run(32, 50))]
    assert runs(queue) == []
    queue.note_load_ended("a")
    assert runs(queue) == [("a", Run(60, 70))]


def test_request_goes_on_a_step_after_its_last_hole() -> None:
    queue = parked((40, 50))
    queue.note_load_ended("a")
    assert queue.end_step() == []
    runs(queue)
    assert queue.end_step() == ["a"]
    assert queue.end_step() == []
    assert not queue
    assert not queue.note_load_ended("a")


def test_request_goes_on_when_its_load_ends_after_its_holes() -> None:
    queue = parked((0, 50))
    runs(queue)
    assert queue.end_step() == []
    queue.note_load_ended("a")
    assert queue.end_step() == ["a"]


def test_what_a_load_lacks_is_computed_in_its_turn() -> None:
    queue = parked((20, 50), (70, 80), after_tokens=20)
    assert runs(queue, most_tokens=10) == [("a", Run(20, 30))]
    queue.add("a", [Run(80, 90), Run(60, 64)])
    queue.note_load_ended("a")
    assert runs(queue) == [("a", Run(30, 50)), ("a", Run(60, 64)), ("a", Run(70, 90))]


def test_request_without_holes_waits_for_what_its_load_lacks() -> None:
    queue = HoleQueue()
    queue.add("a", [Run(0, 10)])
    assert queue.note_load_ended("a")
    assert runs(queue) == [("a", Run(0, 10))]
    assert queue.end_step() == ["a"]


def test_hole_that_does_not_fit_is_the_last_of_a_step() -> None:
    queue = parked((40, 50), (60, 70))
    queue.note_load_ended("a")
    assert runs(queue, most_tokens=4) == [("a", Run(40, 44))]
    assert runs(queue, most_tokens=10) == [("a", Run(44, 50)), ("a", Run(60, 64))]
    assert queue.end_step() == []
    assert runs(queue, most_rows=1) == [("a", Run(64, 70))]
    assert queue.end_step() == ["a"]


def test_a_step_has_so_many_rows_of_all_requests() -> None:
    queue = parked((40, 50), (60, 70))
    queue.begin("b", [Run(0, 10)], 0)
    queue.note_load_ended("a")
    assert runs(queue, most_rows=2) == [("a", Run(40, 50)), ("a", Run(60, 70))]
    assert runs(queue, most_rows=2) == [("b", Run(0, 10))]


def test_no_budget_is_no_row() -> None:
    queue = parked((0, 10))
    assert runs(queue, most_tokens=0) == runs(queue, most_tokens=-5) == runs(queue, most_rows=0)
    assert runs(queue) == [("a", Run(0, 10))]


def test_it_says_that_a_hole_had_no_room() -> None:
    queue = parked((40, 50), (60, 70))
    runs(queue, most_tokens=0)
    assert not queue.lacks_room, "it waits for its load"
    queue.note_load_ended("a")
    runs(queue, most_tokens=0)
    assert queue.lacks_room
    runs(queue, most_rows=1)
    assert queue.lacks_room
    runs(queue)
    assert not queue.lacks_room


def test_rows_have_names_of_their_own() -> None:
    queue = parked((0, 10), (20, 30))
    queue.note_load_ended("a")
    ids = [row.row_id for row in (*queue.take_rows(5, 1, MANY), *queue.take_rows(MANY, MANY, MANY))]
    assert len(set(ids)) == len(ids) == 3


def test_request_that_ends_is_named_if_nothing_else_says_that_it_is_loaded() -> None:
    for is_loaded in (False, True):
        queue = parked((40, 50))
        if is_loaded:
            queue.note_load_ended("a")
        queue.drop("a")
        queue.drop("a")
        assert runs(queue) == []
        assert queue.end_step() == ["a"] * is_loaded
        assert not queue


def test_no_row_takes_more_than_a_request_may() -> None:
    queue = parked((40, 60), (80, 85))
    queue.note_load_ended("a")
    rows = queue.take_rows(MANY, MANY, 8)
    assert [row.run for row in rows] == [Run(40, 48)]  # What follows reads all before it.
    assert [row.run for row in queue.take_rows(MANY, MANY, 8)] == [Run(48, 56)]
    assert [row.run for row in queue.take_rows(MANY, MANY, 8)] == [Run(56, 60), Run(80, 85)]


def test_no_row_has_the_id_of_a_request() -> None:
    queue = parked((0, 10))
    (row,) = queue.take_rows(MANY, MANY, MANY, {"a", "a-hole-1", "a-hole-2"})
    assert row.row_id == "a-hole-3"


def test_request_whose_blocks_are_taken_is_forgotten() -> None:
    queue = parked((40, 50))
    assert not queue.restart("a")  # Its load writes to them.
    queue.note_load_ended("a")
    assert queue.restart("a")
    assert not queue.restart("a")
    assert not queue
    assert queue.end_step() == []
