# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The number of tokens up to which a step of a running request changes none of its blocks.

The module knows lengths only. A limit is the smallest number of tokens at which something happens:
the request needs one more block (with 3 blocks of 10 tokens, at 31 tokens), or one more block
leaves the window, or one more block is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER_TOKENS = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """When one group of a running request needs attention.

    Attributes:
        block_tokens: Tokens per block.
        window_tokens: The sliding window; 0 if nothing is ever skipped. A group of states reads the
            block of the last computed token, as a window of 2 tokens does.
        unit_tokens: Blocks are cached up to multiples of it; 1 if every full block is cached.
        use_eagle: Whether the block past such a multiple is cached with it.
        row_tokens: Tokens that share one row of a block. Compressed groups have more than 1, and
            hold a row only when all its tokens are there.
        draft_blocks: Further blocks that are held for states behind draft tokens.
    """

    block_tokens: int
    window_tokens: int
    unit_tokens: int
    use_eagle: bool
    row_tokens: int = 1
    draft_blocks: int = 0

    def num_blocks(self, slot_tokens: int) -> int:
        """The number of blocks that ``slot_tokens`` tokens need."""
        full_rows_tokens = slot_tokens // self.row_tokens * self.row_tokens
        return -(-full_rows_tokens // self.block_tokens) + self.draft_blocks

    def next_slot_tokens(self, num_blocks: int) -> int:
        """The smallest number of tokens for which ``num_blocks`` blocks are too few."""
        return (num_blocks - self.draft_blocks) * self.block_tokens + self.row_tokens

    def num_skipped_blocks(self, computed_tokens: int) -> int:
        """The number of blocks before the next token's window. Only for groups with a window."""
        return max(0, computed_tokens - self.window_tokens + 1) // self.block_tokens

    def next_skip_tokens(self, num_skipped_blocks: int) -> int:
        """The smallest number of computed tokens at which one block more leaves the window."""
        return (num_skipped_blocks + 1) * self.block_tokens + self.window_tokens - 1

    def next_cache_tokens(self, num_cached_blocks: int) -> int:
        """The smallest number of tokens at which one block more is cached."""
        target = (num_cached_blocks + 1) * self.block_tokens
        unit = self.unit_tokens
        if not self.use_eagle:
            return -(-target // unit) * unit
        return max(target, -(-(target - self.block_tokens) // unit) * unit, unit)


@dataclass(slots=True)
class RequestLimits:
    """The numbers of tokens at which the next thing happens to a running request.

    Lists have one number per group. Every number is a lower bound, and is valid as long as the
    request has the same block table. Code that frees a request also drops the request's table.
    """

    table: object
    slot_tokens: list[int]
    skip_tokens: list[int]
    next_cache_tokens: int
    next_slot_tokens: int = 0
    next_skip_tokens: int = 0
    until_tokens: int = 0

    def update(self) -> None:
        """Update the limits of all groups after limits of single groups have changed."""
        self.next_slot_tokens = min(self.slot_tokens)
        self.next_skip_tokens = min(self.skip_tokens)
        self.until_tokens = min(
            self.next_slot_tokens, self.next_skip_tokens, self.next_cache_tokens
        )
