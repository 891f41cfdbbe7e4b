# SPDX-License-Identifier: Apache-2.0
"""What retention manages: upstream's groups and pool, and how the compiled module is told of them.

The tables are read in ``csrc/retention/bindings.cpp`` by these names; lengths are in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.upstream_types import BlockPool, GroupManager


@dataclass(frozen=True, slots=True)
class ManagedGroup:
    """A KV cache group; ``geometry_index`` is its place in ``HitGeometry.groups``.

    ``is_upstreams`` says whether upstream's own code caches its blocks and moves its window on.
    The last ``hashes_in_key`` of the hashes that a block spans make its key.
    """

    manager: GroupManager
    geometry_index: int
    block_tokens: int
    is_upstreams: bool = False
    hashes_in_key: int = 1


class Pool(Protocol):
    """Upstream's block pool, adapted in ``vllm_ascend_kvext.patches.retention.block_pool``."""

    @property
    def block_pool(self) -> BlockPool: ...

    def cache(self, request: Any, group: ManagedGroup, run: range) -> None:
        """Cache a run of a request's blocks, all full and none cached yet."""

    def cache_full(self, request: Any, group: ManagedGroup, num_tokens: int) -> None:
        """Cache the blocks of a full-attention group up to a token."""

    def discard(self, blocks: list[Any]) -> None:
        """Uncache blocks; those that are free become the next ones to be reallocated."""


def geometry_tables(
    policy: RetentionPolicy, sparse: Sequence[ManagedGroup], full: Sequence[ManagedGroup]
) -> dict[str, Any]:
    """`HitGeometry`, for ``csrc/retention/geometry.h``.

    From ``steady_tokens`` on everything repeats with a period of one unit: up to there,
    ``hit_by_step`` has the longest hit of a lookup that may look at so many steps,
    ``opening_by_unit`` the least tokens with which a lookup reaches so many units, ``tails`` by
    sparse group and unit the first and last block, exclusive, that a hit reads, and
    ``full_tokens`` by full-attention group and unit how far it has to be cached.
    """
    geometry = policy.geometry
    num_steps = (geometry.steady_tokens + geometry.lag_tokens) // geometry.step_tokens + 1
    boundaries = range(0, geometry.steady_tokens + 1, geometry.unit_tokens)
    tails = [geometry.tails(tokens) for tokens in boundaries]
    full_tokens = [geometry.full_tokens(tokens) for tokens in boundaries]
    return {
        "unit_tokens": geometry.unit_tokens,
        "step_tokens": geometry.step_tokens,
        "steady_tokens": geometry.steady_tokens,
        "lag_tokens": geometry.lag_tokens,
        "grid_tokens": policy.grid_tokens,
        "is_grid_wanted": bool(policy.interval_tokens),
        "has_states": geometry.has_states,
        "use_eagle": geometry.use_eagle,
        "hit_by_step": [
            geometry.reachable_tokens(n * geometry.step_tokens) for n in range(num_steps)
        ],
        "opening_by_unit": [geometry.opens_at_tokens(tokens) for tokens in boundaries],
        "tails": [
            [(runs[group.geometry_index].start, runs[group.geometry_index].stop) for runs in tails]
            for group in sparse
        ],
        "full_tokens": [[ends[group.geometry_index] for ends in full_tokens] for group in full],
    }


def group_tables(
    groups: Sequence[ManagedGroup], policy: RetentionPolicy, block_pool: BlockPool
) -> list[dict[str, Any]]:
    """Groups and what upstream knows of them, for ``csrc/retention/retained_cache.h``.

    ``tables`` has the blocks of each request by its id, and ``num_cached`` how many of them are
    cached. A window keeps the tokens besides that drafts may have computed again.
    """
    tables = []
    for group in groups:
        hashes_per_block = group.block_tokens // block_pool.hash_block_size
        geometry = policy.geometry.groups[group.geometry_index]
        tables.append(
            {
                "block_tokens": group.block_tokens,
                "hashes_per_block": hashes_per_block,
                "hashes_in_key": group.hashes_in_key,
                "key_suffix": GroupKeys.of_group(
                    group.manager.kv_cache_group_id, hashes_per_block
                ).suffix,
                "tables": group.manager.req_to_blocks,
                "num_cached": group.manager.num_cached_block,
                "is_upstreams": group.is_upstreams,
                "is_state": geometry.kind is GroupKind.STATE,
                "window_tokens": geometry.window_tokens
                + getattr(group.manager, "extra_retained_tokens", 0),
            }
        )
    return tables
