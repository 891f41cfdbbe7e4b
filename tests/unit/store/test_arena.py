# SPDX-License-Identifier: Apache-2.0
"""Places in the host buffer, against a model of intervals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_ascend_kvext.store.arena import Arena
from vllm_ascend_kvext.store.errors import TierError

ALIGNMENT_BYTES = 64
CAPACITY_BYTES = 40 * ALIGNMENT_BYTES


def aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


def gaps_between(places: dict[int, int], capacity_bytes: int) -> list[tuple[int, int]]:
    """Offset and size of what lies between places."""
    gaps = []
    position = 0
    for offset, size in [*sorted(places.items()), (capacity_bytes, 0)]:
        if offset > position:
            gaps.append((position, offset - position))
        position = offset + size
    return gaps


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
            (gap_bytes, offset)
            for offset, gap_bytes in gaps_between(self.places, CAPACITY_BYTES)
            if gap_bytes >= size
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
            with pytest.raises(KeyError):
                self.arena.free(offset)

    @precondition(lambda self: self.places)
    @rule(data=st.data(), num_bytes=st.integers(1, CAPACITY_BYTES))
    def find_window(self, data: st.DataObject, num_bytes: int) -> None:
        """Of all runs of places and gaps around a place, the cheapest that is large enough."""
        center = data.draw(st.sampled_from(sorted(self.places)))
        fixed = data.draw(st.sets(st.sampled_from(sorted(self.places)))) - {center}
        parts = sorted([*self.places.items(), *gaps_between(self.places, CAPACITY_BYTES)])
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
        gaps = gaps_between(self.places, CAPACITY_BYTES)
        assert len(self.arena._gaps) == len(gaps)
        assert self.arena.largest_gap_bytes == max((size for _, size in gaps), default=0)

    def teardown(self) -> None:
        for offset in list(self.places):
            self.arena.free(offset)
        assert self.arena.allocate(CAPACITY_BYTES) == 0


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(max_examples=60, stateful_step_count=40)


def test_an_arena_without_room_for_anything_is_refused() -> None:
    with pytest.raises(TierError, match="at least 64 bytes, found 63"):
        Arena(63)
