# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Plans that continue behind missing tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.store.small_tier import SmallTier, pin
from unit.store.tier_model import TextPrefix

from vllm_ascend_kvext.holes.behind_holes import plan_behind_holes, plan_spans
from vllm_ascend_kvext.holes.load_plan import LoadPlan, plan_of_hit
from vllm_ascend_kvext.store.entries import Piece
from vllm_ascend_kvext.token_range import TokenRange, union, without

PROMPT = "abcdefghijklmnopqrstuvwxyz" * 5
NUM_CHUNKS = 10

Ranges = list[tuple[int, int]]


def plan_of(
    pieces: Ranges,
    tails: Sequence[int] | None = None,
    after_tokens: int = 0,
    num_tokens: int = 48,
    min_run_tokens: int = 0,
) -> tuple[SmallTier, LoadPlan]:
    """The plan for a prompt of ``num_tokens`` tokens. Only a model with windows has ``tails``."""
    tier = SmallTier(needs_tails=tails is not None)
    for piece in pieces:
        tier.store(PROMPT, Piece.rows(*piece))
    for boundary in tails or ():
        tier.store(PROMPT, Piece.tails(boundary))
    hit = tier.look_up(TextPrefix(PROMPT), num_tokens - 1, after_tokens)
    return tier, plan_behind_holes(tier, hit, num_tokens, min_run_tokens) or plan_of_hit(hit)


