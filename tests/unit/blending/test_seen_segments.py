# SPDX-License-Identifier: Apache-2.0
"""What is remembered of segments that requests have had."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.seen_segments import SeenSegments


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def test_a_segment_is_popular_when_it_is_seen_for_the_second_time() -> None:
    seen = SeenSegments(8)
    assert [seen.note(key(1)), seen.note(key(2)), seen.note(key(1))] == [False, False, True]


def test_what_was_popular_has_to_be_seen_twice_again() -> None:
    seen = SeenSegments(8)
    assert [seen.note(key(1)) for _ in range(5)] == [False, True, False, True, False]


def test_what_is_forgotten_has_to_be_seen_twice_again() -> None:
    seen = SeenSegments(8)
    seen.note(key(1))
    seen.forget(key(1))
    seen.forget(key(2))
    assert [seen.note(key(1)), seen.note(key(1))] == [False, True]
    seen.note(key(1))
    seen.clear()
    assert not seen.note(key(1))


def test_of_too_many_the_one_is_forgotten_that_was_seen_longest_ago() -> None:
    seen = SeenSegments(2)
    for number in (1, 2, 3):
        seen.note(key(number))
    assert len(seen) == 2
    assert seen.note(key(2)) and seen.note(key(3))
    assert not seen.note(key(1))


def test_room_for_nothing_is_refused() -> None:
    with pytest.raises(SegmentError, match="at least one key, found 0"):
        SeenSegments(0)
