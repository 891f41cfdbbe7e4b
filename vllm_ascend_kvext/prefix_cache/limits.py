# SPDX-License-Identifier: Apache-2.0
"""Up to which number of tokens a step of a running request changes no block of it.

Knows lengths only. A limit is the smallest number of tokens at which something happens: a block
more is needed (with 3 blocks of 10 tokens, at 31), leaves the window, or is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

NEVER_TOKENS = 1 << 62


@dataclass(frozen=True, slots=True)
class GroupLimits:
    """When one group of a running request needs attention.

    Attributes:
        block_tokens: Tokens per block.
        window_tokens: The sliding window; 0 where nothing is ever skipped. A state is read where
            the last computed token left it, which is where a window of 2 tokens reads.
        unit_tokens: Blocks are cached up to multiples of it; 1 for every block that is full.
        use_eagle: Whether the block past such a multiple is cached with it.
        row_tokens: Tokens that share one row of a block; more than 1 in compressed groups, which
            hold a row only once all its tokens are there.
        draft_blocks: Blocks held beyond those of the tokens: states behind draft tokens.
    """

    block_tokens: int
    window_tokens: int
    unit_tokens: int
    use_eagle: bool
    row_tokens: int = 1
    draft_blocks: int = 0

    def num_blocks(self, slot_tokens: int) -> int:
        """How many blocks so many tokens need."""
        full_rows_tokens = slot_tokens // self.row_tokens * self.row_tokens
        return -(-full_rows_tokens // self.block_tokens) + self.draft_blocks

    def next_slot_tokens(self, num_blocks: int) -> int:
        """The smallest number of tokens for which ``num_blocks`` blocks are too few."""
        return (num_blocks - self.draft_blocks) * self.block_tokens + self.row_tokens

    def num_skipped_blocks(self, computed_tokens: int) -> int:
        """How many blocks lie before the window, if there is one, of the next token."""
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
    """Where the next thing happens to a running request, per group and at all, in tokens.

    Every number is a lower bound. It holds for as long as the request has the block table for
    which it was computed: a table is given up when a request is freed, by whomever.
    """

    table: object
    slot_tokens: list[int]
    skip_tokens: list[int]
    next_cache_tokens: int
    next_slot_tokens: int = 0
    next_skip_tokens: int = 0
    until_tokens: int = 0

    def update(self) -> None:
        """Take in what was changed for single groups."""
        self.next_slot_tokens = min(self.slot_tokens)
        self.next_skip_tokens = min(self.skip_tokens)
        self.until_tokens = min(
            self.next_slot_tokens, self.next_skip_tokens, self.next_cache_tokens
        )
