# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is: a boundary, the blocks a hit there reads, and how many need each block.

Blocks are known by their ids, in arrays: what is done to all blocks of a checkpoint is one call.
Knows neither how checkpoints come about (`CheckpointTree`) nor which gives way (`EvictionOrder`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_ascend_kvext.retention.reasons import Reason

BlockIds = npt.NDArray[np.int32]

NO_BLOCKS: BlockIds = np.empty(0, np.int32)

Runs = tuple[BlockIds, ...]
"""Consecutive blocks of one stretch of tokens: one array per full-attention group."""


def block_ids(ids: Sequence[int]) -> BlockIds:
    return np.array(ids, np.int32)


class Checkpoint:
    """A boundary of some prompts.

    Attributes:
        key: Chained hash of the prefix.
        boundary_tokens: Length of the prefix.
        parent: The boundary before it; of the empty prefix, itself.
        children: The boundaries behind it.
        runs: The full-attention blocks between the parent's boundary and this one.
        tail: Blocks of the sparse groups, and full-attention blocks past the boundary, that a hit
            reads; empty if nothing can resume here and prompts merely part ways.
        num_requests: How many running requests have resumed here, or passed here last.
        num_ahead: How many of the tail's blocks lie past the boundary in full-attention groups.
        origin: What suggested it at first.
        reason: Why it is kept.
        clock: When it was last of use, on the clock of `EvictionOrder`.
        entry: Its valid entry there.
        priority: The priority of that entry.
    """

    __slots__ = (
        "boundary_tokens",
        "children",
        "clock",
        "entry",
        "key",
        "num_ahead",
        "num_requests",
        "origin",
        "parent",
        "priority",
        "reason",
        "runs",
        "tail",
    )

    def __init__(
        self,
        key: bytes,
        boundary_tokens: int,
        parent: Checkpoint | None,
        reason: Reason,
        runs: Runs = (),
    ) -> None:
        self.key = key
        self.boundary_tokens = boundary_tokens
        self.parent: Checkpoint = self if parent is None else parent
        self.children: set[Checkpoint] = set()
        self.runs = runs
        self.tail = NO_BLOCKS
        self.num_ahead = 0
        self.num_requests = 0
        self.origin = reason.origin
        self.reason = reason
        self.clock = 0.0
        self.entry = -1
        self.priority = 0.0

    @property
    def is_root(self) -> bool:
        return self.parent is self

    @property
    def has_tail(self) -> bool:
        return len(self.tail) > 0

    @property
    def num_run_blocks(self) -> int:
        return sum(map(len, self.runs))

    def __repr__(self) -> str:
        return f"Checkpoint({self.boundary_tokens}, {self.reason}, {len(self.tail)} tail blocks)"


class BlockNeeds:
    """By block id, how many runs and tails of checkpoints a block is part of.

    Windows of neighbouring boundaries overlap, so that it is more than one for many. Every call
    takes time in proportion to the ids it is given, and to nothing else.
    """

    def __init__(self, num_blocks: int) -> None:
        self._counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self.count: Any = self._counts.data
        """Indexed by block id; reads a single count several times faster than the array."""

    def add(self, ids: BlockIds) -> BlockIds:
        """Returns those blocks that nothing needed before."""
        counts = self._counts[ids]
        self._counts[ids] = counts + 1
        new: BlockIds = ids[counts == 0]
        return new

    def remove(self, ids: BlockIds) -> BlockIds:
        """Returns those blocks that nothing needs any more."""
        counts = self._counts[ids] - 1
        self._counts[ids] = counts
        useless: BlockIds = ids[counts == 0]
        return useless

    def forget(self, block_id: int) -> None:
        """Nothing needs a block any more."""
        self.count[block_id] = 0

    def only_here(self, ids: BlockIds) -> BlockIds:
        """Those blocks that nothing else needs."""
        own: BlockIds = ids[self._counts[ids] == 1]
        return own

    def share(self, ids: BlockIds) -> float:
        """Blocks of a tail, each divided among those that need it.

        Were a block that others need counted for none of them, neighbours whose windows overlap
        would vouch for each other: each seems to cost nothing, together they cost a window.
        """
        return float((1 / self._counts[ids]).sum())

    def clear(self) -> None:
        self._counts[:] = 0
