# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""When a load may begin: parked requests alone must never fill the pool."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.layout.byte_memory import make_group

from vllm_ascend_kvext.connector.scheduler.room import PoolRoom, Room
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup

FULL = make_group(0, GroupKind.FULL, 4, 4, [8])
INDEXER = make_group(0, GroupKind.FULL, 4, 4, [2], first_storage=2)
WINDOW = make_group(1, GroupKind.WINDOW, 4, 4, [8], 10, first_storage=1)
MAMBA = make_group(1, GroupKind.STATE, 8, 8, [8], holds_states=True, first_storage=1)


def room_of(
    *groups: LayoutGroup,
    num_blocks: int = 100,
    num_running: int = 0,
    num_free: int = 0,
    num_steps_in_flight: int = 1,
) -> PoolRoom:
    """``num_blocks`` blocks can be used. The pool also has the null block."""
    view: Any = SimpleNamespace(
        num_blocks=num_blocks + 1,
        max_num_batched_tokens=16,
        num_steps_in_flight=num_steps_in_flight,
        num_running=lambda: num_running,
    )
    references: Any = SimpleNamespace(make_free=lambda num_blocks: num_blocks <= num_free)
    return PoolRoom(groups, view, references)


@pytest.mark.parametrize(
    ("groups", "num_tokens", "boundary_tokens", "num_blocks"),
    [
        ([FULL], 20, 16, 5),  # The load needs every page of the request, and no other.
        ([FULL], 21, 16, 6),
        ([FULL], 16, 15, 4),
        ([FULL], 17, 4, 5),
        # A window of 10 tokens lies in at most 4 pages. A step of 16 tokens takes 4 pages, or 5 if
        # it begins inside a page.
        ([WINDOW], 400, 100, 4 + 5),
        ([WINDOW], 102, 100, 4 + 2),  # The rest is shorter than a step.
        # There is one page before the boundary. vLLM asks for the pages of a window and a step.
        ([WINDOW], 40, 4, 1 + 7),
        ([MAMBA], 400, 96, 2 + 3),  # A state is one page.
        # Parts of one group share its blocks.
        ([FULL, WINDOW, INDEXER], 200, 100, 50 + 4 + 5),
        ([WINDOW, FULL], 200, 100, 4 + 5 + 50),
    ],
)
def test_a_load_needs_what_it_holds_and_what_a_step_takes(
    groups: list[LayoutGroup], num_tokens: int, boundary_tokens: int, num_blocks: int
) -> None:
    for size, expected in ((num_blocks - 1, Room.NEVER), (num_blocks, Room.YES)):
        room = room_of(*groups, num_blocks=size)
        assert room.of_load("a", num_tokens, boundary_tokens) is expected


def test_windows_keep_what_all_steps_in_flight_have_left_behind() -> None:
    for size, expected in ((4 + 8, Room.NEVER), (4 + 9, Room.YES)):
        room = room_of(WINDOW, num_blocks=size, num_steps_in_flight=2)
        assert room.of_load("a", 400, 100) is expected


def test_request_that_the_pool_cannot_hold_never_loads() -> None:
    room = room_of(FULL, num_blocks=9)
    assert room.of_load("a", 40, 20) is Room.NEVER
    # The request computes instead, so no request waits behind it.
    assert room.of_load("b", 36, 20) is Room.YES


def test_largest_need_of_all_parked_counts() -> None:
    """The first request holds 5 blocks and needs 15 more. The second holds 4 and needs one more."""
    for num_blocks, expected in ((23, Room.LATER), (24, Room.YES)):
        room = room_of(FULL, num_blocks=num_blocks)
        room.park("a", 80, 20)
        assert room.of_load("b", 20, 16) is expected, num_blocks


def test_others_wait_behind_the_first_that_waits() -> None:
    """Small requests must not take the room of a large request again and again."""
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    assert room.of_load("small", 8, 4) is Room.LATER
    assert room.num_parked == 1
    room.unpark("a")  # The request computes.
    assert not room.num_parked
    assert room.of_load("small", 8, 4) is Room.LATER
    assert room.of_load("large", 40, 20) is Room.YES
    room.park("large", 40, 20)
    assert room.of_load("small", 8, 4) is Room.YES


def test_request_that_is_not_asked_about_loses_its_turn() -> None:
    """vLLM may pass the request over, for example because of its adapter.

    Others need not wait then.
    """
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.LATER  # The request was asked about in that step.
    room.keep_turn("large")
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.LATER
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.YES


@pytest.mark.parametrize(
    ("num_parked", "pool", "expected"),
    [
        (0, {}, Room.YES),
        (1, {"num_running": 1}, Room.YES),  # Running requests end, or are preempted.
        (1, {"num_free": 9}, Room.LATER),
        (1, {"num_free": 10}, Room.YES),
    ],
)
def test_a_request_that_loads_nothing_waits_for_parked_ones_if_it_does_not_fit(
    num_parked: int, pool: dict[str, int], expected: Room
) -> None:
    """vLLM tries no later request if this one does not fit."""
    room = room_of(FULL, **pool)
    for number in range(num_parked):
        room.park(str(number), 40, 20)
    assert room.of_other(40) is expected


@pytest.mark.parametrize("leave", ["withdraw", "unpark"])
def test_request_that_stops_waiting_lets_others_pass(leave: str) -> None:
    """The version changes when a load becomes possible that was not possible before."""
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    version = room.version
    for _ in range(2):
        getattr(room, leave)("large")
        assert room.version == version + 1
    assert room.of_load("small", 8, 4) is Room.YES
    for _ in range(2):
        room.unpark("a")
        assert room.version == version + 2
