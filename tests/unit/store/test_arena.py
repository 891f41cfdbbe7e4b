# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Places in the host buffer, compared with a model that has intervals."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.errors import TierError
from vllm_ascend_kvext.store.arena import ALIGNMENT_BYTES, Arena
from vllm_ascend_kvext.transfer.schema import HOST_ALIGNMENT_BYTES

CAPACITY_BYTES = 40 * ALIGNMENT_BYTES
Places = dict[int, int]
"""Sizes of places, by offset."""


def gaps_between(places: Places) -> list[tuple[int, int]]:
    """The size and the offset of each gap between places."""
    gaps = []
    position = 0
    for offset, size in [*sorted(places.items()), (CAPACITY_BYTES, 0)]:
        if offset > position:
            gaps.append((offset - position, position))
        position = offset + size
    return gaps


def cheapest_windows(
    places: Places, center: int, num_bytes: int, fixed: set[int]
) -> list[list[int]]:
    """Runs of places and gaps around a place: large enough ones that free the fewest bytes."""
    parts = sorted([*places.items(), *((offset, size) for size, offset in gaps_between(places))])
    windows: dict[int, list[list[int]]] = {}
    for first, end in itertools.combinations(range(len(parts) + 1), 2):
        freed = [offset for offset, _ in parts[first:end] if offset in places]
        is_large_enough = sum(size for _, size in parts[first:end]) >= num_bytes
        if is_large_enough and center in freed and fixed.isdisjoint(freed):
            windows.setdefault(sum(places[offset] for offset in freed), []).append(freed)
    return windows[min(windows)] if windows else []


@given(st.data(), st.sampled_from([0, 1, 68]))
def test_places_are_those_of_the_model(data: st.DataObject, spare_bytes: int) -> None:
    """Places are taken and returned in any order."""
    arena = Arena(CAPACITY_BYTES + 63, spare_bytes)
    places = Places()
    for _ in range(30):
        if places and data.draw(st.booleans()):
            offsets = st.sampled_from(sorted(places))
            center = data.draw(offsets)
            fixed = data.draw(st.sets(offsets)) - {center}
            num_bytes = arena.place_bytes(data.draw(st.integers(1, CAPACITY_BYTES)))
            found = arena.window_around(center, num_bytes, (set(places) - fixed).__contains__)
            windows = cheapest_windows(places, center, num_bytes, fixed)
            assert found in windows or (found is None and not windows)
            arena.free(center)
            del places[center]
        else:
            num_bytes = data.draw(st.integers(1, CAPACITY_BYTES // 3))
            size = -(-(num_bytes + spare_bytes) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            fitting = [gap for gap in gaps_between(places) if gap[0] >= size]
            offset = min(fitting)[1] if fitting else None
            assert arena.allocate(arena.place_bytes(num_bytes)) == offset
            if offset is not None:
                places[offset] = size
        assert arena.used_bytes == sum(places.values())
        assert arena.largest_gap_bytes == max(gaps_between(places), default=(0, 0))[0]
    for offset in places:
        arena.free(offset)
    assert arena.allocate(CAPACITY_BYTES) == 0


def test_an_arena_without_room_for_anything_is_refused() -> None:
    with pytest.raises(TierError, match="at least 64 bytes, found 63"):
        Arena(63)


@pytest.mark.parametrize("spare_bytes", [0, ALIGNMENT_BYTES])
def test_contents_fill_their_places_but_for_spare_bytes(spare_bytes: int) -> None:
    """A shared tier derives the size of an object from its place."""
    arena = Arena(1 << 20, spare_bytes)
    for num_bytes in range(HOST_ALIGNMENT_BYTES, 4096, HOST_ALIGNMENT_BYTES):
        assert arena.place_bytes(num_bytes) == num_bytes + spare_bytes
