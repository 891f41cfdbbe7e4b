# SPDX-License-Identifier: Apache-2.0
"""What a failed load reaches, and what it does not."""

from __future__ import annotations

from vllm_ascend_kvext.prefix_cache.failed_blocks import Holder, Reach, reach_of


def test_the_request_that_loads_it_and_all_that_it_has_made() -> None:
    holders = [Holder("a", {1, 2}, {3, 4}), Holder("b", {1, 2}, {5})]
    assert reach_of({3}, holders) == Reach(frozenset({"a"}), frozenset({3, 4}))


def test_what_it_has_hit_is_left_alone() -> None:
    assert not reach_of({3}, [Holder("a", {1, 2}, {3})]).block_ids & {1, 2}


def test_whoever_hits_it_and_whoever_hits_what_came_of_it() -> None:
    holders = [
        Holder("third", {6}, {7}),
        Holder("second", {4}, {5, 6}),
        Holder("first", set(), {3, 4}),
        Holder("other", {1}, {8}),
    ]
    reach = reach_of({3}, holders)
    assert reach.request_ids == {"first", "second", "third"}
    assert reach.block_ids == {3, 4, 5, 6, 7}


def test_a_request_that_is_named_is_reached_whatever_it_holds() -> None:
    reach = reach_of((), [Holder("a", {1}, {2}), Holder("b", {2}, {3})], {"a"})
    assert reach == Reach(frozenset({"a", "b"}), frozenset({2, 3}))


def test_a_block_that_nobody_holds_must_not_be_hit_either() -> None:
    assert reach_of({9}, [Holder("a", {1}, {2})]) == Reach(frozenset(), frozenset({9}))


def test_every_admission_of_a_request_counts() -> None:
    holders = [Holder("a", set(), {1, 2}), Holder("a", set(), {3})]
    assert reach_of({1}, holders) == Reach(frozenset({"a"}), frozenset({1, 2}))
