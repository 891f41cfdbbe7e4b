# SPDX-License-Identifier: Apache-2.0
"""The cached blocks of one request, as `CheckpointTree` and `AdaptiveRetention` ask for them.

Reads a request's block tables and the pool; changes neither.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from vllm_ascend_kvext.retention.checkpoints import NO_BLOCKS, BlockIds, Runs, block_ids
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.protocols import Block, CheckpointPool, ManagedGroup, Request


@dataclass(frozen=True, slots=True)
class RequestBlocks:
    """Implements `checkpoint_tree.PrefixBlocks`.

    Attributes:
        request: Whose blocks.
        pool: The pool of all groups' blocks.
        geometry: What a lookup can hit.
        full_groups: Groups that are cached from the first token on.
        sparse_groups: Groups of which a hit reads a tail only.
    """

    request: Request
    pool: CheckpointPool
    geometry: HitGeometry
    full_groups: tuple[ManagedGroup, ...]
    sparse_groups: tuple[ManagedGroup, ...]

    def key(self, num_tokens: int) -> bytes:
        return self.pool.prefix_key(self.request, num_tokens)

    def copies(self, block_index: int) -> Iterator[int]:
        group = self.full_groups[0]
        own = self._cached_in_table(group, block_index)
        if own is not None:
            yield own.block_id
        for block in self.pool.copies(self.request, group, block_index):
            yield block.block_id

    def runs(self, start_tokens: int, stop_tokens: int) -> Runs | None:
        runs = []
        for group in self.full_groups:
            run = range(start_tokens // group.block_tokens, stop_tokens // group.block_tokens)
            ids = self._cached_ids(group, run)
            if ids is None:
                return None
            runs.append(block_ids(ids))
        return tuple(runs)

    def tail(self, boundary_tokens: int) -> BlockIds | None:
        """The blocks of sparse groups that a hit at a boundary reads; None if one is missing."""
        tails = self.geometry.tails(boundary_tokens)
        tail: list[int] = []
        for group in self.sparse_groups:
            ids = self._cached_ids(group, tails[group.geometry_index])
            if ids is None:
                return None
            tail += ids
        return block_ids(tail)

    def ahead(self, boundary_tokens: int) -> BlockIds:
        """The full-attention blocks past a boundary that a hit reads, if they are cached."""
        if not self.geometry.looks_ahead:
            return NO_BLOCKS
        ends = self.geometry.full_tokens(boundary_tokens)
        ahead: list[int] = []
        for group in self.full_groups:
            start = boundary_tokens // group.block_tokens
            for index in range(start, ends[group.geometry_index] // group.block_tokens):
                block = self._cached(group, index)
                if block is not None:
                    ahead.append(block.block_id)
        return block_ids(ahead)

    def _cached_ids(self, group: ManagedGroup, run: range) -> list[int] | None:
        blocks = self.table(group)[run.start : run.stop]
        ids = [block.block_id for block in blocks if block._block_hash is not None]
        if len(ids) == len(run):
            return ids
        found = [self._cached(group, index) for index in run]
        ids = [block.block_id for block in found if block is not None]
        return ids if len(ids) == len(run) else None

    def _cached(self, group: ManagedGroup, block_index: int) -> Block | None:
        own = self._cached_in_table(group, block_index)
        return own or self.pool.find(self.request, group, block_index)

    def _cached_in_table(self, group: ManagedGroup, block_index: int) -> Block | None:
        blocks = self.table(group)
        if block_index < len(blocks) and blocks[block_index]._block_hash is not None:
            return blocks[block_index]
        return None

    def table(self, group: ManagedGroup) -> Sequence[Block]:
        """The request's blocks, null where it needs none any more."""
        return group.manager.req_to_blocks[self.request.request_id]
