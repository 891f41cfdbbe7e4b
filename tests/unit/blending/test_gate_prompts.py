# SPDX-License-Identifier: Apache-2.0
"""What a model is asked before its segments are reused."""

from __future__ import annotations

from itertools import pairwise

import pytest

from vllm_ascend_kvext.blending.errors import BlendingError
from vllm_ascend_kvext.blending.gate_prompts import (
    NUM_MOVED,
    NUM_SEGMENTS,
    GatePrompts,
    make_prompts,
    parts_of,
)
from vllm_ascend_kvext.blending.key_check import FEWEST_PAIRS, find_pairs
from vllm_ascend_kvext.blending.segments import Segment

SINK = (1, 2)
VOCABULARY_TOKENS = 1000


def prompts(
    repaired_tokens: int = 16,
    least_reused_tokens: int = 32,
    most_prompt_tokens: int = 4096,
    page_tokens: int = 16,
) -> GatePrompts:
    return make_prompts(
        SINK,
        VOCABULARY_TOKENS,
        repaired_tokens,
        least_reused_tokens,
        page_tokens,
        most_prompt_tokens,
    )


def test_segments_differ_and_have_enough_equal_tokens_to_compare_keys() -> None:
    segments = prompts().segments
    assert len(set(segments)) == NUM_SEGMENTS
    assert all(len(find_pairs(segment)) >= FEWEST_PAIRS for segment in segments)


def test_segments_stand_in_place_behind_the_sink() -> None:
    found = prompts()
    for prompt, segment in zip(found.in_place, found.segments, strict=True):
        (place,) = prompt.segments
        assert prompt.token_ids[: len(SINK)] == SINK
        assert place.first_tokens == len(SINK)
        assert prompt.token_ids[slice(*place)] == segment


def test_moved_segments_stand_elsewhere_and_in_other_orders() -> None:
    found = prompts()
    assert len(found.moved) == NUM_MOVED == len({prompt.token_ids for prompt in found.moved})
    for prompt in found.moved:
        placed = [prompt.token_ids[slice(*place)] for place in prompt.segments]
        assert sorted(placed) == sorted(found.segments)
        assert prompt.segments[0].first_tokens > len(SINK)
    assert len({prompt.token_ids[slice(*prompt.segments[0])] for prompt in found.moved}) > 1


def test_prompts_end_with_a_copy() -> None:
    found = prompts()
    for prompt in (*found.in_place, *found.moved):
        rest = prompt.token_ids[prompt.segments[-1].end_tokens :]
        assert any(
            rest[-4:] == prompt.token_ids[first : first + 4]
            for place in prompt.segments
            for first in range(*place)
        )


@pytest.mark.parametrize(("repaired_tokens", "least_reused_tokens"), [(16, 500), (300, 1), (0, 1)])
def test_something_of_each_segment_would_be_reused(
    repaired_tokens: int, least_reused_tokens: int
) -> None:
    for segment in prompts(repaired_tokens, least_reused_tokens).segments:
        assert len(segment) >= repaired_tokens + least_reused_tokens
        assert len(segment) >= 2 * repaired_tokens


@pytest.mark.parametrize("page_tokens", [64, 128, 256])
def test_a_part_that_is_reused_goes_on_in_the_next_page(page_tokens: int) -> None:
    for prompt in prompts(page_tokens=page_tokens).in_place:
        runs = parts_of(*prompt.segments)
        assert any(
            run.first_tokens // page_tokens < (run.end_tokens - 1) // page_tokens for run in runs
        )


def test_special_tokens_are_left_out() -> None:
    found = prompts()
    ids = {token for segment in found.segments for token in segment} | set(found.others)
    assert min(ids) >= VOCABULARY_TOKENS // 4
    assert max(ids) < VOCABULARY_TOKENS * 3 // 4


def test_with_little_room_fewer_segments_stand_together() -> None:
    found = prompts(most_prompt_tokens=150)
    assert {len(prompt.segments) for prompt in found.moved} == {1}
    assert max(len(prompt.token_ids) for prompt in (*found.in_place, *found.moved)) <= 150


def test_too_little_room_is_said() -> None:
    with pytest.raises(BlendingError, match="a segment of 96 is reused, found room for 100"):
        prompts(most_prompt_tokens=100)


def test_they_are_the_same_each_time() -> None:
    assert prompts() == prompts()


def test_parts_of_a_segment_leave_its_ends_and_gaps() -> None:
    segment = Segment(10, 106)
    runs = parts_of(segment)
    assert len(runs) == 3
    assert runs[0].first_tokens > segment.first_tokens
    assert runs[-1].end_tokens < segment.end_tokens
    assert all(before.end_tokens < after.first_tokens for before, after in pairwise(runs))


def test_tokens_are_replaced_where_it_is_said() -> None:
    found = prompts()
    prompt = found.in_place[0]
    runs = parts_of(*prompt.segments)
    changed = prompt.without(runs, found.others)
    replaced = {place for run in runs for place in range(*run)}
    assert len(changed) == len(prompt.token_ids)
    for place, (before, after) in enumerate(zip(prompt.token_ids, changed, strict=True)):
        assert after == (found.others[place] if place in replaced else before)
