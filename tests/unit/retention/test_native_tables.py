# SPDX-License-Identifier: Apache-2.0
"""The compiled module reads `HitGeometry` from tables, and finds the same in them."""

from __future__ import annotations

import pytest
from unit.retention.manager_model import ModelCache
from unit.retention.test_geometry import GEOMETRIES

from vllm_ascend_kvext.retention.geometry import HitGeometry

SPARSE = [case for case in GEOMETRIES if any(g.is_sparse for g in case.values[0].groups)]
"""Adaptive retention has nothing to do where nothing is sparse."""


@pytest.mark.parametrize("geometry", SPARSE)
def test_tables_hold_the_geometry(geometry: HitGeometry) -> None:
    retention = ModelCache(geometry, 20).retention
    books = retention.books
    most_tokens = geometry.steady_tokens + geometry.lag_tokens + 5 * geometry.unit_tokens
    for limit_tokens in range(most_tokens):
        expected = geometry.reachable_tokens(limit_tokens)
        assert books.reachable_tokens(limit_tokens) == expected, limit_tokens
    num_past_steady = 0
    for tokens in range(0, most_tokens, geometry.unit_tokens):
        assert books.opens_at_tokens(tokens) == geometry.opens_at_tokens(tokens)
        for index, group in enumerate(retention.full_groups):
            expected = geometry.full_tokens(tokens)[group.geometry_index]
            assert books.full_end_tokens(index, tokens) == expected
        if not tokens:
            continue  # nobody asks for the tail of nothing
        for index, group in enumerate(retention.sparse_groups):
            tail = geometry.tails(tokens)[group.geometry_index]
            assert books.tail(index, tokens) == (tail.start, tail.stop), f"{index} at {tokens}"
        num_past_steady += tokens > geometry.steady_tokens
    assert num_past_steady > 2
