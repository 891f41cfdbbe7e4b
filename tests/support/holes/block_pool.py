# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A small pool, and the blocks of holes. The model has windows, or has none."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from vllm_ascend_kvext.holes.hole_blocks import HoleBlocks

PAGE_TOKENS = 4
WINDOW_PAGES = 2
GROUP = 1
"""The KV cache group with windows."""


class Block(NamedTuple):
    block_id: int


class BlockPool:
    """Hands out blocks by number, and takes them back."""

    def __init__(self) -> None:
        self.free = [Block(number) for number in range(1, 21)]

    @property
    def num_free(self) -> int:
        return len(self.free)

    def allocate(self, num_blocks: int) -> Iterator[Block] | None:
        if num_blocks > len(self.free):
            return None
        taken, self.free = self.free[:num_blocks], self.free[num_blocks:]
        return iter(taken)

    def take(self, blocks: list[Block]) -> None:
        self.free = [block for block in self.free if block not in blocks]

    def release(self, blocks: list[Block]) -> None:
        assert not set(blocks) & set(self.free)
        self.free = [*self.free, *blocks]


def window_blocks(pool: BlockPool) -> HoleBlocks:
    def pages(boundary_tokens: int) -> dict[int, tuple[int, int]]:
        end_page = -(-boundary_tokens // PAGE_TOKENS)
        return {GROUP: (max(0, end_page - WINDOW_PAGES), end_page)}

    return HoleBlocks(pool, pages, {0: PAGE_TOKENS, GROUP: PAGE_TOKENS})


def no_windows(pool: BlockPool, tokens_per_page: dict[int, int]) -> HoleBlocks:
    return HoleBlocks(pool, lambda _: {}, tokens_per_page)
