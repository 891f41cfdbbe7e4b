# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one prefix cache, as a tree of prefixes.

A boundary has the full-attention blocks between its parent's boundary and its own (its *runs*),
and, if it can be resumed from, the blocks of the sparse groups that a hit reads (its *tail*)::

      root ───── 400 ────┬──── 900 [tail]         runs of 900: full-attention blocks 400 to 900
                         └──── 720 [tail]         400 has no tail: two prompts part ways there

Full-attention blocks go with the last checkpoint that needs them, and never before it. What no
checkpoint needs stays cached as surplus, and is reallocated first.

What a call costs depends on the blocks of the boundary that it is about, and not on how many other
boundaries there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import numpy as np

from vllm_ascend_kvext.retention.checkpoints import (
    NO_BLOCKS,
    BlockIds,
    BlockNeeds,
    Checkpoint,
    Runs,
)
from vllm_ascend_kvext.retention.eviction import EvictionOrder, nearest_with_tail
from vllm_ascend_kvext.retention.free_order import FreeOrder
from vllm_ascend_kvext.retention.prefix_table import PrefixTable
from vllm_ascend_kvext.retention.protocols import Block, BlockStore, CachedBlock
from vllm_ascend_kvext.retention.reasons import Origin, Reason, UseRates
from vllm_ascend_kvext.retention.stats import RetentionStats

_REMEMBERED = 8192
_MOST_CONTINUATIONS = 16
_LOOK_AGAIN_AT = 8


class PrefixBlocks(Protocol):
    """The cached blocks of one request's prefixes."""

    def key(self, num_tokens: int) -> bytes:
        """The chained hash of the first tokens."""

    def copies(self, block_index: int) -> Iterable[int]:
        """Ids of cached blocks that hold what a block of the first full-attention group does."""

    def runs(self, start_tokens: int, stop_tokens: int) -> Runs | None:
        """The full-attention blocks of a stretch of tokens; None if one is not cached."""


