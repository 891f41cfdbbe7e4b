# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The longest hit of all groups together: what vLLM's coordinators find, in fewer probes.

Every group accepts a length or offers a shorter one. The hit is the longest length that all of them
accept. The module knows no pool and no request, only a table, hashes and descriptions of groups.
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
    window_end,
    window_hit_blocks,
)

Hit = tuple[Any, ...]
"""The blocks by group id, and the tokens of the hit. Since vLLM 0.30, a third part says by how many
tokens the longest hit of a single group is longer."""


@dataclass(frozen=True, slots=True)
class LookupGroups:
    """Groups with one spec, of kind `FULL`, `WINDOW` or `STATE`, which are looked up as one.

    Attributes:
        unit_blocks: A hit is a multiple of this many blocks.
        window_blocks: Blocks that a window reaches back.
        use_eagle: Whether one block past the hit has to be cached too (EAGLE, MTP).
        margin_tokens: How far past a length the lookup may search.
        keys: The keys of each group, in the order of ``group_ids``.
    """

    kind: GroupKind
    block_tokens: int
    unit_blocks: int
    window_blocks: int
    use_eagle: bool
    margin_tokens: int
    group_ids: tuple[int, ...]
    keys: tuple[GroupKeys, ...]

    def hit(
        self, get: Get, hashes: Sequence[bytes], max_tokens: int, drops_block: bool, null: Any
    ) -> list[list[Any]]:
        """The blocks of the longest hit up to ``max_tokens``, per group.

        With ``drops_block``, the last block found is not part of the hit. ``null`` stands for
        blocks that the hit does not need.
        """
        max_blocks = min(
            max_tokens // self.block_tokens, len(hashes) // self.keys[0].hashes_per_block
        )
        ahead = int(drops_block)
        if self.kind is GroupKind.FULL:
            found = leading_blocks(get, self.keys, hashes, max_blocks)
            count = max(0, len(found[0]) - ahead) // self.unit_blocks * self.unit_blocks
            for blocks in found:
                del blocks[count:]
            return found
        if self.kind is GroupKind.STATE:
            count = state_end(get, self.keys, hashes, max_blocks, self.unit_blocks)
            first = count - 1
        else:
            need = max(1, self.window_blocks + ahead)
            end = window_end(get, self.keys, hashes, max_blocks, need, self.unit_blocks, ahead)
            count = window_hit_blocks(end, need, self.unit_blocks, ahead)
            first = count - need + ahead
        first = max(0, first)
        found = blocks_at(get, self.keys, hashes, range(first, count))
        return [[null] * first + blocks for blocks in found]


@dataclass(frozen=True, slots=True)
class Lookup:
    """All groups of a model, in upstream's order: groups that read everything come first.

    Attributes:
        num_groups: The number of group ids, including groups whose blocks are never cached.
        null: Stands for blocks that the hit does not need.
        finds_junctions: Whether the tokens that some group has beyond the hit are counted, as vLLM
            does since 0.30.
    """

    groups: Sequence[LookupGroups]
    num_groups: int
    null: Any
    finds_junctions: bool

    def longest_hit(self, get: Get, hashes: Sequence[bytes], max_tokens: int) -> Hit:
        """The longest hit up to ``max_tokens``."""
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
        # Before vLLM 0.30, upstream cuts only the first group to the hit.
        for group in groups if self.finds_junctions else groups[:1]:
            if group.kind is GroupKind.FULL:
                for group_id in group.group_ids:
                    del result[group_id][hit_tokens // group.block_tokens :]
        hit = tuple(result), hit_tokens
        return (*hit, longest_tokens - hit_tokens) if self.finds_junctions else hit
