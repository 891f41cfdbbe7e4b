# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""What a prefix-cache lookup can hit if everything is cached, and which blocks it reads for a hit.

A *boundary* is a number of tokens at which a lookup can end. The *tail* of a boundary is the run of
blocks that a sliding-window group must have cached for it. A group that *looks ahead* (EAGLE, MTP)
must match one block past the boundary, which the lookup then drops. The module knows no blocks and
no requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from vllm_ascend_kvext.groups.model import GroupKind, window_pages
from vllm_ascend_kvext.prefix_cache.common_hit import common_hit_tokens


@dataclass(frozen=True, slots=True)
class GroupGeometry:
    """One group as the lookup sees it. Groups of equal spec are looked up, and listed, as one.

    Attributes:
        kind: Decides which blocks a hit reads. The lookups of `FULL`, `WINDOW` and `STATE` are
            known. `STATE` never looks ahead. Upstream handles all other groups, and caches all
            their blocks.
        block_tokens: The tokens of one block. On Ascend, these are rows times compress ratio.
        window_tokens: The sliding window; 0 unless ``kind`` is ``WINDOW``.
        use_eagle: Whether it is an EAGLE/MTP group.
        margin_tokens: How far past a candidate length a group that looks ahead may search. Upstream
            passes ``spec.block_size``, which on Ascend counts rows.
        num_groups: The number of KV cache groups with this spec.
    """

    kind: GroupKind
    block_tokens: int
    window_tokens: int = 0
    use_eagle: bool = False
    margin_tokens: int = 0
    num_groups: int = 1

    @property
    def is_sparse(self) -> bool:
        """Whether a hit reads a tail of its blocks only."""
        return self.kind in (GroupKind.WINDOW, GroupKind.STATE)

    @property
    def is_state(self) -> bool:
        """Whether a hit reads the state at its boundary."""
        return self.kind is GroupKind.STATE

    @property
    def window_blocks(self) -> int:
        """Blocks that the window before a boundary spans, without the look-ahead block."""
        return max(1, window_pages(self.window_tokens, self.block_tokens))

    def longest_hit_tokens(self, max_tokens: int, unit_tokens: int, drop: bool) -> int:
        """The hit of this group alone, within ``max_tokens``, when all its blocks are cached.

        With ``drop``, the last matched block only looks ahead.
        """
        num_blocks = max_tokens // self.block_tokens
        if not drop:
            return _floor(num_blocks * self.block_tokens, unit_tokens)
        if num_blocks == 0:
            return 0
        boundary = _floor((num_blocks - 1) * self.block_tokens, unit_tokens)
        if self.is_clipped(boundary, unit_tokens):
            # Fewer blocks than a window match only as a prefix of the prompt. The lookup aligns
            # this prefix and then drops a block, which costs one unit more.
            return max(0, boundary - unit_tokens)
        return boundary

    def tail(self, boundary_tokens: int, unit_tokens: int) -> range:
        """Indices of the blocks that a hit at ``boundary_tokens`` reads in a window group."""
        end_block = boundary_tokens // self.block_tokens
        if self.kind is GroupKind.STATE:
            return range(end_block - 1, end_block)
        start_block = max(0, end_block - self.window_blocks)
        if self.use_eagle:
            if self.is_clipped(boundary_tokens, unit_tokens):
                end_block += unit_tokens // self.block_tokens
            end_block += 1
        return range(start_block, end_block)

    def is_clipped(self, boundary_tokens: int, unit_tokens: int) -> bool:
        """Whether the window plus look-ahead would start before the first token.

        Upstream matches such a window as a prefix of the prompt, and aligns it once more. This
        changes nothing if hits are aligned to the group's own blocks.
        """
        return (
            self.kind is GroupKind.WINDOW
            and self.block_tokens != unit_tokens
            and boundary_tokens // self.block_tokens < self.window_blocks
        )


