# SPDX-License-Identifier: Apache-2.0
"""When a load may begin: parked requests alone must never fill the pool."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from support.layout.byte_memory import make_group

from vllm_ascend_kvext.connector.scheduler.room import PoolRoom, Room
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import LayoutGroup

STEP_TOKENS = 16
FULL = make_group(0, GroupKind.FULL, 4, 4, [8])
WINDOW = make_group(1, GroupKind.WINDOW, 4, 4, [8], 10, first_storage=1)
MAMBA = make_group(1, GroupKind.STATE, 8, 8, [8], holds_states=True, first_storage=1)


@dataclass
class Pool:
    """What the room asks a scheduler."""

    num_running: int = 0
    num_free: int = 0


def room_of(
    *groups: LayoutGroup, num_blocks: int = 100, pool: Pool | None = None, step: int = STEP_TOKENS
) -> PoolRoom:
    """``num_blocks`` can be used; the pool has the null block besides."""
    pool = pool or Pool()
    view: Any = SimpleNamespace(
        num_blocks=num_blocks + 1,
        max_num_batched_tokens=step,
        num_running=lambda: pool.num_running,
        block_pool=SimpleNamespace(get_num_free_blocks=lambda: pool.num_free),
    )
    return PoolRoom(groups, view)


def needed_blocks(*groups: LayoutGroup, num_tokens: int, boundary_tokens: int) -> int:
    """The smallest pool in which a request may load while it is the only one."""
    for num_blocks in range(1, 1000):
        room = room_of(*groups, num_blocks=num_blocks)
        if room.of_load("a", num_tokens, boundary_tokens) is Room.YES:
            return num_blocks
    raise AssertionError("no pool is large enough")


@pytest.mark.parametrize(
    ("group", "num_tokens", "boundary_tokens", "num_blocks"),
    [
        (FULL, 20, 16, 5),  # every page of the request, and no other
        (FULL, 21, 16, 6),
        (FULL, 16, 15, 4),
        (FULL, 17, 4, 5),
        # A window of 10 tokens lies in 4 pages at most; a step of 16 tokens takes 4, and one more
        # where it begins within a page.
        (WINDOW, 400, 100, 4 + 5),
        (WINDOW, 102, 100, 4 + 2),  # the rest is shorter than a step
        # There is one page before the boundary; vLLM asks for those of a window and a step.
        (WINDOW, 40, 4, 1 + 7),
        (MAMBA, 400, 96, 2 + 3),  # a state is one page
    ],
)
def test_a_load_needs_what_it_holds_and_what_a_step_takes(
    group: LayoutGroup, num_tokens: int, boundary_tokens: int, num_blocks: int
) -> None:
    found = needed_blocks(group, num_tokens=num_tokens, boundary_tokens=boundary_tokens)
    assert found == num_blocks


def test_request_that_the_pool_cannot_hold_never_loads() -> None:
    room = room_of(FULL, num_blocks=9)
    assert room.of_load("a", 40, 20) is Room.NEVER
    # It computes instead, so nobody waits behind it.
    assert room.of_load("b", 36, 20) is Room.YES


def test_largest_need_of_all_parked_counts() -> None:
    """The first holds 5 blocks and needs 15 more; the second holds 4 and needs one more."""
    for num_blocks, expected in ((23, Room.LATER), (24, Room.YES)):
        room = room_of(FULL, num_blocks=num_blocks)
        room.park("a", 80, 20)
        assert room.of_load("b", 20, 16) is expected, num_blocks


def test_others_wait_behind_the_first_that_waits() -> None:
    """A small request does not take the room of a large one again and again."""
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    assert room.of_load("small", 8, 4) is Room.LATER
    assert room.num_parked == 1
    room.unpark("a")  # It computes.
    assert not room.num_parked
    assert room.of_load("small", 8, 4) is Room.LATER
    assert room.of_load("large", 40, 20) is Room.YES
    room.park("large", 40, 20)
    assert room.of_load("small", 8, 4) is Room.YES


def test_request_that_is_not_asked_about_loses_its_turn() -> None:
    """vLLM passes it over, for example because of its adapter: others need not wait for it."""
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.LATER  # It was asked about in that step.
    room.keep_turn("large")
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.LATER
    room.end_step()
    assert room.of_load("small", 8, 4) is Room.YES


def test_version_changes_whenever_a_load_may_begin_that_could_not() -> None:
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    room.of_load("large", 40, 20)
    versions = [room.version]
    for change in (lambda: room.withdraw("large"), lambda: room.unpark("a")):
        change()
        versions.append(room.version)
    assert len(set(versions)) == 3
    room.unpark("a")
    room.withdraw("large")
    assert room.version == versions[-1]


@pytest.mark.parametrize(
    ("num_parked", "pool", "expected"),
    [
        (0, Pool(), Room.YES),
        (1, Pool(num_running=1), Room.YES),  # What runs ends, or is preempted.
        (1, Pool(num_free=9), Room.LATER),
        (1, Pool(num_free=10), Room.YES),
    ],
)
def test_a_request_that_loads_nothing_waits_for_parked_ones_if_it_does_not_fit(
    num_parked: int, pool: Pool, expected: Room
) -> None:
    """vLLM tries no later request if this one does not fit."""
    room = room_of(FULL, pool=pool)
    for number in range(num_parked):
        room.park(str(number), 40, 20)
    assert room.of_other(40) is expected


def test_parked_requests_never_fill_the_pool() -> None:
    """Whatever is admitted, each of the parked can compute its rest alone."""
    for num_blocks in range(8, 60, 3):
        room = room_of(FULL, WINDOW, num_blocks=num_blocks)
        parked: list[tuple[int, int]] = []
        for number in range(40):
            num_tokens = 8 + number * 7 % 45
            boundary_tokens = num_tokens // 3 + 1
            if room.of_load(str(number), num_tokens, boundary_tokens) is Room.YES:
                room.park(str(number), num_tokens, boundary_tokens)
                parked.append((num_tokens, boundary_tokens))
            room.withdraw(str(number))
        held = sum(_held(boundary) for _, boundary in parked)
        for num_tokens, boundary in parked:
            assert held + _rest(num_tokens, boundary) <= num_blocks


def _held(boundary_tokens: int) -> int:
    """Pages with a token that is read after a boundary, and full attention's."""
    first = max(0, boundary_tokens - 10 + 1)
    pages = -(-boundary_tokens // 4)
    return pages + pages - first // 4


def _rest(num_tokens: int, boundary_tokens: int) -> int:
    """Pages that computing the rest in steps takes besides, windows moving on between them."""
    most = 0
    computed = boundary_tokens
    held = _held(boundary_tokens)
    while computed < num_tokens:
        end = min(num_tokens, computed + STEP_TOKENS)
        first = max(0, computed - 10 + 1)
        most = max(most, 2 * -(-end // 4) - first // 4 - held)
        computed = end
    return most


def test_groups_add_up_and_parts_of_one_group_count_once() -> None:
    full = needed_blocks(FULL, num_tokens=200, boundary_tokens=100)
    window = needed_blocks(WINDOW, num_tokens=200, boundary_tokens=100)
    assert needed_blocks(FULL, WINDOW, num_tokens=200, boundary_tokens=100) == full + window
    indexer = make_group(0, GroupKind.FULL, 4, 4, [2], first_storage=2)
    found = needed_blocks(FULL, WINDOW, indexer, num_tokens=200, boundary_tokens=100)
    assert found == full + window


@pytest.mark.parametrize("leave", ["withdraw", "unpark"])
def test_request_that_stops_waiting_lets_others_pass(leave: str) -> None:
    room = room_of(FULL, num_blocks=14)
    room.park("a", 40, 20)
    assert room.of_load("large", 40, 20) is Room.LATER
    getattr(room, leave)("large")
    assert room.of_load("small", 8, 4) is Room.YES
