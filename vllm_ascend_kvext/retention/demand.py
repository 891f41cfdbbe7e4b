# SPDX-License-Identifier: Apache-2.0
"""Which boundaries a request, or earlier ones, have asked for, and what a request lost.

Knows which full-attention blocks are cached and which checkpoints were evicted; changes nothing
but the counters of `RetentionStats`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from vllm_ascend_kvext.retention.checkpoint_tree import CheckpointTree
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.hints import hinted_boundaries
from vllm_ascend_kvext.retention.protocols import CheckpointPool, ManagedGroup, Request
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats


class SharedTokens(NamedTuple):
    """How many tokens of a prompt were computed before, as far as full attention tells.

    Groups with large blocks tell it less exactly than others.
    """

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks for at its admission.

    Attributes:
        hit_tokens: What it need not compute.
        shared: How much of its prompt was computed before.
        boundaries: Past the hit, in tokens, with the reason to keep each.
    """

    hit_tokens: int
    shared: SharedTokens
    boundaries: dict[int, Reason]


@dataclass(frozen=True, slots=True)
class DemandFinder:
    """Looks requests up in one prefix cache.

    Attributes:
        tree: Knows which checkpoints were evicted.
        geometry: What a lookup can hit.
        full_groups: Groups that are cached from the first token on.
        pool: The pool of their blocks.
    """

    tree: CheckpointTree
    geometry: HitGeometry
    full_groups: tuple[ManagedGroup, ...]
    pool: CheckpointPool

    def find(self, request: Request, hit_tokens: int) -> Demand:
        """Takes time that grows with the logarithm of the prompt's length."""
        shared = self._find_shared(request, hit_tokens)
        boundaries: dict[int, Reason] = {}
        evicted_tokens = self.tree.find_evicted(
            partial(self.pool.prefix_key, request), hit_tokens, request.num_prompt_tokens
        )
        if evicted_tokens is not None:
            boundaries[evicted_tokens] = Reason(Origin.WANTED)
        for limit_tokens in shared:
            junction_tokens = self.geometry.reachable_tokens(limit_tokens)
            if hit_tokens < junction_tokens <= shared.fewest:
                boundaries.setdefault(junction_tokens, Reason(Origin.JUNCTION))
        for tokens in hinted_boundaries(request, self.geometry):
            if tokens > hit_tokens:
                boundaries[tokens] = Reason(Origin.HINT)
        return Demand(hit_tokens, shared, boundaries)

    def _find_shared(self, request: Request, hit_tokens: int) -> SharedTokens:
        lengths = [
            (self._cached_tokens(request, group, hit_tokens), group.block_tokens)
            for group in self.full_groups
        ]
        if not lengths:
            return SharedTokens(hit_tokens, hit_tokens)
        fewest = max(tokens for tokens, _ in lengths)
        most = min(tokens + block_tokens - 1 for tokens, block_tokens in lengths)
        if most < fewest:  # a group has lost some of its blocks
            fewest = min(tokens for tokens, _ in lengths)
        return SharedTokens(max(fewest, hit_tokens), max(most, hit_tokens))

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


def count_losses(demand: Demand, geometry: HitGeometry, stats: RetentionStats) -> None:
    """Report what a request lost: tokens that were computed before and are not hit."""
    above_tokens = demand.hit_tokens
    causes = {Origin.WANTED: LossCause.EVICTED, Origin.JUNCTION: LossCause.NEVER_KEPT}
    for tokens, reason in sorted(demand.boundaries.items()):
        if reason.origin in causes:
            stats.lose(causes[reason.origin], tokens - above_tokens)
            above_tokens = tokens
        stats.junctions_pinned += reason.origin is Origin.JUNCTION
        stats.hints_pinned += reason.origin is Origin.HINT
    computed_tokens = demand.shared.fewest
    aligned_tokens = computed_tokens // geometry.unit_tokens * geometry.unit_tokens
    if aligned_tokens > above_tokens:
        stats.lose(LossCause.LOOK_AHEAD, aligned_tokens - above_tokens)
        above_tokens = aligned_tokens
    if computed_tokens > above_tokens:
        stats.lose(LossCause.GRANULARITY, computed_tokens - above_tokens)