class HitGeometry:
    """The lookup of one coordinator, for a cache that holds everything.

    Args:
        groups: In the coordinator's order of lookup: full attention first.
        unit_tokens: The granularity of its hits; a multiple of every ``block_tokens``.

    Attributes:
        step_tokens: Hits change at multiples of it.
        steady_tokens: The boundary from which on the start of the prompt clips no window. So
            everything repeats with a period of one unit.
        lag_tokens: How many tokens past a boundary a lookup has to look at, from ``steady_tokens``
            on.
    """

    def __init__(self, groups: tuple[GroupGeometry, ...], unit_tokens: int) -> None:
        self.groups = groups
        self.unit_tokens = unit_tokens
        self.has_states = any(group.kind is GroupKind.STATE for group in groups)
        self._sparse_groups = [(i, group) for i, group in enumerate(groups) if group.is_sparse]
        self._groups_ahead = [group for group in groups if group.use_eagle]
        self.use_eagle = bool(self._groups_ahead)
        self.step_tokens = math.gcd(*(group.block_tokens for group in groups))
        widest_tokens = max(group.window_blocks * group.block_tokens for group in groups)
        self.steady_tokens = _floor(widest_tokens, unit_tokens) + unit_tokens
        self._lookup = lru_cache(maxsize=4096)(self._look_up)
        self._opens_at = lru_cache(maxsize=1024)(self._find_opening)
        self._full = lru_cache(maxsize=1024)(self._find_full)
        self.lag_tokens = self._opens_at(self.steady_tokens) - self.steady_tokens

    def reachable_tokens(self, limit_tokens: int) -> int:
        """The longest hit of a lookup that may look at ``limit_tokens`` tokens."""
        steady = _floor(limit_tokens - self.lag_tokens, self.unit_tokens)
        if steady >= self.steady_tokens:
            return steady
        return self._lookup(_floor(limit_tokens, self.step_tokens))[0]

    def opens_at_tokens(self, boundary_tokens: int) -> int:
        """The smallest limit at which a lookup reaches ``boundary_tokens`` or more."""
        if boundary_tokens >= self.steady_tokens:
            return boundary_tokens + self.lag_tokens
        return self._opens_at(boundary_tokens)

    @property
    def min_prompt_tokens(self) -> int:
        """The shortest prompt that hits when it comes again.

        The prompt's last token is always computed, so the lookup looks at one token less.
        """
        return self._opens_at(1) + 1

    def is_boundary(self, boundary_tokens: int) -> bool:
        """Whether some lookup ends exactly at ``boundary_tokens``."""
        return self.reachable_tokens(self.opens_at_tokens(boundary_tokens)) == boundary_tokens

    def tails(self, boundary_tokens: int) -> tuple[range, ...]:
        """Per group, the blocks that must be cached for a hit; empty if the group is not sparse."""
        tails = [range(0)] * len(self.groups)
        if boundary_tokens <= 0:
            return tuple(tails)
        for index, group in self._sparse_groups:
            tails[index] = group.tail(boundary_tokens, self.unit_tokens)
        if any(group.is_clipped(boundary_tokens, self.unit_tokens) for group in self._groups_ahead):
            # A clipped window loses a unit, so the other groups have to accept more at first.
            read = self._lookup(self.opens_at_tokens(boundary_tokens))[1]
            for index, group in enumerate(self.groups):
                end_block = read[index] // group.block_tokens
                if group.kind is GroupKind.WINDOW and end_block > tails[index].stop:
                    tails[index] = range(tails[index].start, end_block)
        return tuple(tails)

    def full_tokens(self, boundary_tokens: int) -> tuple[int, ...]:
        """The tokens up to which each ``FULL`` group must be cached for a hit; 0 for other groups.

        The number exceeds the boundary if the group, or a group that is looked up later, looks
        ahead.
        """
        if boundary_tokens <= 0:
            return (0,) * len(self.groups)
        steady = min(boundary_tokens, self.steady_tokens)
        shift = boundary_tokens - steady
        return tuple(
            tokens + shift if group.kind is GroupKind.FULL else 0
            for group, tokens in zip(self.groups, self._full(steady), strict=True)
        )

    @property
    def num_blocks_per_unit(self) -> float:
        """Full-attention blocks that one unit of tokens takes, in all groups together."""
        return sum(
            group.num_groups * self.unit_tokens / group.block_tokens
            for group in self.groups
            if group.kind is GroupKind.FULL
        )

    @property
    def num_tail_blocks(self) -> int:
        """Blocks that the tail of one boundary takes, in all sparse groups together."""
        tails = self.tails(self.steady_tokens)
        return sum(
            group.num_groups * len(tail) for group, tail in zip(self.groups, tails, strict=True)
        )

    def _find_opening(self, boundary_tokens: int) -> int:
        low = boundary_tokens // self.step_tokens
        high = low + 2 * (len(self.groups) + 1) * self.unit_tokens // self.step_tokens
        while low < high:
            middle = (low + high) // 2
            if self._lookup(middle * self.step_tokens)[0] >= boundary_tokens:
                high = middle
            else:
                low = middle + 1
        return low * self.step_tokens

    def _find_full(self, boundary_tokens: int) -> tuple[int, ...]:
        opening = self._opens_at(boundary_tokens)
        cached = list(self._lookup(opening)[1])
        for index, group in enumerate(self.groups):
            if group.kind is not GroupKind.FULL:
                continue
            needed = boundary_tokens
            if group.use_eagle:
                needed += group.block_tokens
            if needed < cached[index]:
                trial = (*cached[:index], needed, *cached[index + 1 :])
                if self._look_up(opening, trial)[0] == boundary_tokens:
                    cached[index] = needed
        return tuple(cached)

    def _look_up(
        self, limit_tokens: int, cached_tokens: tuple[int, ...] | None = None
    ) -> tuple[int, tuple[int, ...]]:
        """The hit within ``limit_tokens``, and how far each group was read at first.

        Args:
            cached_tokens: How far each ``FULL`` group is cached; everything if omitted.
        """
        read: list[int] = []

        def find(index: int, max_tokens: int, drops_block: bool) -> int:
            group = self.groups[index]
            if cached_tokens is not None and group.kind is GroupKind.FULL:
                max_tokens = min(max_tokens, cached_tokens[index])
            # The lookup of states never drops the block that looks ahead.
            drop = drops_block and group.kind in (GroupKind.FULL, GroupKind.WINDOW)
            found_tokens = group.longest_hit_tokens(max_tokens, self.unit_tokens, drop)
            if len(read) == index:
                read.append(found_tokens + (group.block_tokens if drop else 0))
            return found_tokens

        return common_hit_tokens(self.groups, limit_tokens, find), tuple(read)


def _floor(tokens: int, multiple: int) -> int:
    return tokens // multiple * multiple
