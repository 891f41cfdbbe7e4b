# SPDX-License-Identifier: Apache-2.0
"""Which rows a chunk keeps, against a count of tokens one by one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.layout.reach import Reach

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.errors import TokenRangeError
from vllm_ascend_kvext.layout.model import LayoutGroup, StatePolicy
from vllm_ascend_kvext.layout.rows import TokenRange, dense_rows, kept_rows, needed_rows


def group(
    kind: GroupKind,
    tokens_per_page: int,
    tokens_per_row: int = 1,
    window_tokens: int = 0,
    restart_tokens: int = 0,
    holds_states: bool = False,
) -> LayoutGroup:
    return LayoutGroup(
        0,
        kind,
        tokens_per_page,
        tokens_per_row,
        window_tokens,
        restart_tokens,
        (),
        holds_states or kind is GroupKind.STATE,
    )


@st.composite
def groups(draw: st.DrawFn) -> LayoutGroup:
    tokens_per_row = draw(st.sampled_from([1, 2, 4, 8]))
    tokens_per_page = tokens_per_row * draw(st.sampled_from([1, 2, 3, 8]))
    kind = draw(st.sampled_from(sorted(set(GroupKind) - {GroupKind.OTHER}, key=str)))
    window_tokens = restart_tokens = 0
    if kind is GroupKind.WINDOW:
        window_tokens, restart_tokens = draw(st.integers(1, 40)), draw(st.sampled_from([0, 8, 16]))
    elif kind is GroupKind.CHUNKED:
        window_tokens = restart_tokens = draw(st.sampled_from([8, 16, 40]))
    elif kind is GroupKind.STATE:
        tokens_per_row = tokens_per_page
    return group(kind, tokens_per_page, tokens_per_row, window_tokens, restart_tokens)


def reach_of(group: LayoutGroup) -> Reach:
    return Reach(
        group.kind,
        group.tokens_per_page,
        group.tokens_per_row,
        group.window_tokens,
        group.restart_tokens,
    )


ranges = st.tuples(st.integers(0, 80), st.integers(1, 60)).map(lambda r: TokenRange(r[0], sum(r)))


@given(group=groups(), tokens=ranges)
def test_rows_are_those_whose_page_is_still_read(group: LayoutGroup, tokens: TokenRange) -> None:
    """Token by token: whole rows only, and all of a page that the next token reads any of."""
    assert list(kept_rows(group, tokens)) == reach_of(group).rows_read(tokens.first, tokens.end)


@given(
    kind=st.just(GroupKind.FULL),
    tokens_per_row=st.sampled_from([1, 4, 128]),
    cuts=st.lists(st.integers(1, 500), min_size=1, max_size=6),
)
def test_chunks_of_full_groups_tile(kind: GroupKind, tokens_per_row: int, cuts: list[int]) -> None:
    """Every whole row is in exactly one chunk, wherever the chunks are cut."""
    full = group(kind, 8 * tokens_per_row, tokens_per_row)
    ends = sorted(set(cuts))
    rows = [
        row
        for first, end in zip([0, *ends], ends, strict=False)
        for row in kept_rows(full, TokenRange(first, end))
    ]
    assert rows == list(range(ends[-1] // tokens_per_row))


@given(group=groups(), chunk=st.integers(1, 30), num_chunks=st.integers(1, 8))
def test_what_a_boundary_needs_is_in_the_chunks_before_it(
    group: LayoutGroup, chunk: int, num_chunks: int
) -> None:
    """Each chunk keeps its own tail only, yet no boundary misses a row."""
    chunk *= group.tokens_per_page
    end = chunk * num_chunks
    stored = {
        row
        for index in range(num_chunks)
        for row in kept_rows(group, TokenRange(index * chunk, (index + 1) * chunk))
    }
    needed = {
        token // group.tokens_per_row for token in range(end) if reach_of(group).reads(token, end)
    }
    assert needed <= stored


@pytest.mark.parametrize(
    ("kept", "of_group", "tokens"),
    [
        # DeepSeek-V4 on Ascend, block size 128, a chunk of 1024 tokens.
        (range(256, 512), group(GroupKind.FULL, 512, 4), TokenRange(1024, 2048)),
        (range(8, 16), group(GroupKind.FULL, 16384, 128), TokenRange(1024, 2048)),
        (range(1920, 2048), group(GroupKind.WINDOW, 128, 1, 128), TokenRange(1024, 2048)),
        (range(2040, 2048), group(GroupKind.WINDOW, 8, 1, 8), TokenRange(1024, 2048)),
        (range(0), group(GroupKind.WINDOW, 32, 1, 128, 128), TokenRange(1024, 2048)),
        (range(1920, 2000), group(GroupKind.WINDOW, 32, 1, 128, 128), TokenRange(1024, 2000)),
        # A window that ends within a page keeps the page that it begins in, whole.
        (range(1792, 2000), group(GroupKind.WINDOW, 128, 1, 128), TokenRange(1024, 2000)),
        # A window larger than the chunk.
        (range(1024, 2048), group(GroupKind.WINDOW, 16, 1, 4096), TokenRange(1024, 2048)),
        # Mamba: the one state at the end.
        (range(3, 4), group(GroupKind.STATE, 512, 512), TokenRange(1024, 2048)),
    ],
)
def test_kept_rows(kept: range, of_group: LayoutGroup, tokens: TokenRange) -> None:
    assert kept_rows(of_group, tokens) == kept


@given(group=groups(), tokens=ranges)
def test_needed_rows_are_those_whose_page_is_still_read(
    group: LayoutGroup, tokens: TokenRange
) -> None:
    """Token by token, and a row that the range does not fill is one of them."""
    expected = reach_of(group).rows_needed(tokens.first, tokens.end)
    assert list(needed_rows(group, tokens)) == expected


@given(group=groups(), tokens=ranges)
def test_what_a_store_keeps_is_what_a_resume_needs(group: LayoutGroup, tokens: TokenRange) -> None:
    """Where the range ends with a row."""
    end = tokens.end + -tokens.end % group.tokens_per_row
    tokens = TokenRange(tokens.first, end)
    assert kept_rows(group, tokens) == needed_rows(group, tokens)


def test_skipped_states_keep_nothing() -> None:
    compressor = group(GroupKind.WINDOW, 8, 1, 8, holds_states=True)
    for state in (group(GroupKind.STATE, 512, 512), compressor):
        assert not kept_rows(state, TokenRange(0, 1000), StatePolicy.SKIP)
        assert not needed_rows(state, TokenRange(0, 1000), StatePolicy.SKIP)


def test_skipping_states_leaves_the_other_groups_alone() -> None:
    window = group(GroupKind.WINDOW, 8, 1, 8)
    assert kept_rows(window, TokenRange(0, 64), StatePolicy.SKIP) == range(56, 64)


def test_dense_rows_keep_all() -> None:
    assert dense_rows(group(GroupKind.WINDOW, 8, 2, 8), TokenRange(10, 65)) == range(5, 32)


@pytest.mark.parametrize("bounds", [(3, 3), (4, 3), (-1, 3)])
def test_a_range_has_tokens(bounds: tuple[int, int]) -> None:
    with pytest.raises(TokenRangeError, match="token range"):
        TokenRange(*bounds)
