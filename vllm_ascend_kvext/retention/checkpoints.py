# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint is: a boundary, its tails, and the full-attention blocks that lead there.

Knows neither how checkpoints come about (`CheckpointTree`) nor which gives way (`EvictionOrder`).
"""

from __future__ import annotations

from collections.abc import Iterable

from vllm_ascend_kvext.retention.protocols import Block, CachedBlock
from vllm_ascend_kvext.retention.reasons import Reason


class Checkpoint:
    """A boundary of some prompts.

    Attributes:
        key: Chained hash of the prefix.
        boundary_tokens: Length of the prefix.
        parent: The boundary before it; of the empty prefix, itself.
        children: The boundaries behind it.
        runs: Per full-attention group the blocks between the parent's boundary and this one.
        beyond: Full-attention blocks past the boundary that a lookup reads (EAGLE).
        tail: Blocks of the sparse groups; empty if it cannot be resumed from.
        origin: What suggested it at first.
        reason: Why it is kept.
        pins: Running requests that computed from here.
        clock: When it was last of use, on the clock of `EvictionOrder`.
        entry: Its valid entry there.
    """

    __slots__ = (
        "beyond",
        "boundary_tokens",
        "children",
        "clock",
        "entry",
        "key",
        "origin",
        "parent",
        "pins",
        "reason",
        "runs",
        "tail",
    )

    def __init__(
        self, key: bytes, boundary_tokens: int, parent: Checkpoint | None, reason: Reason
    ) -> None:
        self.key = key
        self.boundary_tokens = boundary_tokens
        self.parent: Checkpoint = self if parent is None else parent
        self.children: set[Checkpoint] = set()
        self.runs: tuple[list[CachedBlock], ...] = ()
        self.beyond: list[CachedBlock] = []
        self.tail: list[CachedBlock] = []
        self.origin = reason.origin
        self.reason = reason
        self.pins = 0
        self.clock = 0.0
        self.entry = -1

    @property
    def is_root(self) -> bool:
        return self.parent is self

    @property
    def is_needed(self) -> bool:
        return bool(self.tail or self.children or self.pins)

    @property
    def num_run_blocks(self) -> int:
        return sum(map(len, self.runs))

    def cut(self, boundary_tokens: int, block_tokens: Iterable[int]) -> tuple[Runs, Runs]:
        """Its runs up to a boundary that lies between its parent's and its own, and after it."""
        return cut_runs(self.runs, boundary_tokens - self.parent.boundary_tokens, block_tokens)

    def __repr__(self) -> str:
        return f"Checkpoint({self.boundary_tokens}, {self.reason}, {len(self.tail)} tail blocks)"


Runs = tuple[list[CachedBlock], ...]
"""One list of consecutive blocks per full-attention group."""


def cut_runs(runs: Runs, num_tokens: int, block_tokens: Iterable[int]) -> tuple[Runs, Runs]:
    """Split runs after a number of tokens that is a multiple of every group's block."""
    cuts = [num_tokens // tokens for tokens in block_tokens]
    before = tuple(run[:cut] for run, cut in zip(runs, cuts, strict=True))
    after = tuple(run[cut:] for run, cut in zip(runs, cuts, strict=True))
    return before, after


def alive(blocks: Iterable[CachedBlock]) -> list[Block]:
    """Those blocks that still hold what they held when they were recorded."""
    return [block for block, block_hash in blocks if block._block_hash is block_hash]


_NO_TAIL: tuple[bytes | None, int] = (None, 0)


class TailCounts:
    """How many tails each block is part of: windows of neighbouring boundaries overlap."""

    def __init__(self) -> None:
        self._counts: dict[int, tuple[bytes | None, int]] = {}

    def count(self, cached: CachedBlock) -> int:
        block, block_hash = cached
        entry = self._counts.get(block.block_id)
        return entry[1] if entry is not None and entry[0] is block_hash else 0

    def has(self, block: Block) -> bool:
        """Whether what a block holds now is part of some tail."""
        entry = self._counts.get(block.block_id)
        return entry is not None and entry[0] is block._block_hash

    def share(self, tail: Iterable[CachedBlock]) -> float:
        """Blocks of a tail, each divided among the tails that it is part of.

        Were a block that others need counted for none of them, neighbours whose windows overlap
        would vouch for each other: each seems to cost nothing, together they cost a window.
        """
        counts = self._counts
        return sum(
            [
                1 / entry[1]
                for block, block_hash in tail
                if (entry := counts.get(block.block_id, _NO_TAIL))[0] is block_hash
            ]
        )

    def add(self, tail: Iterable[CachedBlock]) -> int:
        """Returns how many of its blocks were in no tail before."""
        counts = self._counts
        num_new = 0
        for block, block_hash in tail:
            known_hash, count = counts.get(block.block_id, _NO_TAIL)
            if known_hash is block_hash:
                counts[block.block_id] = block_hash, count + 1
            else:
                counts[block.block_id] = block_hash, 1
                num_new += 1
        return num_new

    def remove(self, tail: Iterable[CachedBlock]) -> list[CachedBlock]:
        """Returns those blocks that were in this tail only."""
        counts = self._counts
        last = []
        for cached in tail:
            count = self.count(cached)
            if count > 1:
                counts[cached[0].block_id] = cached[1], count - 1
            elif count:
                del counts[cached[0].block_id]
                last.append(cached)
        return last

    def clear(self) -> None:
        self._counts.clear()
