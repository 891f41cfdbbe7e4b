# SPDX-License-Identifier: Apache-2.0
"""Span plans: by hand, and against brute force over what else might be computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.holes.errors import HoleError
from vllm_ascend_kvext.holes.span_plan import CachedRows, Run, SpanPlan, plan_spans

UNIT_TOKENS = 4


def full(*runs: tuple[int, int]) -> CachedRows:
    return CachedRows(GroupKind.FULL, [Run(*run) for run in runs])


def window(window_tokens: int, *runs: tuple[int, int]) -> CachedRows:
    return CachedRows(GroupKind.WINDOW, [Run(*run) for run in runs], window_tokens)


def chunked(chunk_tokens: int, *runs: tuple[int, int]) -> CachedRows:
    return CachedRows(GroupKind.CHUNKED, [Run(*run) for run in runs], chunk_tokens)


def computed(num_tokens: int, *groups: CachedRows, least_run_tokens: int = 0) -> list[list[int]]:
    return [list(run) for run in plan(num_tokens, groups, least_run_tokens).computed]


def plan(num_tokens: int, groups: Sequence[CachedRows], least_run_tokens: int = 0) -> SpanPlan:
    return plan_spans(num_tokens, UNIT_TOKENS, groups, least_run_tokens)


def test_only_holes_and_the_end_are_computed() -> None:
    rows = full((0, 40), (48, 80), (84, 100))
    assert computed(103, rows) == [[40, 48], [80, 84], [100, 103]]


def test_what_is_saved_lies_behind_the_first_computed_span() -> None:
    found = plan(103, [full((0, 40), (48, 80), (84, 100))])
    assert found.cached == (Run(0, 40), Run(48, 80), Run(84, 100))
    assert (found.computed_tokens, found.saved_tokens) == (8 + 4 + 3, 32 + 16)


@pytest.mark.parametrize(("num_tokens", "first"), [(41, 40), (40, 36), (39, 36), (4, 0), (1, 0)])
def test_last_token_is_computed(num_tokens: int, first: int) -> None:
    assert computed(num_tokens, full((0, 40))) == [[first, num_tokens]]


def test_nothing_cached_is_all_computed() -> None:
    assert computed(50, full(), window(8)) == [[0, 50]]


def test_hole_at_the_beginning() -> None:
    assert computed(50, full((8, 48))) == [[0, 8], [48, 50]]


def test_spans_begin_and_end_at_units() -> None:
    assert computed(50, full((0, 21), (25, 50))) == [[20, 28], [48, 50]]


def test_rows_have_to_be_there_in_all_full_groups() -> None:
    assert computed(50, full((0, 20), (28, 48)), full((0, 32), (36, 44))) == [
        [20, 28],
        [32, 36],
        [44, 50],
    ]


def test_short_run_is_computed_with_the_hole() -> None:
    rows = full((0, 20), (24, 32), (36, 60))
    assert computed(62, rows, least_run_tokens=8) == [[20, 24], [32, 36], [60, 62]]
    assert computed(62, rows, least_run_tokens=9) == [[20, 36], [60, 62]]


def test_prefix_is_read_however_short_it_is() -> None:
    assert computed(30, full((0, 4)), least_run_tokens=1000) == [[4, 30]]


def test_span_begins_where_its_window_is_there() -> None:
    rows = full((0, 40), (48, 100))
    # The window of 9 tokens reads the 8 before a token.
    assert computed(102, rows, window(9, (0, 40), (92, 100))) == [[40, 48], [100, 102]]
    assert computed(102, rows, window(9, (0, 40), (96, 100))) == [[40, 102]]
    assert computed(102, rows, window(9, (0, 40), (80, 90))) == [[40, 48], [88, 102]]


def test_span_reads_the_window_that_an_earlier_span_has_computed() -> None:
    rows = full((0, 40), (48, 52), (56, 60))
    assert computed(62, rows, window(13, (0, 40), (48, 60))) == [[40, 48], [52, 56], [60, 62]]
    assert computed(62, rows, window(13, (0, 40), (52, 60))) == [[40, 56], [60, 62]]


def test_window_before_the_first_token_needs_nothing() -> None:
    assert computed(30, full((0, 28)), window(100, (4, 28))) == [[0, 30]]
    assert computed(30, full((0, 28)), window(100, (0, 28))) == [[28, 30]]


def test_attention_chunk_is_read_from_its_beginning() -> None:
    rows = full((0, 60))
    assert computed(62, rows, chunked(16, (48, 60))) == [[60, 62]]
    assert computed(62, rows, chunked(16, (0, 48), (52, 60))) == [[48, 62]]
    assert computed(62, rows, chunked(16)) == [[48, 62]]


def test_groups_that_read_something_else_are_refused() -> None:
    for kind, window_tokens in (
        (GroupKind.STATE, 0),
        (GroupKind.OTHER, 8),
        (GroupKind.WINDOW, 0),
        (GroupKind.FULL, 8),
    ):
        with pytest.raises(HoleError, match="found kind"):
            CachedRows(kind, [], window_tokens)


@pytest.mark.parametrize(("num_tokens", "unit_tokens"), [(0, 4), (4, 0)])
def test_no_tokens_and_no_unit_are_refused(num_tokens: int, unit_tokens: int) -> None:
    with pytest.raises(HoleError, match=f"found num_tokens={num_tokens}"):
        plan_spans(num_tokens, unit_tokens, [full()])


# Brute force.

MOST_UNITS = 9


def runs_of(is_there: Sequence[bool]) -> list[Run]:
    edges = [False, *is_there, False]
    changes = [i for i, (before, after) in enumerate(pairwise(edges)) if before != after]
    return [Run(first, end) for first, end in zip(changes[::2], changes[1::2], strict=True)]


def scaled(runs: Sequence[Run], unit_tokens: int) -> list[Run]:
    return [Run(first * unit_tokens, end * unit_tokens) for first, end in runs]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, list[CachedRows]]:
    num_units = draw(st.integers(1, MOST_UNITS))
    num_tokens = num_units * UNIT_TOKENS - draw(st.integers(0, UNIT_TOKENS - 1))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from([GroupKind.FULL, GroupKind.WINDOW, GroupKind.CHUNKED]))
        is_there = draw(st.lists(st.booleans(), min_size=num_units, max_size=num_units))
        window_tokens = 0
        if kind is GroupKind.WINDOW:
            window_tokens = draw(st.integers(1, 20))
        elif kind is GroupKind.CHUNKED:
            window_tokens = UNIT_TOKENS * draw(st.integers(1, 4))
        groups.append(CachedRows(kind, scaled(runs_of(is_there), UNIT_TOKENS), window_tokens))
    return num_tokens, groups


def tokens_of(runs: Sequence[Run]) -> set[int]:
    return {token for run in runs for token in range(*run)}


def is_right(num_tokens: int, spans: Sequence[Run], groups: Sequence[CachedRows]) -> bool:
    """Whether every computed token finds all that it reads: cached, or computed."""
    done = tokens_of(spans)
    if num_tokens - 1 not in done:
        return False
    for group in groups:
        there = tokens_of(group.runs) | done
        for token in done:
            match group.kind:
                case GroupKind.FULL:
                    read = range(token)
                case GroupKind.WINDOW:
                    read = range(max(0, token - group.window_tokens + 1), token)
                case _:
                    read = range(token - token % group.window_tokens, token)
            if not there.issuperset(read):
                return False
    return True


def least_computed_tokens(num_tokens: int, groups: Sequence[CachedRows]) -> int:
    num_units = -(-num_tokens // UNIT_TOKENS)
    best = num_tokens
    for bits in range(1 << num_units):
        is_computed = [bool(bits >> unit & 1) for unit in range(num_units)]
        spans = [
            Run(first, min(end, num_tokens))
            for first, end in scaled(runs_of(is_computed), UNIT_TOKENS)
        ]
        tokens = sum(run.num_tokens for run in spans)
        if tokens < best and is_right(num_tokens, spans, groups):
            best = tokens
    return best


@given(prompts())
@settings(max_examples=400, deadline=None)
def test_plans_are_right_and_no_span_can_begin_later(
    prompt: tuple[int, list[CachedRows]],
) -> None:
    num_tokens, groups = prompt
    found = plan(num_tokens, groups).computed
    assert is_right(num_tokens, found, groups)
    assert all(one.end_tokens < other.first_tokens for one, other in pairwise(found))
    for number, span in enumerate(found):
        for first_tokens in range(span.first_tokens + UNIT_TOKENS, span.end_tokens, UNIT_TOKENS):
            later = [*found[:number], Run(first_tokens, span.end_tokens), *found[number + 1 :]]
            assert not is_right(num_tokens, later, groups)


@given(prompts())
@settings(max_examples=200, deadline=None)
def test_no_plan_computes_less_where_all_is_full_attention(
    prompt: tuple[int, list[CachedRows]],
) -> None:
    num_tokens, groups = prompt
    groups = [group for group in groups if group.kind is GroupKind.FULL]
    found = plan(num_tokens, groups)
    assert found.computed_tokens == least_computed_tokens(num_tokens, groups)


@given(prompts(), st.integers(0, 30))
@settings(max_examples=200, deadline=None)
def test_plans_without_short_runs_are_right(
    prompt: tuple[int, list[CachedRows]], least_run_tokens: int
) -> None:
    num_tokens, groups = prompt
    found = plan(num_tokens, groups, least_run_tokens)
    assert is_right(num_tokens, found.computed, groups)
    behind = [run for run in found.cached if run.first_tokens]
    assert all(run.num_tokens >= least_run_tokens for run in behind)
    # No more than is computed by a prompt that stops at the first missing token.
    assert found.computed[0].first_tokens == plan(num_tokens, groups).computed[0].first_tokens
