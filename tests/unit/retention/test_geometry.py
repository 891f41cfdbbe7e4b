# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""`HitGeometry`, compared with a lookup that searches block by block."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from support.sample import sampled
from unit.retention.lookup_model import Cached, everything, look_up

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE


@st.composite
def geometries(draw: st.DrawFn) -> HitGeometry:
    unit_tokens = draw(st.sampled_from([4, 8, 12]))
    divisors = [d for d in range(1, unit_tokens + 1) if unit_tokens % d == 0]

    def group(kind: GroupKind, window_tokens: int = 0) -> GroupGeometry:
        block_tokens = draw(st.sampled_from(divisors))
        use_eagle = kind is not STATE and draw(st.booleans())
        margin_tokens = block_tokens
        # On Ascend, the margin counts rows, and a compressed group has fewer rows.
        if kind is FULL:
            margin_tokens = draw(st.sampled_from([d for d in divisors if block_tokens % d == 0]))
        return GroupGeometry(kind, block_tokens, window_tokens, use_eagle, margin_tokens)

    num_full, num_windows, num_states = draw(
        st.tuples(st.integers(0, 2), st.integers(0, 3), st.integers(0, 1)).filter(any)
    )
    groups = [group(FULL) for _ in range(num_full)]
    for _ in range(num_windows):
        groups.append(group(WINDOW, draw(st.integers(1, 3 * unit_tokens))))
    groups += [group(STATE) for _ in range(num_states)]
    return HitGeometry(tuple(groups), unit_tokens)


def kept(geometry: HitGeometry, boundary_tokens: int, num_tokens: int) -> Cached:
    """A cache with the blocks that a boundary needs. The request has ``num_tokens`` tokens."""
    full_tokens = geometry.full_tokens(boundary_tokens)
    tails = geometry.tails(boundary_tokens)
    cached: Cached = []
    for index, group in enumerate(geometry.groups):
        blocks = set(range(num_tokens // group.block_tokens))
        if group.kind is FULL:
            blocks &= set(range(full_tokens[index] // group.block_tokens))
        elif group.kind is WINDOW:
            blocks &= set(tails[index])
        cached.append(blocks)
    return cached


@settings(max_examples=sampled(1000))
@given(geometry=geometries(), units=st.integers(0, 12), rest=st.integers(0, 11))
def test_what_a_full_cache_hits_is_reached_and_one_tail_hits_it(
    geometry: HitGeometry, units: int, rest: int
) -> None:
    unit_tokens = geometry.unit_tokens
    limit = units * unit_tokens + rest
    boundary = geometry.reachable_tokens(limit)
    cached = everything(geometry.groups, limit)
    assert boundary == look_up(geometry.groups, cached, limit, unit_tokens)
    cached = kept(geometry, boundary, limit)
    for lookup_limit in (limit, limit + 1, limit + 3 * unit_tokens):
        assert look_up(geometry.groups, cached, lookup_limit, unit_tokens) == boundary


@settings(max_examples=sampled(200))
@given(geometry=geometries())
def test_no_block_of_a_steady_tail_is_spare(geometry: HitGeometry) -> None:
    """Behind the first window, a tail loses its hit if any of its blocks is removed."""
    unit_tokens = geometry.unit_tokens
    boundary = geometry.reachable_tokens(12 * unit_tokens)
    limit = geometry.opens_at_tokens(boundary)
    for index, tail in enumerate(geometry.tails(boundary)):
        if geometry.groups[index].window_tokens == 1:
            # Upstream looks for a window of no blocks, which every cache has.
            continue
        for block in tail:
            cached = kept(geometry, boundary, limit)
            cached[index].remove(block)
            assert look_up(geometry.groups, cached, limit, unit_tokens) < boundary


@settings(max_examples=sampled(200))
@given(geometry=geometries(), units=st.integers(1, 9))
def test_opens_at_the_smallest_limit(geometry: HitGeometry, units: int) -> None:
    boundary = units * geometry.unit_tokens
    limit = geometry.opens_at_tokens(boundary)
    assert geometry.reachable_tokens(limit) >= boundary > geometry.reachable_tokens(limit - 1)


def test_only_windows_shorter_than_the_boundary_are_not_clipped() -> None:
    group = GroupGeometry(WINDOW, block_tokens=4, window_tokens=20)
    assert group.is_clipped(16, unit_tokens=16)
    assert not group.is_clipped(32, unit_tokens=16)
    assert not group.is_clipped(4, unit_tokens=4)
