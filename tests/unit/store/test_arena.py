# SPDX-License-Identifier: Apache-2.0
"""Places in the host buffer, against a model of intervals."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.errors import ArenaError

ALIGNMENT_BYTES = 64
CAPACITY_BYTES = 40 * ALIGNMENT_BYTES


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def holes_between(places: dict[int, int], capacity_bytes: int) -> list[tuple[int, int]]:
    """Offset and size of what lies between places."""
    holes = []
    position = 0
    for offset, size in [*sorted(places.items()), (capacity_bytes, 0)]:
        if offset > position:
            holes.append((position, offset - position))
        position = offset + size
    return holes


class ArenaMachine(RuleBasedStateMachine):
    """Places are taken and given back in any order; the model has their offsets and sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(CAPACITY_BYTES + 63)
        self.places: dict[int, int] = {}

    @rule(num_bytes=st.integers(1, CAPACITY_BYTES // 3))
    def allocate(self, num_bytes: int) -> None:
        size = aligned(num_bytes)
        fitting = [
            (hole_bytes, offset)
            for offset, hole_bytes in holes_between(self.places, CAPACITY_BYTES)
            if hole_bytes >= size
        ]
        expected = min(fitting)[1] if fitting else None
        assert self.arena.allocate(num_bytes) == expected
        if expected is not None:
            self.places[expected] = size

    @precondition(lambda self: self.places)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset = data.draw(st.sampled_from(sorted(self.places)))
        self.arena.free(offset)
        del self.places[offset]

    @rule(offset=st.integers(-64, CAPACITY_BYTES))
    def free_what_is_no_place(self, offset: int) -> None:
        if offset not in self.places:
            with pytest.raises(ArenaError, match="free each place once"):
                self.arena.free(offset)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), num_bytes=st.integers(1, CAPACITY_BYTES))
    def find_window(self, data: st.DataObject, num_bytes: int) -> None:
        """Of all runs of places and holes around a place, the cheapest that is large enough."""
        center = data.draw(st.sampled_from(sorted(self.places)))
        fixed = data.draw(st.sets(st.sampled_from(sorted(self.places)))) - {center}
        parts = sorted([*self.places.items(), *holes_between(self.places, CAPACITY_BYTES)])
        windows = []
        for first, end in itertools.combinations(range(len(parts) + 1), 2):
            window = parts[first:end]
            freed = [offset for offset, _ in window if offset in self.places]
            is_large_enough = sum(size for _, size in window) >= num_bytes
            if is_large_enough and center in freed and not fixed & set(freed):
                windows.append((sum(self.places[offset] for offset in freed), freed))
        found = self.arena.window_around(center, num_bytes, lambda offset: offset not in fixed)
        if not windows:
            assert found is None
            return
        assert found is not None
        assert found == sorted(found)
        assert (sum(self.places[offset] for offset in found), found) in windows
        assert sum(self.places[offset] for offset in found) == min(windows)[0]

    @invariant()
    def what_is_not_used_is_free(self) -> None:
        assert self.arena.used_bytes == sum(self.places.values())
        holes = holes_between(self.places, CAPACITY_BYTES)
        assert self.arena.num_holes == len(holes)
        assert self.arena.largest_hole_bytes == max((size for _, size in holes), default=0)

    @invariant()
    def places_lie_apart_and_within(self) -> None:
        position = 0
        for offset, size in sorted(self.places.items()):
            assert offset >= position
            assert not offset % ALIGNMENT_BYTES
            position = offset + size
        assert position <= CAPACITY_BYTES

    def teardown(self) -> None:
        for offset in list(self.places):
            self.arena.free(offset)
        assert self.arena.allocate(CAPACITY_BYTES) == 0


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_weeks_of_mixed_sizes_leave_the_arena_usable() -> None:
    """Chunks, tails and odd ends come and go at random while nine tenths are asked to be full."""
    chunk_bytes, tails_bytes = 5 << 20, 9 << 20
    sizes = [chunk_bytes] * 6 + [tails_bytes] * 2 + [chunk_bytes * i // 8 for i in range(1, 8)]
    capacity_bytes = 1 << 30
    arena = Arena(capacity_bytes)
    chance = random.Random(0)
    places: list[int] = []
    num_failed = num_asked = 0
    for _ in range(30_000):
        if arena.used_bytes < 0.85 * capacity_bytes:
            num_asked += 1
            offset = arena.allocate(chance.choice(sizes))
            if offset is not None:
                places.append(offset)
                continue
            num_failed += 1
        index = chance.randrange(len(places))
        places[index], places[-1] = places[-1], places[index]
        arena.free(places.pop())
    assert num_failed < 0.02 * num_asked
    assert arena.num_holes < len(places)


def test_the_whole_capacity_can_be_one_place() -> None:
    arena = Arena(1000)
    assert arena.capacity_bytes == 960
    assert arena.allocate(960) == 0
    assert arena.allocate(1) is None
    arena.free(0)
    assert arena.largest_hole_bytes == 960


def test_the_smallest_hole_that_is_large_enough_is_taken() -> None:
    arena = Arena(64 * 10)
    large, _, small, _ = (arena.allocate(64 * size) for size in (4, 1, 2, 1))
    assert large is not None and small is not None
    arena.free(large)
    arena.free(small)
    assert arena.allocate(64 * 2) == small


@pytest.mark.parametrize("num_bytes", [0, -64, 961])
def test_a_size_that_cannot_be_is_refused(num_bytes: int) -> None:
    arena = Arena(1000)
    with pytest.raises(
        ArenaError, match=rf"from 1 to its capacity of 960 bytes, found {num_bytes}"
    ):
        arena.allocate(num_bytes)
    assert arena.used_bytes == 0


def test_an_arena_without_room_for_anything_is_refused() -> None:
    with pytest.raises(ArenaError, match="at least 64 bytes, found 63"):
        Arena(63)


def test_a_place_is_freed_once() -> None:
    arena = Arena(1000)
    arena.allocate(64)
    arena.free(0)
    with pytest.raises(ArenaError, match="found 0, where a hole begins"):
        arena.free(0)
    with pytest.raises(ArenaError, match="found 64, where neither a place nor a hole begins"):
        arena.free(64)
