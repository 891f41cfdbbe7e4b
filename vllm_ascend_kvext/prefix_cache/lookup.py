# SPDX-License-Identifier: Apache-2.0
"""The longest hit of all groups together: what vLLM's coordinators find, in fewer probes.

Every group accepts a length or offers a shorter one; the hit is the longest length that all of
them accept. Knows no pool and no request: a table, hashes, and what the groups are like.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.common_hit import common_hit_tokens
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.prefix_cache.search import (
    Get,
    blocks_at,
    leading_blocks,
    state_end,
    upper_bound_blocks,
    window_end,
    window_hit_blocks,
)

Hit = tuple[Any, ...]
"""Blocks per group id, the tokens of the hit, and since vLLM 0.30 how many more a group has."""


@dataclass(frozen=True, slots=True)
class LookupGroups:
    """Groups with one spec, of kind `FULL`, `WINDOW` or `STATE`, which are looked up as one.

    Attributes:
        unit_blocks: A hit is a multiple of this many blocks.
        window_blocks: Blocks that a window reaches back.
        use_eagle: Whether one block past the hit has to be cached too (EAGLE, MTP).
        margin_tokens: How far past a length it may be searched for.
        keys: Keys of each group, in the order of ``group_ids``.
    """

    kind: GroupKind
    block_tokens: int
    unit_blocks: int
    window_blocks: int
    use_eagle: bool
    margin_tokens: int
    group_ids: tuple[int, ...]
    keys: tuple[GroupKeys, ...]

    def blocks_within(self, hashes: Sequence[bytes], max_tokens: int) -> int:
        """Full blocks in ``max_tokens`` tokens, as far as there are hashes."""
        return min(max_tokens // self.block_tokens, len(hashes) // self.keys[0].hashes_per_block)

    def hit(
        self, get: Get, hashes: Sequence[bytes], max_tokens: int, drops_block: bool, null: Any
    ) -> list[list[Any]]:
        """The blocks of the longest hit up to ``max_tokens``, per group.

        With ``drops_block``, the last block found is not part of the hit. ``null`` stands for
        blocks that the hit does not need.
        """
        if self.kind is GroupKind.FULL:
            found = leading_blocks(get, self.keys, hashes, self.blocks_within(hashes, max_tokens))
            count = len(found[0])
            if drops_block and count:
                count -= 1
            count = count // self.unit_blocks * self.unit_blocks
            for blocks in found:
                del blocks[count:]
            return found
        count = self.hit_blocks(get, hashes, max_tokens, drops_block)
        return self.sparse_blocks(get, hashes, count, drops_block, null)

    def hit_blocks(
        self, get: Get, hashes: Sequence[bytes], max_tokens: int, drops_block: bool
    ) -> int:
        """The length of that hit in blocks, for groups that do not read all of it."""
        max_blocks = self.blocks_within(hashes, max_tokens)
        if self.kind is GroupKind.STATE:
            return state_end(get, self.keys, hashes, max_blocks, self.unit_blocks)
        ahead = int(drops_block)
        need = self._need_blocks(drops_block)
        end = window_end(get, self.keys, hashes, max_blocks, need, self.unit_blocks, ahead)
        return window_hit_blocks(end, need, self.unit_blocks, ahead)

    def sparse_blocks(
        self, get: Get, hashes: Sequence[bytes], count: int, drops_block: bool, null: Any
    ) -> list[list[Any]]:
        """The blocks of a hit of ``count`` blocks, nulls included, per group."""
        if not count:
            return [[] for _ in self.group_ids]
        if self.kind is GroupKind.STATE:
            first = count - 1
        else:
            first = max(0, count - self._need_blocks(drops_block) + int(drops_block))
        found = blocks_at(get, self.keys, hashes, range(first, count))
        return [[null] * first + blocks for blocks in found] if first else found

    def _need_blocks(self, drops_block: bool) -> int:
        return max(1, self.window_blocks + int(drops_block))


@dataclass(frozen=True, slots=True)
class Lookup:
    """All groups of a model, in upstream's order: those that read everything come first.

    Attributes:
        null: Stands for blocks that the hit does not need.
        finds_junctions: Whether what one group has beyond the hit is counted (since vLLM 0.30).
        cheapest_first: All groups, first the one that reads everything, then the others by the
            cost of a key; empty where upstream's order has to be kept.
    """

    groups: tuple[LookupGroups, ...]
    num_groups: int
    null: Any
    finds_junctions: bool
    cheapest_first: tuple[LookupGroups, ...]

    @classmethod
    def of(cls, groups: Sequence[LookupGroups], null: Any, finds_junctions: bool) -> Lookup:
        num_groups = sum(len(group.group_ids) for group in groups)
        cheapest_first: tuple[LookupGroups, ...] = ()
        num_full = sum(group.kind is GroupKind.FULL for group in groups)
        use_eagle = any(group.use_eagle for group in groups)
        if num_full == 1 and groups[0].kind is GroupKind.FULL and not use_eagle:
            sparse = sorted(groups[1:], key=lambda group: group.keys[0].hashes_per_block)
            if sparse:
                cheapest_first = (groups[0], *sparse)
        return cls(tuple(groups), num_groups, null, finds_junctions, cheapest_first)

    def longest_hit(self, get: Get, hashes: Sequence[bytes], max_tokens: int) -> Hit:
        """The longest hit up to ``max_tokens``."""
        find = self._sparse_groups_first if self.cheapest_first else self._in_upstream_order
        blocks, hit_tokens, longest_tokens = find(get, hashes, max_tokens)
        if self.finds_junctions:
            return blocks, hit_tokens, longest_tokens - hit_tokens
        return blocks, hit_tokens

    def _sparse_groups_first(
        self, get: Get, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[Any], ...], int, int]:
        """Without a block ahead the longest common hit does not depend on the order.

        The group that reads everything is the expensive one; it is read once, and only as far as
        the others hit, unless it is to be known how far it goes.
        """
        full, *sparse = self.cheapest_first
        result: list[list[Any]] = [[] for _ in range(self.num_groups)]
        if max_tokens < full.block_tokens or get(full.keys[0].at(hashes, 0)) is None:
            return tuple(result), 0, 0
        bound = full.blocks_within(hashes, max_tokens)
        found = leading_blocks(get, full.keys, hashes, bound if self.finds_junctions else 0)
        bound = len(found[0]) or upper_bound_blocks(get, full.keys[0], hashes, bound)
        max_tokens = min(max_tokens, bound * full.block_tokens)
        longest_blocks = len(found[0]) // full.unit_blocks * full.unit_blocks
        hit_tokens = 0
        while max_tokens:
            hit_tokens = _common_tokens(sparse, get, hashes, max_tokens)
            max_blocks = hit_tokens // full.block_tokens
            if len(found[0]) < max_blocks:
                found = leading_blocks(get, full.keys, hashes, max_blocks)
            if len(found[0]) >= max_blocks:
                break
            max_tokens = len(found[0]) // full.unit_blocks * full.unit_blocks * full.block_tokens
            hit_tokens = 0
        if hit_tokens:
            for group_id, blocks in zip(full.group_ids, found, strict=True):
                result[group_id] = blocks[: hit_tokens // full.block_tokens]
            for group in sparse:
                count = hit_tokens // group.block_tokens
                columns = group.sparse_blocks(get, hashes, count, False, self.null)
                for group_id, blocks in zip(group.group_ids, columns, strict=True):
                    result[group_id] = blocks
        return tuple(result), hit_tokens, longest_blocks * full.block_tokens

    def _in_upstream_order(
        self, get: Get, hashes: Sequence[bytes], max_tokens: int
    ) -> tuple[tuple[list[Any], ...], int, int]:
        """As upstream does: it matters in which order groups that look ahead are asked."""
        groups = self.groups
        result: list[list[Any]] = [[] for _ in range(self.num_groups)]
        longest_tokens = 0

        def find(index: int, max_tokens: int, drops_block: bool) -> int:
            nonlocal longest_tokens
            group = groups[index]
            columns = group.hit(get, hashes, max_tokens, drops_block, self.null)
            for group_id, blocks in zip(group.group_ids, columns, strict=True):
                result[group_id] = blocks
            found_tokens = len(columns[0]) * group.block_tokens
            longest_tokens = max(longest_tokens, found_tokens)
            return found_tokens

        hit_tokens = common_hit_tokens(groups, max_tokens, find)
        for group in groups if self.finds_junctions else groups[:1]:  # Before 0.30, a defect.
            if group.kind is GroupKind.FULL:
                for group_id in group.group_ids:
                    del result[group_id][hit_tokens // group.block_tokens :]
        return tuple(result), hit_tokens, longest_tokens


def _common_tokens(
    groups: Sequence[LookupGroups], get: Get, hashes: Sequence[bytes], max_tokens: int
) -> int:
    """The longest hit of groups that do not look ahead."""
    tokens = max_tokens
    accepted: list[int | None] = [None] * len(groups)
    while tokens and any(length != tokens for length in accepted):
        for index, group in enumerate(groups):
            if accepted[index] != tokens:
                blocks = group.hit_blocks(get, hashes, tokens, False)
                tokens = accepted[index] = blocks * group.block_tokens
            if not tokens:
                break
    return tokens
