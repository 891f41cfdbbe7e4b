# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Steps of running requests. If nothing changes in a step, nothing is done for it.

Most steps of a decode need no block, free none and cache none. Each request carries the number of
tokens up to which this holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_ascend_kvext.prefix_cache.limits import NEVER_TOKENS, GroupLimits, RequestLimits
from vllm_ascend_kvext.upstream_types import GroupManager


class CachingRule(Protocol):
    """Decides instead of upstream when a step of a running request caches something."""

    def quiet_until_tokens(self, request: Any) -> int:
        """The smallest number of tokens at which something is cached; 0 if it is not known."""

    def note_quiet_step(self, request: Any, num_computed_tokens: int) -> None:
        """A step below that number was scheduled, and caching was not called for it."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """One group of a block manager. Its tables have ``null`` where no block is held."""

    manager: GroupManager
    limits: GroupLimits
    null: Any


@dataclass(slots=True)
class StepCounts:
    """Counts steps by what was done: nothing, only the changes, or everything by upstream."""

    quiet: int = 0
    partial: int = 0
    upstream: int = 0


@dataclass(frozen=True, slots=True)
class Steps:
    """Steps of running requests on one block manager.

    Attributes:
        block_manager: ``vllm.v1.core.kv_cache_manager.KVCacheManager``.
        groups: All its groups.
        tables: The block tables of its first group, by request.
        does_partial_steps: Whether `take_partial_step` does all that a step needs. It does not if
            vLLM-Ascend 0.23.0 wraps upstream's function, or if states move.
        rule: Decides instead of upstream when something is cached; None if upstream decides.
    """

    block_manager: Any
    groups: tuple[StepGroup, ...]
    tables: Mapping[str, list[Any]]
    does_partial_steps: bool
    rule: CachingRule | None
    counts: StepCounts = field(default_factory=StepCounts)

    def take_partial_step(
        self, request: Any, limits: RequestLimits, num_new_tokens: int, lookahead_tokens: int
    ) -> Any:
        """Do only what changes, and only in the groups in which it changes.

        The order is upstream's: all groups free, then all groups allocate or none, then all cache.

        Returns:
            The new blocks; None if there are too few free ones.
        """
        request_id = request.request_id
        block_manager = self.block_manager
        computed_tokens = min(request.num_computed_tokens, block_manager.max_model_len)
        num_tokens = computed_tokens + num_new_tokens
        slot_tokens = min(num_tokens + lookahead_tokens, block_manager.max_model_len)
        if computed_tokens >= limits.next_skip_tokens:
            self._skip(request_id, limits, _landed_tokens(request, computed_tokens))
        new_blocks = block_manager.empty_kv_cache_blocks
        if slot_tokens >= limits.next_slot_tokens:
            new_blocks = self._allocate(request_id, limits, slot_tokens, num_tokens)
            if new_blocks is None:
                limits.update()
                return None
        cached_tokens = min(num_tokens, request.num_tokens)  # drafts are not cached
        if cached_tokens >= limits.next_cache_tokens and block_manager.enable_caching:
            block_manager.coordinator.cache_blocks(request, cached_tokens)
            limits.next_cache_tokens = self._next_cache_tokens(request)
        elif self.rule is not None:
            self.rule.note_quiet_step(request, num_tokens)
        limits.update()
        return new_blocks

    def limits_of(self, request: Any) -> RequestLimits | None:
        """The limits of a request whose step has been allocated; None if it has no blocks."""
        request_id = request.request_id
        table = self.tables.get(request_id)
        if table is None:
            return None
        limits = RequestLimits(
            table,
            [
                group.limits.next_slot_tokens(len(group.manager.req_to_blocks[request_id]))
                for group in self.groups
            ],
            [
                _next_skip_tokens(
                    group, request_id, _landed_tokens(request, request.num_computed_tokens)
                )
                for group in self.groups
            ],
            self._next_cache_tokens(request),
        )
        limits.update()
        return limits

    def note_cached(self, request: Any, limits: RequestLimits) -> None:
        """Something was cached outside of a step."""
        limits.next_cache_tokens = self._next_cache_tokens(request)
        limits.update()

    def _skip(self, request_id: str, limits: RequestLimits, computed_tokens: int) -> None:
        self.block_manager.coordinator.remove_skipped_blocks(request_id, computed_tokens)
        for index, tokens in enumerate(limits.skip_tokens):
            if computed_tokens >= tokens:
                limits.skip_tokens[index] = _next_skip_tokens(
                    self.groups[index], request_id, computed_tokens
                )

    def _allocate(
        self, request_id: str, limits: RequestLimits, slot_tokens: int, num_tokens: int
    ) -> Any:
        short: list[int] = []
        num_missing = 0
        for index, tokens in enumerate(limits.slot_tokens):
            if slot_tokens >= tokens:
                group = self.groups[index]
                num_blocks = group.limits.num_blocks(slot_tokens)
                num_missing += num_blocks - len(group.manager.req_to_blocks[request_id])
                limits.slot_tokens[index] = group.limits.next_slot_tokens(num_blocks)
                short.append(index)
        if num_missing > self.block_manager.block_pool.free_block_queue.num_free_blocks:
            for index in short:
                limits.slot_tokens[index] = 0
            return None
        new_blocks: list[list[Any]] = [[] for _ in self.groups]
        for index in short:
            allocate = self.groups[index].manager.allocate_new_blocks
            new_blocks[index] = allocate(request_id, slot_tokens, num_tokens)
        return self.block_manager.create_kv_cache_blocks(tuple(new_blocks))

    def _next_cache_tokens(self, request: Any) -> int:
        if self.rule is not None:
            return self.rule.quiet_until_tokens(request)
        if not self.block_manager.enable_caching:
            return NEVER_TOKENS
        return min(
            group.limits.next_cache_tokens(
                group.manager.num_cached_block.get(request.request_id, 0)
            )
            for group in self.groups
        )


def _landed_tokens(request: Any, computed_tokens: int) -> int:
    """The computed tokens without the tokens of steps in flight.

    Since vLLM 0.30, windows and states wait for these steps.
    """
    return max(0, computed_tokens - getattr(request, "num_in_flight_tokens", 0))


def _next_skip_tokens(group: StepGroup, request_id: str, computed_tokens: int) -> int:
    limits = group.limits
    if not limits.window_tokens:
        return NEVER_TOKENS
    blocks = group.manager.req_to_blocks[request_id]
    num_skipped = min(limits.num_skipped_blocks(computed_tokens), len(blocks))
    if num_skipped and blocks[num_skipped - 1] is not group.null:
        return 0  # The block waits for drafts or steps in flight.
    return limits.next_skip_tokens(num_skipped)
