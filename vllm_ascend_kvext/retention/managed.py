# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Upstream's groups and pool, as retention manages them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm_ascend_kvext.upstream_types import BlockPool, GroupManager, Request


@dataclass(frozen=True, slots=True)
class ManagedGroup:
    """A KV cache group of upstream's. ``csrc/retention/bindings.cpp`` reads it by these names.

    Attributes:
        geometry_index: The index of its geometry in ``HitGeometry.groups``.
        is_upstreams: Whether upstream's own code caches its blocks and moves its window on.
        hashes_in_key: The number of hashes that make the key of a block: the last hashes of the
            block.
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

    def cache(self, request: Request, group: ManagedGroup, run: range) -> None:
        """Cache a run of a request's full, uncached blocks, and emit the run's events."""

    def cache_inside(self, request: Request, group: ManagedGroup, tokens: int) -> None:
        """Cache a full-attention block up to ``tokens``, which lie inside it."""

    def cache_state_inside(self, request: Request, group: ManagedGroup, tokens: int) -> bool:
        """Cache the state that a step is to leave inside a block.

        Returns:
            Whether the request has a block for it.
        """

    def gives_key_away(self, request: Request, group: ManagedGroup, tokens: int) -> bool:
        """Whether the block of a state inside a block is to lose its key to a copy.

        The block belongs to another request, which left the same state and writes into it next.
        """

    def discard(self, blocks: list[Any]) -> None:
        """Uncache blocks. Free ones among them become the next to be reallocated."""