class CheckpointTree:
    """All checkpoints of one block pool.

    Args:
        store: The pool's blocks.
        block_tokens: Tokens per block of each full-attention group.
        unit_tokens: Every boundary is a multiple of it.
        stats: Where checkpoints are counted.

    Attributes:
        root: The empty prefix.
        nodes: By key, every boundary that can be resumed from, or where prompts part ways.
        evicted: Boundaries whose checkpoints were evicted, with what had kept them.
        rates: How often checkpoints turned out useful.
        needs: How many checkpoints each block is part of.
        free_order: In which order free blocks are reallocated.
    """

    def __init__(
        self,
        store: BlockStore,
        block_tokens: Iterable[int],
        unit_tokens: int,
        stats: RetentionStats,
    ) -> None:
        self._store = store
        self._stats = stats
        self._block_tokens = tuple(block_tokens)
        self._unit_tokens = unit_tokens
        self._num_blocks = len(store.blocks)
        # By id of a block of the first full-attention group: the boundary whose run it is in.
        self._owners = np.full(self._num_blocks, None, object)
        self.needs = BlockNeeds(self._num_blocks)
        self.free_order = FreeOrder(store.free_queue, self._num_blocks, self.needs.count)
        self.rates = UseRates()
        self._order = EvictionOrder(self.rates, self.needs, self._is_in_use)
        self.root = Checkpoint(b"", 0, None, Reason(Origin.LATEST))
        self.nodes: dict[bytes, Checkpoint] = {}
        self.evicted: PrefixTable[Reason] = PrefixTable(_REMEMBERED)

    def clear(self) -> None:
        """Forget everything; the pool has uncached all blocks, and no request holds one."""
        self._order.clear()
        self._owners[:] = None
        self.needs.clear()
        self.free_order.clear()
        self.nodes.clear()
        self.evicted.clear()
        self.root.children.clear()
        self._stats.checkpoints = 0

    # What requests report.

    def use(self, node: Checkpoint) -> None:
        """A request resumes here."""
        self.rates.count_use(node.reason)
        node.reason = node.reason.used_again()
        self._order.renew(node)

    def want(self, key: bytes) -> None:
        """A request would have resumed at a boundary that is gone."""
        reason = self.evicted.pop(key)
        if reason is not None:
            self.rates.take_eviction_back(reason)

    def find_evicted(
        self, prefix_key: Callable[[int], bytes], after_tokens: int, upto_tokens: int
    ) -> int | None:
        """The longest boundary of a prompt, in tokens, whose checkpoint was evicted."""
        return self.evicted.longest(prefix_key, after_tokens, upto_tokens)

    def add(
        self,
        prefix: PrefixBlocks,
        boundary_tokens: int,
        tail: BlockIds,
        ahead: BlockIds,
        reason: Reason,
        before: Checkpoint | None = None,
    ) -> Checkpoint | None:
        """Keep a boundary that a running request has just passed, or hit.

        Args:
            tail: Its cached blocks of the sparse groups.
            ahead: Its cached full-attention blocks past the boundary that a hit reads.
            reason: Why; what a known boundary is kept for, its uses decide, if it has any.
            before: A boundary below it on the request's path. Asked for only where there is no
                full attention, for nothing else tells then what lies behind what.

        Returns:
            None if full-attention blocks that lead there are not cached.
        """
        key = prefix.key(boundary_tokens)
        node = self.nodes.get(key)
        if node is None:
            node = self._insert(prefix, key, boundary_tokens, reason, before or self.root)
            if node is None:
                return None
        elif node.has_tail and not node.reason.uses:
            node.reason = reason
        if not node.has_tail:
            node.origin, node.reason = reason.origin, reason
            self._take_tail(node, tail, ahead)
        else:
            self._order.renew(node)
            if len(ahead):
                self._take_ahead(node, ahead)
        return node

    def remove(self, node: Checkpoint) -> None:
        """A request takes back a checkpoint: what it was about to compute, it did not."""
        if node.has_tail:
            self._give_up_tail(node)
            self._remove_unneeded(node)

    def arrive(self, node: Checkpoint) -> None:
        """A running request has resumed here, or passes here."""
        node.num_requests += 1

    def leave(self, node: Checkpoint) -> None:
        """It has passed another checkpoint, or gives its blocks back."""
        node.num_requests -= 1
        if node.has_tail and not node.num_requests:
            self._order.lower(node)  # its eviction yields its runs, too, if nothing is behind it

    def need(self, block: Block) -> None:
        """A running request needs a block that it is about to free."""
        self.needs.count[block.block_id] += 1

    def release(self, blocks: Iterable[CachedBlock]) -> None:
        """A running request needs these no more, once for each call of `need`."""
        count = self.needs.count
        useless = []
        for block, block_hash in blocks:
            if block._block_hash is not block_hash:
                continue  # reallocated, for want of others
            count[block.block_id] -= 1
            if not count[block.block_id]:
                useless.append(block)
        self.free_order.move_to_surplus(useless)

    def refresh(self, block: Block) -> None:
        """If a block is surplus, make it the last of the surplus to be reallocated."""
        if not self.needs.count[block.block_id]:
            self.free_order.move_to_surplus((block,))

    def end_request(self) -> None:
        """A request gives its blocks back."""
        self._order.look_again(_LOOK_AGAIN_AT)

    # What the pool reports.

    def make_room(self, num_blocks: int) -> None:
        """Evict checkpoints until nothing needs the next blocks to be reallocated.

        Takes time in proportion to ``num_blocks`` and to the blocks of the evicted checkpoints.
        """
        missing = num_blocks - self.free_order.count_next(num_blocks)
        while missing > 0 and (node := self._order.pop()) is not None:
            missing -= self._evict(node)
        if missing > 0:
            for block in self.free_order.next_blocks(num_blocks):
                self.needs.forget(block.block_id)  # only running requests need it

    def _evict(self, node: Checkpoint) -> int:
        """Returns how many free blocks became surplus."""
        self._stats.checkpoints_evicted += 1
        self.rates.count_eviction(node.reason)
        self.evicted.put(node.key, node.boundary_tokens, node.reason)
        return self._give_up_tail(node) + self._remove_unneeded(node)

    def _is_in_use(self, node: Checkpoint) -> bool:
        """Whether a request is here, or requests read all that only this checkpoint needs."""
        if node.num_requests:
            return True
        blocks = self._store.blocks
        own = self.needs.only_here(node.tail).tolist()
        if not node.children:
            own += [int(run[-1]) for run in node.runs if len(run)]
        # The first blocks of a tail are the first that a request, which reads it, frees.
        return bool(own) and all(blocks[block_id].ref_cnt for block_id in own)

    # Structure.

    def _insert(
        self,
        prefix: PrefixBlocks,
        key: bytes,
        boundary_tokens: int,
        reason: Reason,
        before: Checkpoint,
    ) -> Checkpoint | None:
        parent = before
        if self._block_tokens:
            parent, known_tokens = self._find_deepest(prefix, boundary_tokens)
            if known_tokens < parent.boundary_tokens:
                # The path leaves the parent's runs, or ends, within them.
                cut_tokens = known_tokens // self._unit_tokens * self._unit_tokens
                if cut_tokens > parent.parent.boundary_tokens:
                    parent = self._split(parent, prefix.key(cut_tokens), cut_tokens)
                else:
                    parent = parent.parent
            if parent.boundary_tokens == boundary_tokens:
                return parent
        else:
            parent = nearest_with_tail(parent)
        runs = prefix.runs(parent.boundary_tokens, boundary_tokens)
        if runs is None:
            self._remove_unneeded(parent)  # it may have been put there just now
            return None
        node = Checkpoint(key, boundary_tokens, parent, reason, runs)
        for run in runs:
            self._need(run)
        if runs:
            self._owners[runs[0]] = node
            parent.children.add(node)
        self.nodes[key] = node
        return node

    def _find_deepest(self, prefix: PrefixBlocks, upto_tokens: int) -> tuple[Checkpoint, int]:
        """How far the tree knows a path; bisects, for what it knows begins at the first token.

        Returns:
            The boundary whose run the last known block is in, and the tokens up to the block's end.
        """
        block_tokens = self._block_tokens[0]
        node, low, high = self.root, 0, upto_tokens // block_tokens
        middle = high  # known to its end, mostly
        while low < high:
            owner = self._find_owner(prefix, middle - 1)
            if owner is None:
                high = middle - 1
            else:
                node, low = owner, middle
            middle = (low + high + 1) // 2
        return node, low * block_tokens

    def _find_owner(self, prefix: PrefixBlocks, block_index: int) -> Checkpoint | None:
        for block_id in prefix.copies(block_index):
            node: Checkpoint | None = self._owners[block_id]
            if node is not None:
                index = block_index - node.parent.boundary_tokens // self._block_tokens[0]
                run = node.runs[0]
                if 0 <= index < len(run) and run[index] == block_id:
                    return node
        return None

    def _split(self, node: Checkpoint, key: bytes, boundary_tokens: int) -> Checkpoint:
        """Put a boundary without a tail between a node and its parent."""
        parent = node.parent
        cuts = [(boundary_tokens - parent.boundary_tokens) // n for n in self._block_tokens]
        runs = tuple(run[:cut] for run, cut in zip(node.runs, cuts, strict=True))
        upper = Checkpoint(key, boundary_tokens, parent, Reason(Origin.LATEST), runs)
        node.runs = tuple(run[cut:] for run, cut in zip(node.runs, cuts, strict=True))
        node.parent = upper
        upper.children.add(node)
        parent.children.discard(node)
        parent.children.add(upper)
        self._owners[runs[0]] = upper
        self.nodes[key] = upper
        return upper

    def _remove_unneeded(self, node: Checkpoint) -> int:
        """Remove a boundary that has lost its tail, and its parent, if nothing needs them.

        Every boundary without a tail has two children at least: one that has lost all but one of
        them joins the last one.

        Returns:
            How many free blocks became surplus.
        """
        num_surplus = 0
        while not (node.is_root or node.has_tail):
            if len(node.children) > 1:
                return num_surplus
            if node.children:
                self._join_child(node)
                return num_surplus
            self.nodes.pop(node.key)
            if not self._block_tokens:
                return num_surplus
            node.parent.children.discard(node)
            for run in node.runs:
                num_surplus += self._give_up(run[::-1])
            if node.runs:
                self._owners[node.runs[0]] = None
            node = node.parent
        if node.has_tail and not node.children:
            self._order.lower(node)  # its eviction yields its runs, too
        return num_surplus

    def _join_child(self, node: Checkpoint) -> None:
        (child,) = node.children
        child.runs = tuple(np.concatenate(both) for both in zip(node.runs, child.runs, strict=True))
        child.parent = node.parent
        node.parent.children.discard(node)
        node.parent.children.add(child)
        self._owners[node.runs[0]] = child
        self.nodes.pop(node.key)

    def _take_tail(self, node: Checkpoint, tail: BlockIds, ahead: BlockIds) -> None:
        node.tail = np.concatenate((tail, ahead)) if len(ahead) else tail
        node.num_ahead = len(ahead)
        self._need(node.tail)
        self._stats.checkpoints_kept += 1
        self._stats.checkpoints += 1
        self._order.add(node)

    def _take_ahead(self, node: Checkpoint, ahead: BlockIds) -> None:
        """Keep what another request has past a boundary, too: a hit reads its own blocks there."""
        ahead = ahead[np.isin(ahead, node.tail[-node.num_ahead :], invert=True)]
        if len(ahead) and node.num_ahead < _MOST_CONTINUATIONS * len(ahead):
            self._need(ahead)
            node.tail = np.concatenate((node.tail, ahead))
            node.num_ahead += len(ahead)

    def _give_up_tail(self, node: Checkpoint) -> int:
        self._stats.checkpoints -= 1
        tail, node.tail, node.num_ahead = node.tail, NO_BLOCKS, 0
        return self._give_up(tail)

    def _need(self, ids: BlockIds) -> None:
        blocks = self._store.blocks
        new_ids = self.needs.add(ids).tolist()
        self._order.advance(len(new_ids) / self._num_blocks)
        idle = [block for block_id in new_ids if not (block := blocks[block_id]).ref_cnt]
        if idle:
            self.free_order.move_to_back(idle)

    def _give_up(self, ids: BlockIds) -> int:
        """Returns how many free blocks became surplus."""
        blocks = self._store.blocks
        useless_ids = self.needs.remove(ids).tolist()
        idle = [block for block_id in useless_ids if not (block := blocks[block_id]).ref_cnt]
        self.free_order.move_to_surplus(idle)
        return len(idle)
