# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which parts of a prompt are segments, and which of their tokens are reused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_ascend_kvext.errors import SegmentError
from vllm_ascend_kvext.segments.prompt_segments import (
    SEGMENTS_KEY,
    STORE_KEY,
    behind_head,
    is_to_be_stored,
    named_segments,
    plan_blend,
    separated_segments,
)
from vllm_ascend_kvext.token_range import TokenRange


def test_segments_are_named_by_lists_or_by_json() -> None:
    expected = [TokenRange(3, 5), TokenRange(7, 20)]
    for value in ([[7, 20], [3, 5]], ((3, 5), (7, 20)), "[[3, 5], [7, 20]]"):
        assert named_segments({SEGMENTS_KEY: value}, 20) == expected


def test_empty_segments_are_left_out() -> None:
    assert named_segments({SEGMENTS_KEY: [[4, 4], [4, 6], [6, 6]]}, 6) == [TokenRange(4, 6)]


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


TRUTH = {True: (True, 1, 1.0, "true", "True", "1"), False: (None, False, 0, 0.0, "false", "0")}


@pytest.mark.parametrize("is_wanted", TRUTH)
def test_a_request_says_whether_its_prompt_is_to_be_stored(is_wanted: bool) -> None:
    assert {is_to_be_stored({STORE_KEY: value}) for value in TRUTH[is_wanted]} == {is_wanted}
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


@given(
    st.lists(st.lists(st.integers(1, 3), max_size=4), max_size=6),
    st.lists(st.integers(4, 5), min_size=1, max_size=3),
)
def test_separators_split_as_text_is_split(parts: list[list[int]], separator: list[int]) -> None:
    """No part has a token of the separator, so there is only one way to split."""
    tokens: list[int] = []
    expected = []
    for number, part in enumerate(parts):
        tokens += separator if number else []
        if part and 0 < number < len(parts) - 1:
            expected.append(part)
        tokens += part
    found = [tokens[slice(*segment)] for segment in separated_segments(tokens, separator)]
    assert found == expected


# Reuse.


@pytest.mark.parametrize(
    ("end_tokens", "stored_tokens", "heads", "expected"),
    [
        pytest.param(200, 100, (16,), (116, 200), id="a head is computed"),
        pytest.param(200, 100, (0,), (100, 200), id="no head"),
        pytest.param(131, 31, (16,), None, id="shorter than two heads"),
        pytest.param(132, 32, (16,), (116, 132), id="as long as two heads"),
        pytest.param(200, 100, (16, 40), (140, 200), id="windows make heads longer"),
        pytest.param(200, 100, (16, 100), None, id="windows as long as the segment"),
        pytest.param(200, 50, (16,), (116, 150), id="the rest is not stored"),
        pytest.param(200, 16, (16,), None, id="the head alone is stored"),
    ],
)
def test_what_of_a_segment_is_reused(
    end_tokens: int, stored_tokens: int, heads: tuple[int, ...], expected: tuple[int, int] | None
) -> None:
    assert behind_head(TokenRange(100, end_tokens), stored_tokens, *heads) == expected


@st.composite
def disjoint_runs(draw: st.DrawFn) -> list[TokenRange]:
    cuts = sorted(draw(st.lists(st.integers(0, 60), unique=True, max_size=8)))
    return [TokenRange(first, end) for first, end in zip(cuts[::2], cuts[1::2], strict=False)]


@given(disjoint_runs(), st.integers(0, 60), st.integers(1, 70), st.integers(1, 10))
def test_every_token_is_exact_reused_or_computed_once(
    candidates: list[TokenRange], exact_tokens: int, num_tokens: int, min_run_tokens: int
) -> None:
    exact_tokens = min(exact_tokens, num_tokens - 1)
    plan = plan_blend(num_tokens, exact_tokens, candidates, min_run_tokens)
    reusable = range(exact_tokens, num_tokens - 1)
    runs = [[token for token in range(*run) if token in reusable] for run in candidates]
    wanted = [token for run in runs if len(run) >= min_run_tokens for token in run]
    if plan is None:
        assert not wanted
        return
    exact = list(range(exact_tokens))
    reused = [token for run in plan.reused for token in range(*run)]
    computed = [token for run in plan.holes for token in range(*run)]
    resumed = list(range(plan.resume_tokens, num_tokens))
    assert reused == wanted
    assert sorted(exact + reused + computed + resumed) == list(range(num_tokens))
    assert resumed, "the last token must be computed"
    assert all(run.num_tokens > 0 for run in plan.holes)
