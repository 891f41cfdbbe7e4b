# SPDX-License-Identifier: Apache-2.0
"""Follows each request through the checkpoints of the prefix cache: where it began, what it passes.

Tells the policy what a request asks for, and the `CheckpointTree` what it leaves behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from vllm_ascend_kvext.retention.checkpoint_tree import CheckpointTree
from vllm_ascend_kvext.retention.checkpoints import Checkpoint, Runs
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.hints import hinted_boundaries, report_unusable_hints
from vllm_ascend_kvext.retention.policy import Plan
from vllm_ascend_kvext.retention.protocols import (
    Block,
    CachedBlock,
    ManagedGroup,
    Pool,
    Request,
)
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats
from vllm_ascend_kvext.retention.tails import GroupTails


@dataclass(slots=True)
class Journeys:
    """All running requests of one coordinator.

    Attributes:
        tree: The checkpoints.
        geometry: What a lookup can hit.
        full_groups: Groups that are cached from the first token on.
        pool: The pool of all groups' blocks.
        stats: Where losses and junctions are counted.
    """

    tree: CheckpointTree
    geometry: HitGeometry
    full_groups: tuple[ManagedGroup, ...]
    sparse_groups: tuple[ManagedGroup, ...]
    pool: Pool
    stats: RetentionStats
    # Per running request the last checkpoint that it has passed; pinned.
    _passed: dict[str, Checkpoint] = field(init=False, default_factory=dict)

    @classmethod
    def start(
        cls,
        geometry: HitGeometry,
        full_groups: tuple[ManagedGroup, ...],
        sparse_groups: tuple[ManagedGroup, ...],
        pool: Pool,
        stats: RetentionStats,
    ) -> Journeys:
        block_tokens = [group.block_tokens for group in full_groups]
        tree = CheckpointTree(pool, block_tokens, geometry.unit_tokens, stats)
        return cls(tree, geometry, full_groups, sparse_groups, pool, stats)

    def begin(self, request: Request, hit_tokens: int, tails: Sequence[GroupTails]) -> Plan:
        """A request is admitted.

        Returns:
            The boundaries that it, or earlier requests, have asked for.
        """
        tree = self.tree
        node = self._resume(request, hit_tokens, tails)
        tree.pin(node)
        self._passed[request.request_id] = node
        shared_tokens = self._shared_tokens(request, hit_tokens)
        demand = self._demand(request, hit_tokens, shared_tokens)
        report_unusable_hints(request)
        self._count(hit_tokens, demand, shared_tokens[0])
        for tokens, reason in demand.items():
            if reason.origin is Origin.WANTED:
                tree.want(self.pool.prefix_key(request, tokens))
        return demand

    def demand(self, request: Request, hit_tokens: int) -> Plan:
        """The boundaries past a request's hit that it, or earlier requests, have asked for."""
        return self._demand(request, hit_tokens, self._shared_tokens(request, hit_tokens))

    def _demand(self, request: Request, hit_tokens: int, shared_tokens: tuple[int, int]) -> Plan:
        demand: dict[int, Reason] = {}
        prefix_key = partial(self.pool.prefix_key, request)
        ghost = self.tree.find_ghost(prefix_key, hit_tokens, request.num_prompt_tokens)
        if ghost is not None:
            demand[ghost] = Reason(Origin.WANTED)
        for limit_tokens in shared_tokens:
            junction_tokens = self.geometry.reachable_tokens(limit_tokens)
            if hit_tokens < junction_tokens <= shared_tokens[0]:
                demand.setdefault(junction_tokens, Reason(Origin.JUNCTION))
        for tokens in hinted_boundaries(request, self.geometry):
            if tokens > hit_tokens:
                demand[tokens] = Reason(Origin.HINT)
        return demand

    def pass_boundaries(
        self,
        request: Request,
        boundaries: Sequence[tuple[int, Reason]],
        upto_tokens: int,
        tails: Sequence[GroupTails],
    ) -> None:
        """A request has cached what belongs to some boundaries.

        Args:
            boundaries: Lengths in tokens, ascending, whose tails are cached for good.
            upto_tokens: How far full attention is cached.
        """
        passed = self._passed[request.request_id]
        prefix_key = partial(self.pool.prefix_key, request)
        reasons: dict[int, Reason | None] = {
            node.boundary_tokens: None
            for node in self.tree.path(prefix_key, passed.boundary_tokens, upto_tokens)
        }
        for tokens, reason in reversed(boundaries):
            reasons[tokens] = reason
        node = passed
        for tokens in sorted(reasons):
            node = self._pass(request, node, tokens, reasons[tokens], tails)
        if node is not passed:
            self.tree.pin(node)
            self.tree.unpin(passed)
            self._passed[request.request_id] = node

    def retreat(self, request: Request, boundary_tokens: int) -> None:
        """What a request was about to compute past a boundary, it did not."""
        passed = self._passed[request.request_id]
        while passed.boundary_tokens > boundary_tokens:
            passed = self._passed[request.request_id] = self.tree.step_back(passed)

    def end(self, request: Request) -> None:
        """A request gives its blocks back."""
        passed = self._passed.pop(request.request_id, None)
        if passed is not None:
            self.tree.unpin(passed)

    def _count(self, hit_tokens: int, demand: Plan, computed_tokens: int) -> None:
        """Report what a request lost: tokens that were computed before and are not hit."""
        stats = self.stats
        above_tokens = hit_tokens
        causes = {Origin.WANTED: LossCause.EVICTED, Origin.JUNCTION: LossCause.NEVER_KEPT}
        for tokens, reason in sorted(demand.items()):
            if reason.origin in causes:
                stats.lose(causes[reason.origin], tokens - above_tokens)
                above_tokens = tokens
            stats.junctions_pinned += reason.origin is Origin.JUNCTION
            stats.hints_pinned += reason.origin is Origin.HINT
        unit_tokens = self.geometry.unit_tokens
        aligned_tokens = computed_tokens // unit_tokens * unit_tokens
        if aligned_tokens > above_tokens:
            stats.lose(LossCause.LOOK_AHEAD, aligned_tokens - above_tokens)
        if computed_tokens > max(aligned_tokens, above_tokens):
            lost_tokens = computed_tokens - max(aligned_tokens, above_tokens)
            stats.lose(LossCause.GRANULARITY, lost_tokens)

    def _resume(self, request: Request, hit_tokens: int, tails: Sequence[GroupTails]) -> Checkpoint:
        tree = self.tree
        if not hit_tokens:
            return tree.root
        prefix_key = partial(self.pool.prefix_key, request)
        node = tree.nodes.get(prefix_key(hit_tokens))
        if node is None:
            path = tree.path(prefix_key, 0, hit_tokens)
            parent = path[-1] if path else tree.root
            added = self._add(request, parent, hit_tokens, Reason(Origin.OVERLAP), tails)
            if added is None:
                return parent
            node = added
        elif not node.tail:
            # What it lost, blocks of other boundaries make up for.
            beyond = self._beyond(request, hit_tokens)
            tree.keep(node, beyond, self._tail(hit_tokens, tails) or [], node.reason)
        self.stats.junctions_hit += node.origin is Origin.JUNCTION
        tree.use(node)
        return node

    def _pass(
        self,
        request: Request,
        passed: Checkpoint,
        boundary_tokens: int,
        reason: Reason | None,
        tails: Sequence[GroupTails],
    ) -> Checkpoint:
        """Record a boundary at or behind the last one that a request has passed.

        Returns:
            What it has passed now.
        """
        if boundary_tokens > passed.boundary_tokens:
            return self._add(request, passed, boundary_tokens, reason, tails) or passed
        if boundary_tokens == passed.boundary_tokens and reason is not None:
            # The end of the prompt is the end of the answer, too.
            tail = None if passed.tail else self._tail(boundary_tokens, tails)
            beyond = self._beyond(request, boundary_tokens)
            self.tree.keep(passed, beyond, tail or [], reason)
        return passed

    def _add(
        self,
        request: Request,
        parent: Checkpoint,
        boundary_tokens: int,
        reason: Reason | None,
        tails: Sequence[GroupTails],
    ) -> Checkpoint | None:
        runs = self._full_blocks(request, parent.boundary_tokens, boundary_tokens)
        if runs is None:
            if reason is not None:
                self._let_go(boundary_tokens, tails)
            return None
        beyond: list[CachedBlock] | None = None
        tail: list[CachedBlock] | None = []
        if reason is not None:
            beyond = self._beyond(request, boundary_tokens)
            tail = self._tail(boundary_tokens, tails)
        key = self.pool.prefix_key(request, boundary_tokens)
        return self.tree.add(
            parent, key, boundary_tokens, runs, beyond, tail or [], reason or Reason(Origin.LATEST)
        )

    def _beyond(self, request: Request, boundary_tokens: int) -> list[CachedBlock]:
        """Cached blocks past a boundary that a lookup reads in groups that look ahead."""
        beyond: list[CachedBlock] = []
        if not self.geometry.looks_ahead:
            return beyond
        ends = self.geometry.full_tokens(boundary_tokens)
        for group in self.full_groups:
            blocks = group.manager.req_to_blocks[request.request_id]
            stop = ends[group.geometry_index] // group.block_tokens
            for index in range(boundary_tokens // group.block_tokens, stop):
                block = blocks[index] if index < len(blocks) else None
                if block is None or block._block_hash is None:
                    block = self.pool.find(request, group, index)
                if block is not None and block._block_hash is not None:
                    beyond.append((block, block._block_hash))
        return beyond

    def _full_blocks(self, request: Request, start_tokens: int, stop_tokens: int) -> Runs | None:
        runs = []
        for group in self.full_groups:
            start, stop = start_tokens // group.block_tokens, stop_tokens // group.block_tokens
            blocks = group.manager.req_to_blocks[request.request_id][start:stop]
            hashes = [block._block_hash for block in blocks]
            if None in hashes:
                for index, block_hash in enumerate(hashes):
                    if block_hash is None:
                        blocks[index] = self._cached_copy(request, group, start + index)
                hashes = [block._block_hash for block in blocks]
                if None in hashes:
                    return None
            runs.append(list(zip(blocks, hashes, strict=True)))
        return tuple(runs)

    def _cached_copy(self, request: Request, group: ManagedGroup, block_index: int) -> Block:
        """The block that was kept instead of a request's own; its own, where that is gone."""
        copy = self.pool.find(request, group, block_index)
        if copy is not None:
            return copy
        self.pool.cache(request, group, range(block_index, block_index + 1))
        own: Block = group.manager.req_to_blocks[request.request_id][block_index]
        return own

    def _tail(self, boundary_tokens: int, tails: Sequence[GroupTails]) -> list[CachedBlock] | None:
        """The cached blocks of all sparse groups that a hit reads; None if one is missing."""
        runs = self.geometry.tails(boundary_tokens)
        found: list[CachedBlock] = []
        for group, group_tails in zip(self.sparse_groups, tails, strict=True):
            cached = group_tails.cached_blocks(runs[group.geometry_index])
            if cached is None:
                self._let_go(boundary_tokens, tails)
                return None
            found += cached
        return found

    def _let_go(self, boundary_tokens: int, tails: Sequence[GroupTails]) -> None:
        """Uncache what was kept for a boundary that cannot be hit after all."""
        runs = self.geometry.tails(boundary_tokens)
        for group, group_tails in zip(self.sparse_groups, tails, strict=True):
            group_tails.let_go(runs[group.geometry_index])

    def _shared_tokens(self, request: Request, hit_tokens: int) -> tuple[int, int]:
        """How many tokens a prompt shares with earlier requests, as far as full attention tells.

        Returns:
            The fewest and the most that fit the full blocks which each group has cached.
        """
        lengths = [
            (self._cached_tokens(request, group, hit_tokens), group.block_tokens)
            for group in self.full_groups
        ]
        if not lengths:
            return hit_tokens, hit_tokens
        fewest = max(tokens for tokens, _ in lengths)
        most = min(tokens + block_tokens - 1 for tokens, block_tokens in lengths)
        if most < fewest:  # a group has lost some of its blocks
            fewest = min(tokens for tokens, _ in lengths)
        return max(fewest, hit_tokens), max(most, hit_tokens)

    def _cached_tokens(self, request: Request, group: ManagedGroup, hit_tokens: int) -> int:
        """How far a group is cached, for it is so from the first block on: gallop, then bisect."""
        low, step = hit_tokens // group.block_tokens, 1
        limit = request.num_prompt_tokens // group.block_tokens
        while low + step <= limit and self._is_cached(request, group, low + step - 1):
            low += step
            step *= 2
        high = min(low + step, limit + 1)
        while low + 1 < high:
            middle = (low + high) // 2
            if self._is_cached(request, group, middle - 1):
                low = middle
            else:
                high = middle
        return low * group.block_tokens

    def _is_cached(self, request: Request, group: ManagedGroup, block_index: int) -> bool:
        return self.pool.find(request, group, block_index) is not None
