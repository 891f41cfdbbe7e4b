# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The blocks that a failed load reaches, and those that it does not reach."""

from __future__ import annotations

import pytest

from vllm_ascend_kvext.prefix_cache.failed_blocks import Holder, reach_of

CHAIN = [
    Holder("third", {6}, {7}),
    Holder("second", {4}, {5, 6}),
    Holder("first", set(), {3, 4}),
    Holder("other", {1}, {8}),
]


@pytest.mark.parametrize(
    ("failed", "holders", "named", "requests", "blocks"),
    [
        ({3}, [Holder("a", {1, 2}, {3, 4}), Holder("b", {1, 2}, {5})], (), {"a"}, {3, 4}),
        ({3}, CHAIN, (), {"first", "second", "third"}, {3, 4, 5, 6, 7}),
        (set(), [Holder("a", {1}, {2}), Holder("b", {2}, {3})], {"a"}, {"a", "b"}, {2, 3}),
        ({9}, [Holder("a", {1}, {2})], (), set(), {9}),
        ({1}, [Holder("a", set(), {1, 2}), Holder("a", set(), {3})], (), {"a"}, {1, 2}),
    ],
    ids=["not what it has hit", "who hits it", "who is named", "nobody", "another admission"],
)
def test_reach(failed, holders, named, requests, blocks):
    assert reach_of(failed, holders, named) == (requests, blocks)
