# SPDX-License-Identifier: Apache-2.0
"""The rule by which groups agree on one hit. What they find is written down in each test."""

from __future__ import annotations

from dataclasses import dataclass

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.common_hit import common_hit_tokens

FULL, WINDOW = GroupKind.FULL, GroupKind.WINDOW


@dataclass(frozen=True)
class Group:
    kind: GroupKind
    block_tokens: int = 4
    looks_ahead: bool = False
    margin_tokens: int = 4


class Cache:
    """Finds all it is asked for, cut to blocks, except what a test says; notes what was asked."""

    def __init__(self, *groups: Group, most_tokens: dict[int, int] | None = None) -> None:
        self.groups = groups
        self.most_tokens = most_tokens or {}
        self.asked: list[tuple[int, int, bool]] = []

    def find(self, index: int, max_tokens: int, drops_block: bool) -> int:
        self.asked.append((index, max_tokens, drops_block))
        block_tokens = self.groups[index].block_tokens
        found_tokens = min(max_tokens, self.most_tokens.get(index, max_tokens))
        found_tokens -= found_tokens % block_tokens
        return max(0, found_tokens - block_tokens * drops_block)

    def hit_tokens(self, max_tokens: int) -> int:
        return common_hit_tokens(self.groups, max_tokens, self.find)


def test_a_group_alone_is_asked_once() -> None:
    cache = Cache(Group(WINDOW))
    assert cache.hit_tokens(30) == 28
    assert cache.asked == [(0, 30, False)]


def test_one_group_after_one_that_reads_everything_is_asked_once() -> None:
    cache = Cache(Group(FULL), Group(WINDOW), most_tokens={1: 12})
    assert cache.hit_tokens(30) == 12
    assert cache.asked == [(0, 30, False), (1, 28, False)]


def test_groups_are_asked_until_none_offers_less() -> None:
    cache = Cache(Group(WINDOW), Group(WINDOW, block_tokens=8), most_tokens={1: 12})
    assert cache.hit_tokens(30) == 8
    assert cache.asked == [(0, 30, False), (1, 28, False), (0, 8, False), (1, 8, False)]


def test_a_group_that_reads_everything_is_searched_once_and_then_cut() -> None:
    cache = Cache(Group(FULL, block_tokens=8), Group(WINDOW), Group(WINDOW), most_tokens={2: 20})
    assert cache.hit_tokens(30) == 16
    assert [index for index, *_ in cache.asked] == [0, 1, 2, 1, 2, 1, 2]


def test_a_group_that_looks_ahead_may_search_past_the_length_but_not_past_the_end() -> None:
    cache = Cache(Group(WINDOW), Group(WINDOW, looks_ahead=True), most_tokens={0: 16})
    assert cache.hit_tokens(30) == 16
    assert (1, 20, True) in cache.asked
    cache = Cache(Group(WINDOW), Group(WINDOW, looks_ahead=True))
    assert cache.hit_tokens(30) == 24
    assert (1, 30, True) in cache.asked


def test_it_drops_a_block_once_more_after_another_group_has_shortened_the_hit() -> None:
    ahead, plain = Group(WINDOW, looks_ahead=True), Group(WINDOW)
    cache = Cache(ahead, plain, most_tokens={1: 12})
    assert cache.hit_tokens(30) == 12
    assert cache.asked == [(0, 30, True), (1, 24, False), (0, 16, True), (1, 12, False)]
