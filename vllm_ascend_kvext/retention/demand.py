# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The boundaries that a request or earlier requests asked for, and the tokens that it lost.

The functions know lengths only. They change nothing but the counters of `RetentionStats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.hints import hinted_boundaries
from vllm_ascend_kvext.retention.reasons import STEPS_END_AT, Origin, Reason
from vllm_ascend_kvext.retention.stats import LossCause, RetentionStats

if TYPE_CHECKING:
    from vllm_ascend_kvext.upstream_types import Request


class SharedTokens(NamedTuple):
    """The tokens of a prompt that were computed before, as far as full attention shows.

    The number lies between ``fewest`` and ``most``. Groups with large blocks show it less exactly.
    """

    fewest: int
    most: int


@dataclass(frozen=True, slots=True)
class Demand:
    """The demand of a request at its admission: ``boundaries`` past its hit, each with a reason."""

    hit_tokens: int
    shared: SharedTokens
    boundaries: dict[int, Reason]

    @property
    def stops_tokens(self) -> list[int]:
        """The boundaries at which a prefill step has to end if states are kept, ascending."""
        return sorted(
            tokens for tokens, reason in self.boundaries.items() if reason.origin in STEPS_END_AT
        )


def find_demand(
    request: Request,
    geometry: HitGeometry,
    hit_tokens: int,
    shared_lengths: Sequence[tuple[int, int]],
    evicted_tokens: int,
) -> Demand:
    """Find the demand of a request.

    Args:
        shared_lengths: For each full-attention group, the number of tokens up to which the prompt
            is cached, and the tokens of a block.
        evicted_tokens: The longest boundary of the prompt whose checkpoint was evicted; 0 if none.
    """
    shared = _shared_tokens(hit_tokens, shared_lengths)
    boundaries: dict[int, Reason] = {}
    if evicted_tokens:
        boundaries[evicted_tokens] = Reason(Origin.WANTED)
    for limit_tokens in shared:
        junction_tokens = geometry.reachable_tokens(limit_tokens)
        if hit_tokens < junction_tokens <= shared.fewest:
            boundaries.setdefault(junction_tokens, Reason(Origin.JUNCTION))
    for tokens in hinted_boundaries(request, geometry):
        if tokens > hit_tokens:
            boundaries[tokens] = Reason(Origin.HINT)
    return Demand(hit_tokens, shared, boundaries)


def _shared_tokens(hit_tokens: int, lengths: Sequence[tuple[int, int]]) -> SharedTokens:
    if not lengths:
        return SharedTokens(hit_tokens, hit_tokens)
    fewest = max(tokens for tokens, _ in lengths)
    most = min(tokens + block_tokens - 1 for tokens, block_tokens in lengths)
    if most < fewest:  # A group has lost some of its blocks.
        fewest = min(tokens for tokens, _ in lengths)
    return SharedTokens(max(fewest, hit_tokens), max(most, hit_tokens))


def count_losses(demand: Demand, geometry: HitGeometry, stats: RetentionStats) -> None:
    """Count what a request lost: tokens that were computed before and are not hit."""
    above_tokens = demand.hit_tokens
    causes = {Origin.WANTED: LossCause.EVICTED, Origin.JUNCTION: LossCause.NEVER_KEPT}
    for tokens, reason in sorted(demand.boundaries.items()):
        if reason.origin in causes:
            stats.lost_tokens[causes[reason.origin]] += tokens - above_tokens
            above_tokens = tokens
        if reason.origin is Origin.JUNCTION:
            stats.junctions_pinned += 1
        if reason.origin is Origin.HINT:
            stats.hints_pinned += 1
    computed_tokens = demand.shared.fewest
    aligned_tokens = computed_tokens // geometry.unit_tokens * geometry.unit_tokens
    if aligned_tokens > above_tokens:
        stats.lost_tokens[LossCause.LOOK_AHEAD] += aligned_tokens - above_tokens
        above_tokens = aligned_tokens
    if computed_tokens > above_tokens:
        stats.lost_tokens[LossCause.GRANULARITY] += computed_tokens - above_tokens
