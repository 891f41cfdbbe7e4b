# SPDX-License-Identifier: Apache-2.0
"""`HitGeometry` against a lookup that searches block by block."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unit.retention.cache_model import Cached, everything, look_up

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE

LAYOUTS: dict[str, tuple[list[tuple[GroupKind, int, int, int]], int]] = {
    # (kind, block_tokens, window_tokens, margin_tokens) per group, and the unit
    "one full, one window": ([(FULL, 4, 0, 4), (WINDOW, 4, 9, 4)], 4),
    "window of four blocks": ([(FULL, 4, 0, 4), (WINDOW, 4, 13, 4)], 4),
    "three block sizes": ([(FULL, 8, 0, 8), (WINDOW, 4, 7, 4), (WINDOW, 2, 5, 2)], 8),
    "window wider than the unit": ([(FULL, 8, 0, 8), (WINDOW, 2, 23, 2)], 8),
    "two wide windows": ([(FULL, 8, 0, 8), (WINDOW, 2, 19, 2), (WINDOW, 4, 30, 4)], 8),
    "window only": ([(WINDOW, 4, 11, 4)], 4),
    "full only": ([(FULL, 4, 0, 4)], 4),
    "window of one token": ([(FULL, 4, 0, 4), (WINDOW, 2, 1, 2)], 4),
    "with a state group": ([(FULL, 4, 0, 4), (WINDOW, 4, 9, 4), (STATE, 8, 0, 0)], 8),
    "compressed, margin in rows": (
        [(FULL, 16, 0, 4), (FULL, 32, 0, 4), (WINDOW, 4, 4, 4), (WINDOW, 2, 3, 2)],
        32,
    ),
}


def _geometries() -> Iterator[object]:
    for name, (groups, unit_tokens) in LAYOUTS.items():
        for flags in itertools.product((False, True), repeat=len(groups)):
            ahead = "".join(str(i) for i, flag in enumerate(flags) if flag) or "none"
            yield pytest.param(
                HitGeometry(
                    tuple(
                        GroupGeometry(kind, block, window, flag, margin)
                        for (kind, block, window, margin), flag in zip(groups, flags, strict=True)
                    ),
                    unit_tokens,
                ),
                id=f"{name}, ahead: {ahead}",
            )


GEOMETRIES = list(_geometries())


def kept(geometry: HitGeometry, boundary_tokens: int, num_tokens: int) -> Cached:
    """A cache that holds what one boundary needs, of a request of ``num_tokens`` tokens."""
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


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_what_a_full_cache_hits_is_reached_and_one_tail_hits_it(geometry: HitGeometry) -> None:
    unit_tokens = geometry.unit_tokens
    for limit in range(9 * unit_tokens):
        boundary = geometry.reachable_tokens(limit)
        cached = everything(geometry.groups, limit)
        assert boundary == look_up(geometry.groups, cached, limit, unit_tokens), limit
        cached = kept(geometry, boundary, limit)
        for lookup_limit in {limit, limit + 1, limit + 3 * unit_tokens}:
            hit = look_up(geometry.groups, cached, lookup_limit, unit_tokens)
            assert hit == boundary, f"{limit} tokens cached, lookup of {lookup_limit}"


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_no_block_of_a_steady_tail_is_spare(geometry: HitGeometry) -> None:
    """Beyond the first window, taking any block out of a tail loses the hit."""
    unit_tokens = geometry.unit_tokens
    boundary = geometry.reachable_tokens(12 * unit_tokens)
    limit = geometry.opens_at_tokens(boundary)
    for index, tail in enumerate(geometry.tails(boundary)):
        if geometry.groups[index].window_tokens == 1:
            continue  # upstream asks for a window of no blocks, and takes any
        for block in tail:
            cached = kept(geometry, boundary, limit)
            cached[index].remove(block)
            assert look_up(geometry.groups, cached, limit, unit_tokens) < boundary


@pytest.mark.parametrize("geometry", GEOMETRIES)
def test_opens_at_the_smallest_limit(geometry: HitGeometry) -> None:
    for boundary in range(geometry.unit_tokens, 9 * geometry.unit_tokens, geometry.unit_tokens):
        limit = geometry.opens_at_tokens(boundary)
        assert geometry.reachable_tokens(limit) >= boundary
        assert geometry.reachable_tokens(limit - 1) < boundary


@st.composite
def random_geometry(draw: st.DrawFn) -> HitGeometry:
    unit_tokens = draw(st.sampled_from([4, 8, 12]))
    divisors = [d for d in range(1, unit_tokens + 1) if unit_tokens % d == 0]
    groups = [
        GroupGeometry(FULL, draw(st.sampled_from(divisors)), 0, draw(st.booleans()))
        for _ in range(draw(st.integers(0, 2)))
    ]
    groups += [
        GroupGeometry(
            WINDOW,
            draw(st.sampled_from(divisors)),
            draw(st.integers(2, 3 * unit_tokens)),
            draw(st.booleans()),
        )
        for _ in range(draw(st.integers(1, 3)))
    ]
    with_margin = tuple(
        GroupGeometry(g.kind, g.block_tokens, g.window_tokens, g.use_eagle, g.block_tokens)
        for g in groups
    )
    return HitGeometry(with_margin, unit_tokens)


@settings(max_examples=300)
@given(geometry=random_geometry(), units=st.integers(0, 12), rest=st.integers(0, 11))
def test_any_geometry(geometry: HitGeometry, units: int, rest: int) -> None:
    limit = units * geometry.unit_tokens + rest
    cached = everything(geometry.groups, limit)
    boundary = look_up(geometry.groups, cached, limit, geometry.unit_tokens)
    assert geometry.reachable_tokens(limit) == boundary
    sparse = kept(geometry, boundary, limit)
    assert look_up(geometry.groups, sparse, limit, geometry.unit_tokens) == boundary


def test_only_windows_shorter_than_the_boundary_are_not_clipped() -> None:
    group = GroupGeometry(GroupKind.WINDOW, block_tokens=4, window_tokens=20)
    assert group.is_clipped(16, unit_tokens=16)
    assert not group.is_clipped(32, unit_tokens=16)
    assert not group.is_clipped(4, unit_tokens=4)
