# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint gives way when blocks are needed.

A checkpoint is worth the tokens that it saves, per block that it takes, times the uses
to expect of it. Its worth decays: by half while `HALF_LIFE` pools are cached. The least worthy
gives way. Because all decay alike, the order of two checkpoints changes only when one
of them is used, and a heap holds it. (Worth per size with aging is the idea of GreedyDual-Size, Cao
and Irani 1997; there the clock jumps with what is evicted, so that the dear ages the cheap.)

The heap is lazy: an entry is made anew only where a checkpoint becomes worth less. Where it becomes
worth more, that shows when it comes up, and it is put back with its real worth::

      heap     3.1 A   3.4 B   4.0 C ...     A was used: its priority is 5.2
      pop      A comes up, goes back as 5.2; B comes up, is worth 3.4 still: B gives way

Knows no pool and changes no checkpoint but for its place in the order.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

from vllm_ascend_kvext.retention.checkpoints import BlockNeeds, Checkpoint
from vllm_ascend_kvext.retention.reasons import UseRates

HALF_LIFE = 0.3
"""In pools cached for checkpoints. Not in pools allocated: where states take a block every few
tokens and drop it at once, many pools are allocated while little is cached. And not in pools
evicted: nothing would age until the pool is full."""

MOST_PUT_BACK = 32
"""Checkpoints that one call of `EvictionOrder.pop` puts back before it takes what comes up."""

MOST_ANCESTORS = 16
"""Boundaries without a tail that are looked at on the way to one that has a tail."""

_NEXT_TO_NOTHING = 1e-6


class EvictionOrder:
    """The checkpoints that have a tail, least worthy first.

    Args:
        rates: What is known of the usefulness of checkpoints.
        needs: How many checkpoints each block is part of.
        is_in_use: Whether running requests read all that eviction of a checkpoint would yield.

    Attributes:
        clock: Blocks cached for checkpoints since the start, in pools.
    """

    def __init__(
        self, rates: UseRates, needs: BlockNeeds, is_in_use: Callable[[Checkpoint], bool]
    ) -> None:
        self._rates = rates
        self._needs = needs
        self._is_in_use = is_in_use
        self._heap: list[tuple[float, int, Checkpoint]] = []
        # Checkpoints of which eviction yielded nothing when they came up, longest ago first.
        self._in_use: deque[tuple[int, Checkpoint]] = deque()
        self._num_entries = 0
        self.clock = 0.0

    def advance(self, num_pools: float) -> None:
        """So much of the pool has been cached."""
        self.clock += num_pools

    def add(self, node: Checkpoint) -> None:
        """A checkpoint has got a tail. Takes time in proportion to the tail."""
        node.clock = self.clock
        self._push(node, self._priority(node))

    def renew(self, node: Checkpoint) -> None:
        """A checkpoint has been of use, and may have another reason to be kept since.

        Takes time in proportion to its tail.
        """
        node.clock = self.clock
        self.lower(node)

    def lower(self, node: Checkpoint) -> None:
        """A checkpoint may be worth less than before. Takes time in proportion to its tail."""
        priority = self._priority(node)
        if priority < node.priority:
            self._push(node, priority)

    def pop(self) -> Checkpoint | None:
        """Take the least worthy checkpoint; None if there is none.

        One that is in use is taken only when all are. At most `MOST_PUT_BACK` checkpoints are put
        back per call; those that are set aside as in use, or were forgotten, are met once for
        each time that they were put in.
        """
        heap = self._heap
        num_put_back = 0
        while heap:
            _, entry, node = heapq.heappop(heap)
            if node.entry != entry or not node.has_tail:
                continue
            if self._is_in_use(node):
                self._in_use.append((entry, node))
                node.priority = math.inf  # whatever it is worth later is less
                continue
            current = self._priority(node)
            if heap and current > heap[0][0] and num_put_back < MOST_PUT_BACK:
                self._push(node, current)
                num_put_back += 1
                continue
            return node
        while self._in_use:
            entry, node = self._in_use.popleft()
            if node.entry == entry and node.has_tail:
                return node
        return None

    def look_again(self, limit: int) -> None:
        """A request has gone: up to ``limit`` checkpoints that were in use may come up again."""
        for _ in range(min(limit, len(self._in_use))):
            entry, node = self._in_use.popleft()
            if node.entry == entry and node.has_tail:
                self._push(node, self._priority(node))

    def clear(self) -> None:
        self._heap.clear()
        self._in_use.clear()

    def _push(self, node: Checkpoint, priority: float) -> None:
        self._num_entries += 1
        node.entry = self._num_entries
        node.priority = priority
        heapq.heappush(self._heap, (priority, node.entry, node))

    def _priority(self, node: Checkpoint) -> float:
        """The logarithm of its decayed worth, in half-lives."""
        worth = self._rates.expected_uses(node.reason) * self._saved_per_block(node)
        return node.clock + HALF_LIFE * math.log2(max(worth, _NEXT_TO_NOTHING))

    def _saved_per_block(self, node: Checkpoint) -> float:
        """Tokens that a use saves per block that the checkpoint takes."""
        num_blocks = self._needs.share(node.tail)
        if not (node.children or node.num_requests):
            num_blocks += node.num_run_blocks  # they go along
        ancestor = nearest_with_tail(node.parent)
        return (node.boundary_tokens - ancestor.boundary_tokens) / max(1, num_blocks)


def nearest_with_tail(node: Checkpoint) -> Checkpoint:
    """A node or its nearest ancestor with a tail; after `MOST_ANCESTORS` others, any ancestor."""
    for _ in range(MOST_ANCESTORS):
        if node.is_root or node.has_tail:
            break
        node = node.parent
    return node