GAP = [(0, 12), (24, 36), (36, 48)]
PLANS = {
    # The pieces, the tails and other arguments, then the boundary, the holes and the loaded tokens.
    "behind a hole": (GAP, None, {}, 46, [(12, 24)], GAP),
    "the device ends in a hole": (
        *([(12, 24), (36, 48)], None, {"after_tokens": 4}),
        *(46, [(4, 12), (24, 36)], [(12, 24), (36, 48)]),
    ),
    "the device has it": ([(24, 36)], None, {"after_tokens": 24}, 36, [], [(24, 36)]),
    "the device ends within a unit": ([(12, 24)], None, {"after_tokens": 3}, 3, [], []),
    "a run that is long enough": (
        *([(0, 12), (20, 24), (36, 48)], None, {"min_run_tokens": 4}),
        *(46, [(12, 20), (24, 36)], [(0, 12), (20, 24), (36, 48)]),
    ),
    "a run that is too short": (
        *([(0, 12), (20, 24), (36, 48)], None, {"min_run_tokens": 6}),
        *(46, [(12, 36)], [(0, 12), (36, 48)]),
    ),
    "nothing behind it": ([(0, 12)], None, {}, 12, [], [(0, 12)]),
    "the last token is computed": (
        *([(12, 24)], None, {"num_tokens": 24}),
        *(22, [(0, 12)], [(12, 24)]),
    ),
    "a hole at the first token needs no tails": (
        *([(12, 24), (24, 36)], [30], {}),
        *(30, [(0, 12)], [(12, 24), (24, 36), (30, 30)]),
    ),
    "a hole begins at the last tails": (
        *([(0, 12), (12, 24), (36, 48)], [8, 46], {}),
        *(46, [(8, 36)], [(0, 12), (36, 48), (8, 8), (46, 46)]),
    ),
    "no tails behind it": (GAP, [8], {}, 8, [], [(0, 12), (8, 8)]),
    "no tails where the device ends": (GAP, [46], {"after_tokens": 12}, 12, [], []),
    "tails where the device ends": (
        *(GAP, [12, 46], {"after_tokens": 12}),
        *(46, [(12, 24)], [(24, 36), (36, 48), (12, 12), (46, 46)]),
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_plan_goes_on_behind_holes(name: str) -> None:
    pieces, tails, others, boundary_tokens, holes, loaded = PLANS[name]
    tier, plan = plan_of(pieces, tails, **others)
    assert (plan.boundary_tokens, list(plan.holes)) == (boundary_tokens, holes)
    assert [entry.piece[1:] for entry in plan.entries] == loaded
    assert {hole.first_tokens for hole in plan.holes} - {0} <= {*plan.tails} or not tails
    assert plan.hole_tokens + plan.loaded_tokens == plan.num_tokens
    load = pin(tier, plan, tier.next_use())
    assert load is not None
    assert load.entries == plan.entries


# The computed tokens are compared with all other choices.

UNIT_TOKENS = 4
MAX_UNITS = 9


class Cached(NamedTuple):
    """The cached part of a prompt; see ``plan_spans``."""

    rows: list[TokenRange]
    starts: list[int] | None = None


def runs_of(is_there: Sequence[bool]) -> list[TokenRange]:
    edges = [False, *is_there, False]
    changes = [i for i, (before, after) in enumerate(pairwise(edges)) if before != after]
    return [
        TokenRange(first * UNIT_TOKENS, end * UNIT_TOKENS)
        for first, end in zip(changes[::2], changes[1::2], strict=True)
    ]


@st.composite
def prompts(draw: st.DrawFn) -> tuple[int, Cached]:
    num_units = draw(st.integers(1, MAX_UNITS))
    num_tokens = num_units * UNIT_TOKENS - draw(st.integers(0, UNIT_TOKENS - 1))
    is_there = draw(st.lists(st.booleans(), min_size=num_units - 1, max_size=num_units - 1))
    starts = None
    if draw(st.booleans()):
        units = draw(st.sets(st.integers(1, num_units), max_size=4))
        starts = [unit * UNIT_TOKENS for unit in sorted(units)]
    return num_tokens, Cached(runs_of(is_there), starts)


def tokens_of(runs: Sequence[TokenRange]) -> set[int]:
    return {token for run in runs for token in range(*run)}


def is_right(num_tokens: int, spans: Sequence[TokenRange], found: Cached) -> bool:
    """Whether all that each computed token reads is cached, or was computed before it."""
    done = tokens_of(spans)
    there = tokens_of(found.rows) | done
    return num_tokens - 1 in done and all(
        there.issuperset(range(span.first_tokens))
        and (not span.first_tokens or found.starts is None or span.first_tokens in found.starts)
        for span in spans
    )


def min_computed_tokens(num_tokens: int, found: Cached) -> int:
    num_units = -(-num_tokens // UNIT_TOKENS)
    best = num_tokens
    for bits in range(1 << num_units):
        spans = [
            TokenRange(run.first_tokens, min(run.end_tokens, num_tokens))
            for run in runs_of([bool(bits >> unit & 1) for unit in range(num_units)])
        ]
        tokens = sum(run.num_tokens for run in spans)
        if tokens < best and is_right(num_tokens, spans, found):
            best = tokens
    return best


@given(prompts(), st.integers(0, 30))
@settings(max_examples=300)
def test_no_plan_computes_less_unless_runs_are_short(
    prompt: tuple[int, Cached], min_run_tokens: int
) -> None:
    num_tokens, found = prompt
    least = plan_spans(num_tokens, *found)
    assert sum(run.num_tokens for run in least) == min_computed_tokens(num_tokens, found)
    spans = plan_spans(num_tokens, *found, min_run_tokens)
    behind = [run for run in without([TokenRange(0, num_tokens)], spans) if run.first_tokens]
    assert all(run.num_tokens >= min_run_tokens for run in behind)
    # A plan that stops at the first missing token does not compute less.
    assert spans[0].first_tokens == least[0].first_tokens
    for plan in (least, spans):
        assert is_right(num_tokens, plan, found)
        assert all(one.end_tokens < other.first_tokens for one, other in pairwise(plan))


RUNS = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), max_size=8).map(
    lambda runs: [TokenRange(first, first + length) for first, length in runs]
)


@given(RUNS, RUNS)
def test_runs_are_united_and_cut_as_sets_of_tokens(
    some: list[TokenRange], others: list[TokenRange]
) -> None:
    some_united, others_united = union(some), union(others)
    assert all(run.end_tokens < later.first_tokens for run, later in pairwise(some_united))
    assert tokens_of(some_united) == tokens_of(some)
    left = without(some_united, others_united)
    assert tokens_of(left) == tokens_of(some) - tokens_of(others)
