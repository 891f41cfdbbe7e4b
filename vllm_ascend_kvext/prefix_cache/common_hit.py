# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The rule by which groups agree on one hit.

Each group accepts a length, or offers a shorter one, until all groups accept. vLLM's
``HybridKVCacheCoordinator.find_longest_cache_hit`` has the same rule. The caller says what one
group finds: blocks in a table (`prefix_cache.lookup`), or all that there could be (`geometry`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from vllm_ascend_kvext.groups.model import GroupKind


class SearchedGroup(Protocol):
    """The attributes of a group that the rule reads; see `LookupGroups` and `GroupGeometry`."""

    @property
    def kind(self) -> GroupKind: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def use_eagle(self) -> bool: ...
    @property
    def margin_tokens(self) -> int: ...


Find = Callable[[int, int, bool], int]
"""``(index, max_tokens, drops_block) -> tokens``: the tokens that group ``index`` finds.

The search is within ``max_tokens`` tokens. With ``drops_block`` the last block only looks ahead,
and does not count.
"""


def common_hit_tokens(groups: Sequence[SearchedGroup], max_tokens: int, find: Find) -> int:
    """The longest hit of all groups together, up to ``max_tokens``.

    A group that looks ahead drops a block once per length, and once more when another group has
    shortened the length. Each group is asked only once if there is one group, or if there are two
    and the first group reads everything.
    """
    looks_ahead = any(group.use_eagle for group in groups)
    is_asked_once = len(groups) == 1 or (len(groups) == 2 and groups[0].kind is GroupKind.FULL)
    has_dropped: set[int] = set()
    is_first_round = True
    hit_tokens = max_tokens
    while True:
        tokens = hit_tokens
        for index, group in enumerate(groups):
            if group.kind is GroupKind.FULL and not is_first_round:
                tokens = tokens // group.block_tokens * group.block_tokens
                continue
            drops_block = group.use_eagle and index not in has_dropped
            limit = min(tokens + group.margin_tokens, max_tokens) if drops_block else tokens
            found_tokens = find(index, limit, drops_block)
            if drops_block:
                has_dropped.add(index)
            elif found_tokens < tokens:
                has_dropped.clear()
            tokens = found_tokens
            if is_first_round and index == 0 and not (tokens or looks_ahead):
                return 0
        if tokens >= hit_tokens:
            return hit_tokens
        hit_tokens = tokens
        if is_asked_once:
            return hit_tokens
        is_first_round = False
