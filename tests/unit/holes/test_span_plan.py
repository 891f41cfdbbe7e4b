# SPDX-License-Identifier: Apache-2.0
"""Span plans: by hand, and against brute force over what else might be computed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_ascend_kvext.holes.errors import HoleError
from vllm_ascend_kvext.holes.span_plan import Run, SpanPlan, plan_spans, union

UNIT_TOKENS = 4


class Cached(NamedTuple):
    """What is cached of a prompt; see ``plan_spans``."""

    rows: list[Run]
    starts: list[int] | None = None


def cached(*rows: tuple[int, int], starts: list[int] | None = None) -> Cached:
    return Cached([Run(*run) for run in rows], starts)


def plan(num_tokens: int, found: Cached, least_run_tokens: int = 0) -> SpanPlan:
    return plan_spans(num_tokens, UNIT_TOKENS, *found, least_run_tokens)


def computed(num_tokens: int, found: Cached, least_run_tokens: int = 0) -> list[list[int]]:
    return [list(run) for run in plan(num_tokens, found, least_run_tokens).computed]


def test_only_holes_and_the_end_are_computed() -> None:
    found = cached((0, 40), (48, 80), (84, 100))
    assert computed(103, found) == [[40, 48], [80, 84], [100, 103]]


def test_what_is_saved_lies_behind_the_first_computed_span() -> None:
    found = plan(103, cached((0, 40), (48, 80), (84, 100)))
    assert found.cached == (Run(0, 40), Run(48, 80), Run(84, 100))
    assert (found.computed_tokens, found.saved_tokens) == (8 + 4 + 3, 32 + 16)


@pytest.mark.parametrize(("num_tokens", "first"), [(41, 40), (40, 36), (39, 36), (4, 0), (1, 0)])
def test_last_token_is_computed(num_tokens: int, first: int) -> None:
    assert computed(num_tokens, cached((0, 40))) == [[first, num_tokens]]


@pytest.mark.parametrize("starts", [None, [], [8]])
def test_nothing_cached_is_all_computed(starts: list[int] | None) -> None:
    assert computed(50, cached(starts=starts)) == [[0, 50]]


def test_hole_at_the_beginning() -> None:
    assert computed(50, cached((8, 48))) == [[0, 8], [48, 50]]
    assert computed(50, cached((8, 48), starts=[48])) == [[0, 8], [48, 50]]


def test_spans_begin_and_end_at_units() -> None:
    assert computed(50, cached((0, 21), (25, 50))) == [[20, 28], [48, 50]]


def test_short_run_is_computed_with_the_hole() -> None:
    found = cached((0, 20), (24, 32), (36, 60))
    assert computed(62, found, least_run_tokens=8) == [[20, 24], [32, 36], [60, 62]]
    assert computed(62, found, least_run_tokens=9) == [[20, 36], [60, 62]]


def test_prefix_is_read_however_short_it_is() -> None:
    assert computed(30, cached((0, 4)), least_run_tokens=1000) == [[4, 30]]


def test_span_begins_where_windows_are_cached() -> None:
    rows = (0, 40), (48, 100)
    assert computed(102, cached(*rows, starts=[40, 100])) == [[40, 48], [100, 102]]
    assert computed(102, cached(*rows, starts=[24, 88])) == [[24, 48], [88, 102]]
    assert computed(102, cached(*rows, starts=[100])) == [[0, 48], [100, 102]]


def test_span_without_windows_goes_on_from_the_one_before_it() -> None:
    rows = (0, 40), (48, 100)
    assert computed(102, cached(*rows, starts=[40])) == [[40, 102]]
    assert computed(102, cached(*rows, starts=[40, 44])) == [[40, 102]]
    assert computed(102, cached(*rows, starts=[40, 48])) == [[40, 102]]


def test_windows_behind_a_hole_do_not_help_it() -> None:
    assert computed(62, cached((0, 40), (48, 60), starts=[44, 60])) == [[0, 48], [60, 62]]


@pytest.mark.parametrize(("num_tokens", "unit_tokens"), [(0, 4), (4, 0)])
def test_no_tokens_and_no_unit_are_refused(num_tokens: int, unit_tokens: int) -> None:
    with pytest.raises(HoleError, match=f"found num_tokens={num_tokens}"):
        plan_spans(num_tokens, unit_tokens, [])


# Brute force.

MOST_UNITS = 9


def runs_of(is_there: Sequence[bool]) -> list[Run]:
    edges = [False, *is_there, False]
    changes = [i for i, (before, after) in enumerate(pairwise(edges)) if before != after]
    return [
        Run(first * UNIT_TOKENS, end * UNIT_TOKENS)
        for first, end in zip(changes[::2], changes[1::2], strict=True)
    ]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, Cached]:
    num_units = draw(st.integers(1, MOST_UNITS))
    num_tokens = num_units * UNIT_TOKENS - draw(st.integers(0, UNIT_TOKENS - 1))
    is_there = draw(st.lists(st.booleans(), min_size=num_units, max_size=num_units))
    starts = None
    if draw(st.booleans()):
        units = draw(st.sets(st.integers(1, num_units), max_size=4))
        starts = [unit * UNIT_TOKENS for unit in sorted(units)]
    return num_tokens, Cached(runs_of(is_there), starts)


def is_right(num_tokens: int, spans: Sequence[Run], found: Cached) -> bool:
    """Whether every computed token finds all that it reads: cached, or computed before it."""
    done = {token for run in spans for token in range(*run)}
    there = {token for run in found.rows for token in range(*run)} | done
    return num_tokens - 1 in done and all(
        there.issuperset(range(span.first_tokens))
        and (not span.first_tokens or found.starts is None or span.first_tokens in found.starts)
        for span in spans
    )


def least_computed_tokens(num_tokens: int, found: Cached) -> int:
    num_units = -(-num_tokens // UNIT_TOKENS)
    best = num_tokens
    for bits in range(1 << num_units):
        is_computed = [bool(bits >> unit & 1) for unit in range(num_units)]
        spans = [
            Run(run.first_tokens, min(run.end_tokens, num_tokens)) for run in runs_of(is_computed)
        ]
        tokens = sum(run.num_tokens for run in spans)
        if tokens < best and is_right(num_tokens, spans, found):
            best = tokens
    return best


@given(prompts())
@settings(max_examples=300, deadline=None)
def test_no_plan_computes_less(prompt: tuple[int, Cached]) -> None:
    num_tokens, found = prompt
    spans = plan(num_tokens, found)
    assert is_right(num_tokens, spans.computed, found)
    assert all(one.end_tokens < other.first_tokens for one, other in pairwise(spans.computed))
    assert spans.computed_tokens == least_computed_tokens(num_tokens, found)


@given(prompts(), st.integers(0, 30))
@settings(max_examples=300, deadline=None)
def test_plans_without_short_runs_are_right(
    prompt: tuple[int, Cached], least_run_tokens: int
) -> None:
    num_tokens, found = prompt
    spans = plan(num_tokens, found, least_run_tokens)
    assert is_right(num_tokens, spans.computed, found)
    behind = [run for run in spans.cached if run.first_tokens]
    assert all(run.num_tokens >= least_run_tokens for run in behind)
    # No more than is computed by a prompt that stops at the first missing token.
    assert spans.computed[0].first_tokens == plan(num_tokens, found).computed[0].first_tokens


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=8))
def test_union_has_the_same_tokens_in_runs_that_do_not_touch(runs: list[tuple[int, int]]) -> None:
    runs = [Run(first, first + length) for first, length in runs]
    united = union(runs)
    assert all(run.end_tokens < following.first_tokens for run, following in pairwise(united))
    assert tokens_of(united) == tokens_of(runs)


def tokens_of(runs: Sequence[Run]) -> set[int]:
    return {token for run in runs for token in range(*run)}
