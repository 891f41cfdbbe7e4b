# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of one prefix cache, as a tree of prefixes.

Blocks of one boundary live and die together across groups: full-attention blocks go with the last
checkpoint that needs them, and never before it. Where the cache holds some content twice, the
older copy gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from vllm_ascend_kvext.retention.checkpoints import (
    Checkpoint,
    Runs,
    TailCounts,
    alive,
)
from vllm_ascend_kvext.retention.eviction import EvictionOrder
from vllm_ascend_kvext.retention.prefix_table import PrefixTable
from vllm_ascend_kvext.retention.protocols import Block, CachedBlock, Pool
from vllm_ascend_kvext.retention.reasons import Origin, Reason, UseRates
from vllm_ascend_kvext.retention.stats import RetentionStats

_REMEMBERED = 8192
_UNBOUNDED = 1 << 62
_MOST_CONTINUATIONS = 16


class CheckpointTree:
    """All checkpoints of one block pool.

    Args:
        pool: Where blocks are uncached.
        block_tokens: Tokens per block of each full-attention group.
        unit_tokens: Every boundary is a multiple of it.
        stats: Where checkpoints are counted.

    Attributes:
        root: The empty prefix.
        nodes: Every boundary that a checkpoint or a running request needs.
        ghosts: Boundaries whose checkpoints were evicted, with what had kept them.
        rates: How often checkpoints turned out useful.
    """

    def __init__(
        self, pool: Pool, block_tokens: Sequence[int], unit_tokens: int, stats: RetentionStats
    ) -> None:
        self._pool = pool
        self._stats = stats
        self._block_tokens = tuple(block_tokens)
        self._unit_tokens = unit_tokens
        self._tail_counts = TailCounts()
        self.rates = UseRates()
        self._order = EvictionOrder(self.rates, self._tail_counts)
        self.root = Checkpoint(b"", 0, None, Reason(Origin.LATEST))
        self.nodes: PrefixTable[Checkpoint] = PrefixTable(_UNBOUNDED)
        self.ghosts: PrefixTable[Reason] = PrefixTable(_REMEMBERED)

    def clear(self) -> None:
        """Forget everything; the pool has uncached all blocks, and no request holds one."""
        self._order.clear()
        self._tail_counts.clear()
        self.nodes.clear()
        self.ghosts.clear()
        self.root.children.clear()
        self._stats.checkpoints = 0

    def is_in_tail(self, block: Block) -> bool:
        """Whether some checkpoint's tail needs a block."""
        return self._tail_counts.has(block)

    def path(
        self, prefix_key: Callable[[int], bytes], after_tokens: int, upto_tokens: int
    ) -> list[Checkpoint]:
        """Known boundaries of a prompt in ``(after_tokens, upto_tokens]``, shortest first."""
        found = self.nodes.on_path(prefix_key, after_tokens, upto_tokens, self._unit_tokens)
        return [node for _, node in found]

    def find_ghost(
        self, prefix_key: Callable[[int], bytes], after_tokens: int, upto_tokens: int
    ) -> int | None:
        """The longest boundary of a prompt, in tokens, whose checkpoint was evicted."""
        found = self.ghosts.on_path(prefix_key, after_tokens, upto_tokens, self._unit_tokens)
        return found[-1][0] if found else None

    # What requests report.

    def use(self, node: Checkpoint) -> None:
        """A request resumes here."""
        self.rates.count_use(node.reason)
        node.reason = node.reason.used_again()
        if node.tail:
            self._order.renew(node)

    def want(self, key: bytes) -> None:
        """A request would have resumed at a boundary that is gone."""
        reason = self.ghosts.pop(key)
        if reason is not None:
            self.rates.take_eviction_back(reason)

    def pin(self, node: Checkpoint) -> None:
        node.pins += 1

    def unpin(self, node: Checkpoint) -> None:
        node.pins -= 1
        useless: list[Block] = []
        self._remove_unneeded(node, useless)
        self._discard(useless)

    def step_back(self, node: Checkpoint) -> Checkpoint:
        """Move a request's pin to the parent; forget the boundary if nobody else was there."""
        parent = node.parent
        self.pin(parent)
        if node.pins == 1 and not node.children:
            useless: list[Block] = []
            self._give_up_tail(node, useless)
            self._discard(useless)
        self.unpin(node)
        return parent

    def add(
        self,
        parent: Checkpoint,
        key: bytes,
        boundary_tokens: int,
        runs: Runs,
        beyond: list[CachedBlock] | None,
        tail: list[CachedBlock],
        reason: Reason,
    ) -> Checkpoint:
        """Record a boundary that a running request has just passed.

        Args:
            parent: The longest known boundary below it on the request's path.
            runs: Per full-attention group its cached blocks from the parent's boundary to this.
            beyond: Its cached full-attention blocks past the boundary that a lookup reads; None
                if nothing is to change about them.
            tail: Its cached blocks of the sparse groups; empty if they are not complete.
        """
        useless: list[Block] = []
        node = self.nodes.get(key)
        if node is None:
            node = Checkpoint(key, boundary_tokens, parent, reason)
            node.runs = runs
            self._order.advance(node.num_run_blocks / self._pool.num_blocks)
            self._adopt(node, useless)
            parent.children.add(node)
            self.nodes.put(key, boundary_tokens, node)
        else:
            if node.parent is not parent:
                self._move(
                    node, parent
                )  # without full attention nothing tells who lies behind whom
            older, node.runs = node.runs, runs
            self._merge(node, older, useless)
        self._look_beyond(parent, [], useless)
        if beyond is not None:
            self._look_beyond(node, beyond, useless)
        if tail:
            self._take_tail(node, tail, useless)
        self._discard(useless)
        return node

    def keep(
        self,
        node: Checkpoint,
        beyond: list[CachedBlock],
        tail: list[CachedBlock],
        reason: Reason,
    ) -> None:
        """There is a further reason for a boundary, and perhaps its tail again."""
        useless: list[Block] = []
        self._look_beyond(node, beyond, useless)
        if not node.reason.uses:
            node.reason = reason
        if tail:
            self._take_tail(node, tail, useless)
        elif node.tail:
            self._order.renew(node)
        self._discard(useless)

    # Eviction.

    def make_room(self, num_blocks: int) -> None:
        """Uncache checkpoints until the next blocks to be reallocated are not cached.

        Stops earlier where every checkpoint is in use; the pool then evicts as it would without.
        """
        missing = num_blocks - self._pool.count_useless(num_blocks)
        while missing > 0 and (node := self._order.pop()) is not None:
            missing -= self._evict(node)

    def _evict(self, node: Checkpoint) -> int:
        """Returns how many blocks that yields."""
        self._stats.checkpoints_evicted += 1
        self.rates.count_eviction(node.reason)
        self.ghosts.put(node.key, node.boundary_tokens, node.reason)
        useless: list[Block] = []
        self._give_up_tail(node, useless)
        self._remove_unneeded(node, useless)
        self._discard(useless)
        return len({block.block_id for block in useless if not block.ref_cnt})

    def forget_strays(self, in_use: set[int]) -> int:
        """Uncache idle blocks that no checkpoint accounts for; returns how many there were.

        Such a block would be lost to the cache for good, for eviction goes by checkpoints. None is
        meant to exist; the books are kept across preemptions, aborts and foreign evictions, and
        this is where they are balanced.

        Args:
            in_use: Ids of blocks that running requests account for.
        """
        known = set(in_use)
        for node in self.nodes.values():
            for run in (*node.runs, node.beyond, node.tail):
                known.update(block.block_id for block in alive(run))
        strays = [b for b in self._pool.idle_cached_blocks() if b.block_id not in known]
        self._discard(strays)
        return len(strays)

    @property
    def num_pools_cached(self) -> float:
        """How often as many blocks have been cached for checkpoints as there are."""
        return self._order.clock

    # Structure.

    def _remove_unneeded(self, node: Checkpoint, useless: list[Block]) -> None:
        """Remove a boundary, and those that led to it, unless something needs them."""
        while not (node.is_root or node.is_needed):
            others = {block.block_id for block, _ in node.parent.beyond}
            for run in (*node.runs, node.beyond):
                useless += [block for block in alive(run) if block.block_id not in others]
            self.nodes.pop(node.key)
            node.parent.children.discard(node)
            node = node.parent
            if node.tail:
                self._order.update(node)  # its eviction yields more than before

    def _adopt(self, node: Checkpoint, useless: list[Block]) -> None:
        """Put a new boundary between its parent and those children that lie behind it."""
        for child in [child for child in node.parent.children if self._passes(child, node)]:
            older, child.runs = child.cut(node.boundary_tokens, self._block_tokens)
            self._move(child, node)
            self._merge(node, older, useless)

    def _passes(self, child: Checkpoint, node: Checkpoint) -> bool:
        if child.boundary_tokens <= node.boundary_tokens or not (node.runs and node.runs[0]):
            return False
        before, _ = child.cut(node.boundary_tokens, self._block_tokens)
        return bool(before[0]) and before[0][-1][1] == node.runs[0][-1][1]

    @staticmethod
    def _move(node: Checkpoint, parent: Checkpoint) -> None:
        node.parent.children.discard(node)
        parent.children.add(node)
        node.parent = parent

    @staticmethod
    def _merge(node: Checkpoint, older: Runs, useless: list[Block]) -> None:
        """Of two copies of a node's runs keep the node's: a running request holds it."""
        for run, older_run in zip(node.runs, older, strict=True):
            for index, (block, block_hash) in enumerate(older_run):
                kept, kept_hash = run[index]
                if block is kept or block._block_hash is not block_hash:
                    continue
                if kept._block_hash is kept_hash:
                    useless.append(block)
                else:
                    run[index] = block, block_hash

    @staticmethod
    def _look_beyond(node: Checkpoint, beyond: list[CachedBlock], useless: list[Block]) -> None:
        """Add what a request computed past a boundary to what others did, each content once."""
        if not (beyond or node.beyond):
            return
        kept = {block_hash: (block, block_hash) for block, block_hash in node.beyond}
        kept = {block_hash: (block, block_hash) for block, block_hash in beyond} | {
            block_hash: cached for block_hash, cached in kept.items() if alive([cached])
        }
        for child in node.children:
            for run in child.runs:
                kept.update((cached[1], cached) for cached in run[:1] if cached[1] in kept)
        older = [*node.beyond, *beyond]
        limit = _MOST_CONTINUATIONS * len(beyond) or len(kept)
        node.beyond = list(kept.values())[:limit]
        needed = {block.block_id for block, _ in node.beyond}
        for child in node.children:
            needed.update(block.block_id for run in child.runs for block, _ in run)
        useless += [block for block in alive(older) if block.block_id not in needed]

    def _take_tail(self, node: Checkpoint, tail: list[CachedBlock], useless: list[Block]) -> None:
        num_new_blocks = self._tail_counts.add(tail)
        if not node.tail:
            self._order.advance(num_new_blocks / self._pool.num_blocks)
        self._stats.checkpoints_kept += not node.tail
        self._give_up_tail(node, useless)
        node.tail = tail
        self._stats.checkpoints += 1
        self._order.renew(node)

    def _give_up_tail(self, node: Checkpoint, useless: list[Block]) -> None:
        self._stats.checkpoints -= bool(node.tail)
        useless += alive(self._tail_counts.remove(node.tail))
        node.tail = []

    def _discard(self, blocks: list[Block]) -> None:
        # Two boundaries may have given up the same one.
        if blocks:
            self._pool.discard(list({block.block_id: block for block in blocks}.values()))
