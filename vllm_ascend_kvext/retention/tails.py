# SPDX-License-Identifier: Apache-2.0
"""The blocks that one request keeps cached in one sliding-window group.

Knows which blocks it cached, and which of them only for the latest boundary; it does not know
which boundaries there are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from vllm_ascend_kvext.retention.protocols import Block, ManagedGroup, Pool, Request


class GroupTails:
    """Caches and uncaches blocks of one request in one group."""

    __slots__ = ("_behind_hit", "_group", "_kept", "_pool", "_request", "_rolling")

    def __init__(self, request: Request, group: ManagedGroup, pool: Pool) -> None:
        self._request = request
        self._group = group
        self._pool = pool
        self._behind_hit = range(0)
        # What `keep_for_now` has seen to: the next run mostly begins within it.
        self._kept = range(0)
        # Blocks cached for now, by index, with their hash at the time.
        self._rolling: dict[int, tuple[Block, bytes | None]] = {}

    def admit(self, behind_hit: range) -> None:
        """Begin, or begin again after a preemption.

        Args:
            behind_hit: Indices of the blocks that the request's lookup read and then dropped
                from its hit. They are cached, and the request computes them again.
        """
        self._behind_hit = behind_hit
        self._kept = range(0)
        for block_index in behind_hit:
            block = self._pool.find(self._request, self._group, block_index)
            if block is not None:
                self._pool.refresh(block)

    def keep(self, runs: Iterable[range], cached_tokens: int) -> None:
        """Cache blocks until `drop_all_but` finds that no checkpoint took them.

        Args:
            runs: Indices of blocks; those that are not full yet are left out.
            cached_tokens: The tokens whose blocks may be cached.
        """
        for run in runs:
            for part in self._cache(run, cached_tokens, lasting=True):
                self._roll(part)

    def make_last(self, runs: Iterable[range]) -> None:
        """Blocks of these runs that were cached for now are cached for good."""
        for run in runs:
            for block_index in [i for i in self._rolling if i in run]:
                self._end_rolling(block_index)

    def _end_rolling(self, block_index: int) -> None:
        """A block is cached for good, or a copy of it that the request computed later."""
        block, block_hash = self._rolling.pop(block_index)
        blocks = self._blocks
        is_copied = (
            block_index < len(blocks)
            and blocks[block_index] is not block
            and blocks[block_index]._block_hash is not None
        )
        if is_copied and block._block_hash is block_hash and not block.ref_cnt:
            self._pool.discard([block])

    def keep_for_now(self, run: range, cached_tokens: int) -> None:
        """Cache blocks until `drop_all_but` leaves them out."""
        blocks = self._blocks
        start = run.start
        if start in self._kept:
            run = range(self._kept.stop, run.stop)
        for part in self._cache(run, cached_tokens, lasting=False):
            self._roll(part)
        full_stop = min(run.stop, len(blocks), cached_tokens // self._group.block_tokens)
        self._kept = range(start, max(start, full_stop))

    def _roll(self, part: range) -> None:
        rolling = self._rolling
        blocks = self._blocks
        for block_index in part:
            if block_index in rolling:
                self._end_rolling(block_index)
            block = blocks[block_index]
            rolling[block_index] = (block, block._block_hash)

    def keep_leaving(self, run: range, total_computed_tokens: int, cached_tokens: int) -> None:
        """Cache for now those blocks of a run that are about to leave the window."""
        skipped_tokens = self._group.manager.get_num_skipped_tokens(total_computed_tokens)
        leaving = range(run.start, min(run.stop, skipped_tokens // self._group.block_tokens))
        if leaving:
            self.keep_for_now(leaving, cached_tokens)

    def drop_all_but(self, runs: Sequence[range]) -> None:
        """Uncache the blocks kept for now outside ``runs``, unless another request reads them."""
        blocks = self._blocks
        useless: list[Block] = []
        kept = set(itertools.chain.from_iterable(runs))
        for block_index in sorted(self._rolling.keys() - kept):
            block, block_hash = self._rolling.pop(block_index)
            if block._block_hash is not block_hash:
                continue  # evicted since, and perhaps reused
            if block.ref_cnt > (block_index < len(blocks) and blocks[block_index] is block):
                continue
            useless.append(block)
        if useless:
            self._pool.discard(useless)

    def holds(self, run: range) -> bool:
        """Whether each block of a run has content, in the request's table or cached for it."""
        blocks = self._blocks
        return all(
            (index < len(blocks) and not blocks[index].is_null) or index in self._rolling
            for index in run
        )

    @property
    def _blocks(self) -> Sequence[Block]:
        return self._group.manager.req_to_blocks[self._request.request_id]

    def _cache(self, run: range, cached_tokens: int, lasting: bool) -> list[range]:
        stop = min(run.stop, len(self._blocks), cached_tokens // self._group.block_tokens)
        parts = list(self._uncached_parts(range(run.start, stop), lasting))
        for part in parts:
            self._pool.cache(self._request, self._group, part)
        return parts

    def _uncached_parts(self, run: range, lasting: bool) -> Iterator[range]:
        """Maximal parts of a run whose blocks hold KV and are not cached."""
        blocks = self._blocks
        behind_hit = self._behind_hit
        start = run.start
        for block_index in run:
            block = blocks[block_index]
            if (
                block.is_null
                or block._block_hash is not None
                or (block_index in behind_hit and self._has_copy(block_index, lasting))
            ):
                if start < block_index:
                    yield range(start, block_index)
                start = block_index + 1
        if start < run.stop:
            yield range(start, run.stop)

    def _has_copy(self, block_index: int, lasting: bool) -> bool:
        """Whether a block behind the hit, which this request computed again, is still cached.

        What is to last is left to a copy only where the copy is this request's own.
        """
        block = self._pool.find(self._request, self._group, block_index)
        if block is None:
            return False
        return not lasting or block is self._rolling.get(block_index, (None,))[0]
