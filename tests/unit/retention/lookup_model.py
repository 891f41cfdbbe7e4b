# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small brute-force model of vLLM's prefix-cache lookup: sets of cached block indices.

This is the oracle for `HitGeometry` and for `Lookup`. It searches block by block.
"""

from __future__ import annotations

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.geometry import GroupGeometry

Cached = list[set[int]]
"""The indices of cached blocks, per group."""


def everything(groups: tuple[GroupGeometry, ...], num_tokens: int) -> Cached:
    return [set(range(num_tokens // group.block_tokens)) for group in groups]


def find_in_group(
    group: GroupGeometry, cached: set[int], max_tokens: int, unit_tokens: int, drop: bool
) -> int:
    """The number of blocks that the group's own lookup returns."""
    num_blocks = max_tokens // group.block_tokens

    def aligned(blocks: int) -> bool:
        return blocks * group.block_tokens % unit_tokens == 0

    if group.kind is GroupKind.FULL:
        found = 0
        while found < num_blocks and found in cached:
            found += 1
        found -= bool(drop and found)
    elif group.kind is GroupKind.STATE:
        ends = [i + 1 for i in range(num_blocks) if i in cached and aligned(i + 1)]
        return max(ends, default=0)
    else:
        need = -(-(group.window_tokens - 1) // group.block_tokens) + drop
        found = matched = 0
        for i in reversed(range(num_blocks)):
            if i not in cached:
                matched = 0
                continue
            if matched == 0 and not aligned(i + (not drop)):
                continue
            matched += 1
            if matched >= need:
                found = i + matched
                break
        else:
            found = matched
            while not aligned(found) and group.block_tokens != unit_tokens:
                found -= 1
        found -= bool(drop and found)
    while not aligned(found):
        found -= 1
    return found


def look_up(
    groups: tuple[GroupGeometry, ...], cached: Cached, limit_tokens: int, unit_tokens: int
) -> int:
    """The tokens that a lookup limited to ``limit_tokens`` hits."""
    return hit_and_longest(groups, cached, limit_tokens, unit_tokens)[0]


def hit_and_longest(
    groups: tuple[GroupGeometry, ...], cached: Cached, limit_tokens: int, unit_tokens: int
) -> tuple[int, int]:
    """The hit tokens of a lookup, and the longest hit that some group offers on the way to it."""
    hit, longest, verified, done = limit_tokens, 0, set(), set()
    while True:
        candidate = hit
        for index, group in enumerate(groups):
            if index in done:
                candidate = candidate // group.block_tokens * group.block_tokens
                continue
            ahead = group.use_eagle and index not in verified
            bound = min(candidate + group.margin_tokens, limit_tokens) if ahead else candidate
            drop = ahead and group.kind is not GroupKind.STATE
            found = find_in_group(group, cached[index], bound, unit_tokens, drop)
            found_tokens = found * group.block_tokens
            if ahead:
                verified.add(index)
            elif found_tokens < candidate:
                verified.clear()
            candidate = found_tokens
            longest = max(longest, candidate)
            if group.kind is GroupKind.FULL:
                done.add(index)
        if candidate >= hit:
            return hit, longest
        hit = candidate
        if len(groups) == 2 and groups[0].kind is GroupKind.FULL:
            return hit, longest
