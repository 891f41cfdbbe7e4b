# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint gives way when blocks are needed.

A checkpoint is worth the tokens that it saves, per block that it takes, times the uses
to expect of it. Its worth decays: by half while `HALF_LIFE` pools are cached. The least worthy
gives way. Because all decay alike, the order of two checkpoints changes only when one
of them is used, and a heap holds it. (Worth per size with aging is the idea of GreedyDual-Size, Cao
and Irani 1997; there the clock jumps with what is evicted, so that the dear ages the cheap.)

Knows no pool and changes no checkpoint but for its place in the order.
"""

from __future__ import annotations

import heapq
import math

from vllm_ascend_kvext.retention.checkpoints import Checkpoint, TailCounts, alive
from vllm_ascend_kvext.retention.reasons import UseRates

HALF_LIFE = 0.3
"""In pools cached for checkpoints. Not in pools allocated: where states take a block every few
tokens and drop it at once, many pools are allocated while little is cached. And not in pools
evicted: nothing would age until the pool is full."""

_LOOK_AGAIN_AFTER = 1 / 64
_NEXT_TO_NOTHING = 1e-6


class EvictionOrder:
    """The checkpoints that have a tail, least worthy first.

    Args:
        rates: What is known of the usefulness of checkpoints.
        tail_counts: Which blocks of a tail are no other's.

    Attributes:
        clock: Blocks cached for checkpoints since the start, in pools.
    """

    def __init__(self, rates: UseRates, tail_counts: TailCounts) -> None:
        self._rates = rates
        self._tail_counts = tail_counts
        self._heap: list[tuple[float, int, Checkpoint]] = []
        # Entries of checkpoints that requests hold: looked at every now and then only.
        self._held: list[tuple[float, int, Checkpoint]] = []
        self._look_again_at = 0.0
        self._num_entries = 0
        self._num_valid = 0
        self.clock = 0.0

    def advance(self, num_pools: float) -> None:
        """So much of the pool has been cached."""
        self.clock += num_pools

    def renew(self, node: Checkpoint) -> None:
        """A checkpoint is new, or has been of use."""
        node.clock = self.clock
        self.update(node)

    def update(self, node: Checkpoint) -> None:
        """What a checkpoint is worth has changed."""
        self._num_entries += 1
        node.entry = self._num_entries
        heapq.heappush(self._heap, (self._priority(node), node.entry, node))
        if len(self._heap) > 4 * self._num_valid + 64:
            self._heap[:] = [e for e in self._heap if e[1] == e[2].entry and e[2].tail]
            self._num_valid = len(self._heap)
            heapq.heapify(self._heap)

    def pop(self) -> Checkpoint | None:
        """Take the least worthy checkpoint whose tail no request holds; None if there is none."""
        if self.clock >= self._look_again_at:
            self._look_at_held_again()
        node = self._pop_idle()
        if node is None and self._held:
            self._look_at_held_again()
            node = self._pop_idle()
        return node

    def _pop_idle(self) -> Checkpoint | None:
        heap = self._heap
        while heap:
            priority, entry, node = heapq.heappop(heap)
            if node.entry != entry or not node.tail:
                continue
            if len(alive(node.tail)) < len(node.tail):
                return node  # the pool took a block of it: nothing can resume there
            if any(block.ref_cnt for block, _ in node.tail):
                self._held.append((priority, entry, node))
                continue
            current = self._priority(node)
            if current > priority and heap and current > heap[0][0]:
                # Its worth has grown since, for example with the loss of the one before it.
                self.update(node)
                continue
            return node
        return None

    def _look_at_held_again(self) -> None:
        held = [node for _, entry, node in self._held if node.entry == entry and node.tail]
        self._held.clear()
        for node in held:
            self.renew(node)  # it was of use until a moment ago
        self._look_again_at = self.clock + _LOOK_AGAIN_AFTER

    def clear(self) -> None:
        self._heap.clear()
        self._held.clear()

    def _priority(self, node: Checkpoint) -> float:
        """The logarithm of its decayed worth, in half-lives."""
        worth = self._rates.expected_uses(node.reason) * self._saved_per_block(node)
        return node.clock + HALF_LIFE * math.log2(max(worth, _NEXT_TO_NOTHING))

    def _saved_per_block(self, node: Checkpoint) -> float:
        """Tokens that a use saves per block that the checkpoint takes."""
        num_blocks = self._tail_counts.share(node.tail)
        ancestor = node.parent
        if not (node.children or node.pins):
            # Full-attention blocks go along, up to a boundary that something else needs.
            num_blocks += node.num_run_blocks
            while not (ancestor.is_root or ancestor.tail or ancestor.pins):
                if len(ancestor.children) > 1:
                    break
                num_blocks += ancestor.num_run_blocks
                ancestor = ancestor.parent
        while not (ancestor.is_root or ancestor.tail):
            ancestor = ancestor.parent
        return (node.boundary_tokens - ancestor.boundary_tokens) / max(1, num_blocks)
