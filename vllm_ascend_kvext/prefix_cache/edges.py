# SPDX-License-Identifier: Apache-2.0
"""Up to which number of tokens a step of a running request changes no block of it.

Knows lengths only. An edge is the smallest number of tokens at which something happens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupEdges:
    """When one group of a running request needs attention.

    Attributes:
        block_tokens: Tokens per block.
        window_tokens: The sliding window; 0 where nothing is ever skipped.
        unit_tokens: Blocks are cached up to multiples of it; 1 for every block that is full.
        looks_ahead: Whether the block past such a multiple is cached with it.
    """

    block_tokens: int
    window_tokens: int
    unit_tokens: int
    looks_ahead: bool

    def next_slot_tokens(self, num_blocks: int) -> int:
        """The smallest number of tokens for which ``num_blocks`` blocks are too few."""
        return num_blocks * self.block_tokens + 1

    def num_skipped_blocks(self, computed_tokens: int) -> int:
        """How many blocks lie before the window once so many tokens are computed."""
        if not self.window_tokens:
            return 0
        return max(0, computed_tokens - self.window_tokens + 1) // self.block_tokens

    def next_skip_tokens(self, num_skipped_blocks: int) -> int:
        """The smallest number of computed tokens at which one block more leaves the window."""
        return (num_skipped_blocks + 1) * self.block_tokens + self.window_tokens - 1

    def next_cache_tokens(self, num_cached_blocks: int) -> int:
        """The smallest number of tokens at which one block more is cached."""
        target = (num_cached_blocks + 1) * self.block_tokens
        unit = self.unit_tokens
        if not self.looks_ahead:
            return -(-target // unit) * unit
        return max(target, -(-(target - self.block_tokens) // unit) * unit, unit)
