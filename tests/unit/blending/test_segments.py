# SPDX-License-Identifier: Apache-2.0
"""Which parts of a prompt are segments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.blending.errors import SegmentError
from vllm_ascend_kvext.blending.segments import (
    SEGMENTS_KEY,
    STORE_KEY,
    Segment,
    is_to_be_stored,
    named_segments,
    separated_segments,
)


def test_segments_are_named_by_lists_or_by_json() -> None:
    expected = [Segment(3, 5), Segment(7, 20)]
    for value in ([[7, 20], [3, 5]], ((3, 5), (7, 20)), "[[3, 5], [7, 20]]"):
        assert named_segments({SEGMENTS_KEY: value}, 20) == expected


def test_empty_segments_are_left_out() -> None:
    assert named_segments({SEGMENTS_KEY: [[4, 4], [4, 6], [6, 6]]}, 6) == [Segment(4, 6)]


@pytest.mark.parametrize("extra_args", [None, {}, {"other": 1}, {SEGMENTS_KEY: None}])
def test_requests_that_name_none(extra_args: dict[str, Any] | None) -> None:
    assert named_segments(extra_args, 10) is None


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([[0, 11]], "prompt's 10 tokens"),
        ([[-1, 4]], "prompt's 10 tokens"),
        ([[5, 3]], "first < end"),
        ([[-1, -1]], "prompt's 10 tokens"),
        ([[99, 99]], "prompt's 10 tokens"),
        ([[0, 5], [4, 8]], "do not overlap"),
        ([[0, 5, 6]], "pairs"),
        ([0, 5], "pairs"),
        ([[0, 5.0]], "pairs"),
        ([[True, 5]], "pairs"),
        (7, "pairs"),
        ("[[0, 5", "JSON"),
        ("{}", "pairs"),
        pytest.param("[" * 100_000, "JSON", id="deep"),
        pytest.param([[0, 10**5000]], "cannot be shown", id="long"),
    ],
)
def test_wrong_segments_are_refused_with_what_was_found(value: Any, words: str) -> None:
    with pytest.raises(SegmentError, match=words):
        named_segments({SEGMENTS_KEY: value}, 10)


@pytest.mark.parametrize("value", [True, 1, 1.0, "true", "True", "1"])
def test_a_prompt_is_to_be_stored(value: Any) -> None:
    assert is_to_be_stored({STORE_KEY: value})


@pytest.mark.parametrize("value", [None, False, 0, 0.0, "false", "0"])
def test_a_prompt_is_not_to_be_stored(value: Any) -> None:
    assert not is_to_be_stored({STORE_KEY: value})
    assert not is_to_be_stored(None)


@pytest.mark.parametrize(
    "value",
    [
        *("yes", 2, -1, "", "x" * 500),
        *([1], [], {"true": True}),
        pytest.param(10**5000, id="long"),
    ],
)
def test_what_is_no_truth_value_is_refused(value: Any) -> None:
    with pytest.raises(SegmentError, match="expected true or false") as refused:
        is_to_be_stored({STORE_KEY: value})
    assert len(str(refused.value)) < 300


def test_what_stands_between_separators_is_a_segment() -> None:
    tokens = [1, 0, 0, 5, 6, 0, 0, 0, 0, 7, 0, 0, 9]
    assert separated_segments(tokens, [0, 0]) == [Segment(3, 5), Segment(9, 10)]
    assert separated_segments([1, 2], [0, 0]) == []
    assert separated_segments([1, 0, 0, 2], [0, 0]) == []


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=4), max_size=6),
    st.lists(st.integers(4, 5), min_size=1, max_size=3),
)
def test_separators_split_as_text_is_split(parts: list[list[int]], separator: list[int]) -> None:
    """Tokens of the parts are none of the separator's, so there is one way to split."""
    tokens: list[int] = []
    expected = []
    for number, part in enumerate(parts):
        tokens += separator if number else []
        if part and 0 < number < len(parts) - 1:
            expected.append(part)
        tokens += part
    found = [tokens[slice(*segment)] for segment in separated_segments(tokens, separator)]
    assert found == expected
