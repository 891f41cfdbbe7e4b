# SPDX-License-Identifier: Apache-2.0
"""Keeps pages from being given to others while a transfer reads them, or a later one will.

A referenced block is to the pool as one that another request holds: it is not reallocated when its
request is preempted, moves its window on, or ends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from vllm_ascend_kvext.upstream_types import BlockPool

MAX_REFERENCED_SHARE = 0.75
"""The share of the pool's blocks that stores under way hold at most."""


class BlockReferences:
    """References that the connector holds. A block that is referenced twice counts twice.

    Attributes:
        new_ids: Of the blocks that were allocated since somebody last cleared it, once a step.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.num_references = 0
        self.new_ids: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks of the pool that nobody holds."""
        return self._pool.get_num_free_blocks()

    def take(self, blocks: Sequence[Any]) -> None:
        """Hold blocks, none of them null."""
        self._pool.touch(blocks)
        self.num_references += len(blocks)

    def allocate(self, num_blocks: int) -> Iterator[Any] | None:
        """New blocks, held as if by `take`; None, and nothing is taken, if there are too few."""
        if num_blocks > self.num_free:
            return None
        blocks = self._pool.get_new_blocks(num_blocks)
        self.num_references += num_blocks
        self.new_ids += [block.block_id for block in blocks]
        return iter(blocks)

    def release(self, blocks: Sequence[Any]) -> None:
        """Let go of blocks that `take` was called for."""
        # The end of a request goes first, as where upstream frees one.
        self._pool.free_blocks(reversed(blocks))
        self.num_references -= len(blocks)
