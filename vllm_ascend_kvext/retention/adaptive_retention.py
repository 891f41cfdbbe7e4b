# SPDX-License-Identifier: Apache-2.0
"""Retention that follows what requests ask for: caches densely, and chooses what stays longest.

Every block that a lookup can reach is cached, as dense caching does. Some boundaries become
checkpoints. Where blocks run short, those that no checkpoint needs are reallocated first::

      request   ├── hit ──┼───── computed ─────┼────────┤
      cached    ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    full attention
                ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    sliding window
      needed            ■■■                  ■■■      ■■■    tails of checkpoints; the rest of the
                                                             window is surplus once it is freed

Which boundaries, is decided here, when a request is admitted. What every step does, and what gives
way, is compiled: ``csrc/retention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.retention.demand import Demand, count_losses, find_demand
from vllm_ascend_kvext.retention.hints import report_unusable_hints
from vllm_ascend_kvext.retention.native_tables import GeometryTables, GroupTables
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.retention.protocols import CheckpointPool, ManagedGroup, Request
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.retention.stats import RetentionStats

if TYPE_CHECKING:
    from vllm_ascend_kvext._native import RetainedCache, RetainedRequest


class LookedUp(NamedTuple):
    """What a request asked for when the scheduler looked at it, just before its admission."""

    request: Request
    demand: Demand

    def is_of(self, request: Request, hit_tokens: int) -> bool:
        return self.request is request and self.demand.hit_tokens == hit_tokens


@dataclass(slots=True)
class AdaptiveRetention:
    """Implements `Retention`. A call takes time in proportion to the blocks of its one request.

    Attributes:
        policy: Which boundaries to keep.
        sparse_groups: Groups of which a hit reads a tail only: sliding windows and states.
        full_groups: Cached from the first token up to what the latest boundary needs.
        pool: The pool of all groups' blocks.
        skips_by_tokens: Whether the blocks that leave a window follow from the number of computed
            tokens alone. On Ascend they depend on the steps in flight as well, and states on
            what was allocated.
        books: The pool's checkpoints, and what each block is needed for.
    """

    policy: RetentionPolicy
    sparse_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]
    pool: CheckpointPool
    skips_by_tokens: bool = True
    books: RetainedCache = field(init=False)
    _stats: RetentionStats = field(init=False, default_factory=RetentionStats)
    _requests: dict[str, RetainedRequest] = field(init=False, default_factory=dict)
    _looked_up: LookedUp | None = field(init=False, default=None)
    _new_request: type[RetainedRequest] = field(init=False)

    def __post_init__(self) -> None:
        hash_block_tokens = self.pool.hash_block_tokens
        queue = self.pool.free_queue
        self._new_request = native().RetainedRequest
        self.books = native().RetainedCache(
            blocks=self.pool.blocks,
            head=queue.fake_free_list_head,
            tail=queue.fake_free_list_tail,
            geometry=GeometryTables.of(self.policy, self.sparse_groups, self.full_groups),
            sparse_groups=[
                GroupTables.of(group, self.policy, hash_block_tokens)
                for group in self.sparse_groups
            ],
            full_groups=[
                GroupTables.of(group, self.policy, hash_block_tokens) for group in self.full_groups
            ],
            skips_by_tokens=self.skips_by_tokens,
            has_events=self.pool.has_events,
        )

    @property
    def stats(self) -> RetentionStats:
        stats = self._stats
        (
            stats.checkpoints,
            stats.checkpoints_kept,
            stats.checkpoints_evicted,
            stats.junctions_hit,
        ) = self.books.counts()
        return stats

    def cache(self, request: Request, num_computed_tokens: int) -> None:
        books = self._requests.get(request.request_id)
        if books is None or not books.holds_blocks:
            books = self._admit(request, books)
        books.cache(self, num_computed_tokens)

    def quiet_until_tokens(self, request: Request) -> int:
        books = self._requests.get(request.request_id)
        return books.next_event_tokens if books and books.holds_blocks else 0

    def note_quiet_step(self, request: Request, num_computed_tokens: int) -> None:
        cached_tokens = min(num_computed_tokens, request.num_tokens)
        self._requests[request.request_id].cached_tokens = cached_tokens

    def before_skip(self, request_id: str, total_computed_tokens: int) -> int | None:
        books = self._requests.get(request_id)
        if books is None:
            return total_computed_tokens
        return books.before_skip(self, total_computed_tokens)

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int | None:
        if not self.policy.geometry.has_states:
            return None
        books = self._requests.get(request.request_id)
        stop_tokens: int | None
        if books is not None and books.holds_blocks:
            stop_tokens = books.next_stop_tokens(computed_tokens)
        else:
            if books is None:
                books = self._new_request(self.books, request)
            demand = self._find_demand(books, request, computed_tokens)
            self._looked_up = LookedUp(request, demand)
            stop_tokens = min(demand.stops_tokens, default=None)
        if interval_tokens := self.policy.interval_tokens:
            grid_tokens = (computed_tokens // interval_tokens + 1) * interval_tokens
            stop_tokens = grid_tokens if stop_tokens is None else min(stop_tokens, grid_tokens)
        return stop_tokens

    def release(self, request: Request) -> None:
        if self._looked_up is not None and self._looked_up.request is request:
            self._looked_up = None
        books = self._requests.get(request.request_id)
        if books is None:
            return
        if books.holds_blocks:
            computed_tokens = min(books.cached_tokens, request.num_computed_tokens)
            # Whoever extends a finished request reads all of it; the request itself, when it
            # comes back, all but its last token.
            own_tokens = computed_tokens if request.is_finished() else request.num_tokens - 1
            books.release(self, computed_tokens, own_tokens)
        if request.is_finished():
            del self._requests[request.request_id]

    def _admit(self, request: Request, books: RetainedRequest | None) -> RetainedRequest:
        if books is None:
            books = self._requests[request.request_id] = self._new_request(self.books, request)
        hit_tokens = books.admit(self.key_table)
        looked_up, self._looked_up = self._looked_up, None
        if looked_up is not None and looked_up.is_of(request, hit_tokens):
            demand = looked_up.demand
        else:
            demand = self._find_demand(books, request, hit_tokens)
        report_unusable_hints(request, self.policy.geometry)
        count_losses(demand, self.policy.geometry, self._stats)
        for tokens, reason in demand.boundaries.items():
            if reason.origin is Origin.WANTED:
                books.want(tokens)
        plan = self.policy.plan(
            request.num_prompt_tokens, hit_tokens, demand.boundaries, self._is_worth_trying
        )
        books.set_plan(
            [(tokens, reason.origin, reason.step) for tokens, reason in sorted(plan.items())],
            demand.stops_tokens,
            self.policy.replay_boundary_tokens(request.num_prompt_tokens),
        )
        return books

    def _find_demand(self, books: RetainedRequest, request: Request, hit_tokens: int) -> Demand:
        num_prompt_tokens = request.num_prompt_tokens
        shared = books.find_shared(self.key_table, hit_tokens, num_prompt_tokens)
        lengths = [
            (tokens, group.block_tokens)
            for tokens, group in zip(shared, self.full_groups, strict=True)
        ]
        evicted_tokens = books.find_evicted(hit_tokens, num_prompt_tokens)
        return find_demand(request, self.policy.geometry, hit_tokens, lengths, evicted_tokens)

    def _is_worth_trying(self, reason: Reason) -> bool:
        return self.books.is_worth_trying(reason.origin, reason.step)

    # What the compiled module asks for.

    @property
    def key_table(self) -> Any:
        """Keys to cached blocks."""
        return self.pool.key_table

    def cache_run(self, request: Request, sparse_index: int, start: int, stop: int) -> None:
        """Cache a run of blocks of a sparse group, none of them cached yet, and report it."""
        self.pool.cache(request, self.sparse_groups[sparse_index], range(start, stop))

    def cache_full_group(self, request: Request, full_index: int, num_tokens: int) -> None:
        """Have a manager cache a full-attention group up to a token."""
        self.full_groups[full_index].manager.cache_blocks(request, num_tokens)

    def skipped_tokens(self, sparse_index: int, computed_tokens: int) -> int:
        """How many tokens no computation of a sparse group reads any more."""
        return self.sparse_groups[sparse_index].manager.get_num_skipped_tokens(computed_tokens)

    def discard(self, blocks: list[Any]) -> None:
        """Uncache blocks."""
        self.pool.discard(blocks)
