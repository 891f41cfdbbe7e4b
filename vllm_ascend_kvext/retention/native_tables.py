# SPDX-License-Identifier: Apache-2.0
"""What the compiled module has to know of a cache, as plain numbers and upstream's own books."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.retention.protocols import ManagedGroup


@dataclass(frozen=True, slots=True)
class GeometryTables:
    """`HitGeometry`, as ``csrc/retention/geometry.h`` reads it. Lengths are in tokens.

    From ``steady_tokens`` on everything repeats with a period of one unit.

    Attributes:
        hit_by_step: The longest hit of a lookup that may look at so many steps.
        opening_by_unit: The least tokens with which a lookup reaches so many units.
        tails: By sparse group and unit, first and last block, exclusive, that a hit reads.
        full_tokens: By full-attention group and unit, how far it has to be cached.
        is_grid_wanted: Whether the distance of the grid was configured.
    """

    unit_tokens: int
    step_tokens: int
    steady_tokens: int
    lag_tokens: int
    grid_tokens: int
    is_grid_wanted: bool
    has_states: bool
    looks_ahead: bool
    hit_by_step: list[int]
    opening_by_unit: list[int]
    tails: list[list[tuple[int, int]]]
    full_tokens: list[list[int]]

    @classmethod
    def of(
        cls,
        policy: RetentionPolicy,
        sparse_groups: Sequence[ManagedGroup],
        full_groups: Sequence[ManagedGroup],
    ) -> GeometryTables:
        geometry = policy.geometry
        step_tokens, unit_tokens = geometry.step_tokens, geometry.unit_tokens
        num_steps = (geometry.steady_tokens + geometry.lag_tokens) // step_tokens + 1
        boundaries = range(0, geometry.steady_tokens + 1, unit_tokens)
        tails = [geometry.tails(tokens) for tokens in boundaries]
        full_tokens = [geometry.full_tokens(tokens) for tokens in boundaries]
        return cls(
            unit_tokens=unit_tokens,
            step_tokens=step_tokens,
            steady_tokens=geometry.steady_tokens,
            lag_tokens=geometry.lag_tokens,
            grid_tokens=policy.grid_tokens,
            is_grid_wanted=bool(policy.interval_tokens),
            has_states=geometry.has_states,
            looks_ahead=geometry.looks_ahead,
            hit_by_step=[geometry.reachable_tokens(n * step_tokens) for n in range(num_steps)],
            opening_by_unit=[geometry.opens_at_tokens(tokens) for tokens in boundaries],
            tails=[
                [
                    (run.start, run.stop)
                    for run in (of_unit[group.geometry_index] for of_unit in tails)
                ]
                for group in sparse_groups
            ],
            full_tokens=[
                [of_unit[group.geometry_index] for of_unit in full_tokens] for group in full_groups
            ],
        )


@dataclass(frozen=True, slots=True)
class GroupTables:
    """A group and upstream's books about it, as ``csrc/retention/retained_cache.h`` reads them.

    Attributes:
        block_tokens: Tokens that one block covers.
        hashes_per_block: See `GroupKeys`.
        key_suffix: See `GroupKeys`.
        tables: Request id to its blocks.
        num_cached: Request id to the number of its cached blocks.
        is_upstreams: See `ManagedGroup`.
        is_state: Whether it holds states; otherwise, if it is sparse, a sliding window.
        window_tokens: Of a sliding window.
        new_keys: Keys of the states that were cached in the current step.
    """

    block_tokens: int
    hashes_per_block: int
    key_suffix: bytes
    tables: dict[str, list[Any]]
    num_cached: dict[str, int]
    is_upstreams: bool
    is_state: bool
    window_tokens: int
    new_keys: set[bytes] | None

    @classmethod
    def of(
        cls, group: ManagedGroup, policy: RetentionPolicy, hash_block_tokens: int
    ) -> GroupTables:
        keys = GroupKeys.of_group(
            group.manager.kv_cache_group_id, group.block_tokens // hash_block_tokens
        )
        geometry = policy.geometry.groups[group.geometry_index]
        return cls(
            block_tokens=group.block_tokens,
            hashes_per_block=keys.hashes_per_block,
            key_suffix=keys.suffix,
            tables=group.manager.req_to_blocks,
            num_cached=group.manager.num_cached_block,
            is_upstreams=group.is_upstreams,
            is_state=geometry.kind is GroupKind.STATE,
            window_tokens=geometry.window_tokens,
            new_keys=getattr(group.manager, "cached_blocks_this_step", None),
        )
