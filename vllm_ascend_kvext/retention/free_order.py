# SPDX-License-Identifier: Apache-2.0
"""The order in which free blocks are reallocated.

Upstream keeps free blocks in a doubly linked queue and reallocates from its front. Here the queue
has two parts: what no checkpoint needs comes first, blocks that are not cached before cached ones::

      front   □ □ □   ▨ ▨ ▨ ▨   ■ ■ ■ ■ ■ ■   back
              not     surplus   needed by checkpoints
              cached         ↑
                             a freed block that nothing needs is inserted here

The surplus can be hit for as long as it is there, and is in the order in which it was freed.
Knows nothing of checkpoints but how many need a block. Moves blocks within the queue, and never
into it or out of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, Protocol


class FreeQueue(Protocol):
    """``vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue``."""

    fake_free_list_head: Any
    fake_free_list_tail: Any

    def get_all_free_blocks(self) -> list[Any]: ...


class FreeOrder:
    """Keeps the queue of one block pool in its parts.

    Every call takes time in proportion to the blocks that it is given, or is asked for.

    Args:
        queue: The queue; no block in it is cached.
        num_blocks: Size of the pool.
        count_needs: Indexed by block id: how many checkpoints need it.
    """

    def __init__(self, queue: FreeQueue, num_blocks: int, count_needs: Any) -> None:
        self._queue = queue
        self._count_needs = count_needs
        # How often a block went to the front. An entry of `_uncached` is valid for the last time.
        self._num_times_first = [0] * num_blocks
        # The blocks of the first two parts in the order of the queue, with what makes an entry
        # valid: how often the block went to the front, or its hash. Entries of blocks that have
        # left their part stay until they come up at either end.
        self._uncached: deque[tuple[Any, int]] = deque()
        self._surplus: deque[tuple[Any, bytes | None]] = deque()
        self.clear()

    def clear(self) -> None:
        """Nothing is cached, and nothing needed."""
        times = self._num_times_first
        self._surplus.clear()
        self._uncached.clear()
        self._uncached.extend((b, times[b.block_id]) for b in self._queue.get_all_free_blocks())

    def count_next(self, limit: int) -> int:
        """How many of the next ``limit`` blocks to be reallocated nothing needs, in a row."""
        count_needs = self._count_needs
        block = self._queue.fake_free_list_head.next_free_block
        end = self._queue.fake_free_list_tail
        count = 0
        while count < limit and block is not end and not count_needs[block.block_id]:
            block = block.next_free_block
            count += 1
        return count

    def next_blocks(self, limit: int) -> list[Any]:
        """The next blocks to be reallocated."""
        block = self._queue.fake_free_list_head
        end = self._queue.fake_free_list_tail
        blocks: list[Any] = []
        while len(blocks) < limit and (block := block.next_free_block) is not end:
            blocks.append(block)
        return blocks

    def note_appended(self, blocks: Sequence[Any]) -> None:
        """The last blocks of the queue, in this order, have just been freed; nothing needs them."""
        block = self._queue.fake_free_list_tail
        for freed in reversed(blocks):
            block = block.prev_free_block
            if block is not freed:
                self.move_to_surplus(blocks)  # the queue holds them in another order
                return
        if blocks:
            _unlink(blocks[0], blocks[-1])
            self._insert(blocks)

    def note_prepended(self, blocks: Sequence[Any]) -> None:
        """The first blocks of the queue, in this order, are not cached and have just been freed."""
        entries, times = self._uncached, self._num_times_first
        while entries and not self._is_uncached(*entries[0]):
            entries.popleft()
        for block in reversed(blocks):
            times[block.block_id] += 1
            entries.appendleft((block, times[block.block_id]))

    def move_to_surplus(self, blocks: Iterable[Any]) -> None:
        """Nothing needs these any more; those that are not free are left alone."""
        # Hundreds of blocks per evicted checkpoint come through this loop: it calls nothing.
        chain: list[Any] = []
        last: Any = None
        for block in blocks:
            after = block.next_free_block
            if after is None:
                continue
            before = block.prev_free_block
            before.next_free_block = after
            after.prev_free_block = before
            if last is not None:
                last.next_free_block = block
                block.prev_free_block = last
            last = block
            chain.append(block)
        if chain:
            self._insert(chain)

    def move_to_back(self, blocks: Iterable[Any]) -> None:
        """A checkpoint has come to need these; those that are not free are left alone."""
        tail = self._queue.fake_free_list_tail
        for block in blocks:
            if is_queued(block):
                _unlink(block, block)
                _link(tail.prev_free_block, block, block)

    def _insert(self, chain: Sequence[Any]) -> None:
        """Make blocks that are linked to each other the last ones of the surplus."""
        _link(self._last_of_surplus(chain), chain[0], chain[-1])
        entries = self._surplus
        while entries and not self._is_surplus(*entries[0]):
            entries.popleft()
        entries.extend(zip(chain, [block._block_hash for block in chain], strict=True))

    def _last_of_surplus(self, chain: Sequence[Any]) -> Any:
        """The block that ends the first two parts of the queue, which ``chain`` is not in."""
        chain_ids = {block.block_id for block in chain}
        surplus, uncached = self._surplus, self._uncached
        while surplus:
            block = surplus[-1][0]
            if block.block_id not in chain_ids and self._is_surplus(*surplus[-1]):
                return block
            surplus.pop()
        while uncached:
            if self._is_uncached(*uncached[-1]):
                return uncached[-1][0]
            uncached.pop()
        return self._queue.fake_free_list_head

    def _is_surplus(self, block: Any, block_hash: bytes | None) -> bool:
        return (
            block._block_hash is block_hash
            and is_queued(block)
            and not self._count_needs[block.block_id]
        )

    def _is_uncached(self, block: Any, num_times_first: int) -> bool:
        return (
            block._block_hash is None
            and is_queued(block)
            and self._num_times_first[block.block_id] == num_times_first
        )


def is_queued(block: Any) -> bool:
    """Whether a block is in the queue; upstream clears the links of one that is not."""
    return block.next_free_block is not None


def _unlink(first: Any, last: Any) -> None:
    before, after = first.prev_free_block, last.next_free_block
    before.next_free_block = after
    after.prev_free_block = before


def _link(before: Any, first: Any, last: Any) -> None:
    after = before.next_free_block
    before.next_free_block = first
    first.prev_free_block = before
    last.next_free_block = after
    after.prev_free_block = last
