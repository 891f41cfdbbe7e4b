# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Keeps pages from being reallocated while a transfer reads them or is going to read them.

To the pool, a referenced block is like a block that another request holds. It is not reallocated
when its own request is preempted, moves its window on, or ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from vllm_ascend_kvext.upstream_types import BlockPool

MAX_REFERENCED_SHARE = 0.75
"""The largest share of the pool's blocks that planned and begun stores may hold."""


class BlockReferences:
    """The references that the connector holds. A block that is referenced twice counts twice.

    Args:
        give_way: Releases some references that can be done without. Returns whether there were any.

    Attributes:
        num_references: The number of references.
        new_ids: The ids of the blocks that were allocated in this step. The connector clears the
            list once per step.
    """

    def __init__(self, pool: BlockPool, give_way: Callable[[], bool] = lambda: False) -> None:
        self._pool = pool
        self._give_way = give_way
        self.num_references = 0
        self.new_ids: list[int] = []

    @property
    def num_free(self) -> int:
        """The number of blocks of the pool that are free."""
        return self._pool.get_num_free_blocks()

    def make_free(self, num_blocks: int) -> bool:
        """Whether so many blocks are free, after others have given way if necessary."""
        while self.num_free < num_blocks:
            if not self._give_way():
                return False
        return True

    def take(self, blocks: Sequence[Any]) -> None:
        """Hold blocks. None of them is null."""
        self._pool.touch(blocks)
        self.num_references += len(blocks)

    def allocate(self, num_blocks: int) -> Iterator[Any] | None:
        """Allocate new blocks, and hold them like `take`. If too few are free, None is returned."""
        if not self.make_free(num_blocks):
            return None
        blocks = self._pool.get_new_blocks(num_blocks)
        self.num_references += num_blocks
        self.new_ids += [block.block_id for block in blocks]
        return iter(blocks)

    def release(self, blocks: Sequence[Any]) -> None:
        """Release blocks that `take` has held."""
        # The last blocks are freed first, as upstream does for a request.
        self._pool.free_blocks(reversed(blocks))
        self.num_references -= len(blocks)
