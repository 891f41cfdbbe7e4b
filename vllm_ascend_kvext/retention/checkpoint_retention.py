# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Which blocks stay in the prefix cache: caches densely, and chooses what stays longest.

Every block that a lookup can reach is cached, as dense caching does. Some boundaries become
checkpoints. If blocks run short, blocks that no checkpoint needs are reallocated first::

      request   ├── hit ──┼───── computed ─────┼────────┤
      cached    ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    full attention
                ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    sliding window
      needed            ■■■                  ■■■      ■■■    tails of checkpoints; the rest of the
                                                             window is surplus once it is freed

This module chooses these boundaries when a request is admitted. The compiled module
(``csrc/retention``) answers at every step which runs of blocks are to be cached, and which blocks
are not worth caching any more. The compiled module calls no Python. This module carries the answers
out.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm_ascend_kvext.native import native
from vllm_ascend_kvext.retention.demand import Demand, count_losses, find_demand
from vllm_ascend_kvext.retention.geometry import HitGeometry
from vllm_ascend_kvext.retention.hints import report_unusable_hints
from vllm_ascend_kvext.retention.inside_blocks import InnerProgress, InsideBlocks
from vllm_ascend_kvext.retention.managed import ManagedGroup, Pool
from vllm_ascend_kvext.retention.policy import Plan, RetentionPolicy
from vllm_ascend_kvext.retention.reasons import Origin, Reason
from vllm_ascend_kvext.retention.stats import RetentionStats

if TYPE_CHECKING:
    from vllm_ascend_kvext._native import GroupRun, RetainedCache, RetainedRequest
    from vllm_ascend_kvext.upstream_types import Request


@dataclass(slots=True)
class CheckpointRetention:
    """Retention of one coordinator. A call takes time in proportion to the request's blocks.

    Attributes:
        sparse_groups: Sliding windows and states. A hit reads only a tail of them.
        full_groups: Groups that are cached from the first token up to what the latest boundary
            needs.
        inside: Boundaries inside blocks; None if hits end with whole blocks.
    """

    policy: RetentionPolicy
    sparse_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]
    pool: Pool
    inside: InsideBlocks | None = None
    cache_state: RetainedCache = field(init=False)
    _stats: RetentionStats = field(init=False, default_factory=RetentionStats)
    _request_states: dict[str, RetainedRequest] = field(init=False, default_factory=dict)
    # The demand of the request that the scheduler looked at last, before its admission.
    _looked_up: tuple[Request, Demand] | None = field(init=False, default=None)
    _new_request_state: type[RetainedRequest] = field(init=False)
    _groups: tuple[ManagedGroup, ...] = field(init=False)
    # For each of `_groups`, whether only the group's own manager may cache its blocks.
    _caches_itself: list[bool] = field(init=False)
    # Whether some manager is the only one that knows how its window moves on.
    _asks_managers: bool = field(init=False)

    def __post_init__(self) -> None:
        block_pool = self.pool.block_pool
        queue = block_pool.free_block_queue
        sparse = self.sparse_groups
        full = self.full_groups
        # Upstream's own code emits events, and keeps books of the states that it caches.
        has_events = block_pool.enable_kv_cache_events
        kinds = self.policy.geometry.groups
        # Upstream's own code also takes the keys inside a block from it.
        is_quiet = not has_events and self.inside is None
        self._new_request_state = native().RetainedRequest
        self.cache_state = native().RetainedCache(
            blocks=block_pool.blocks,
            head=queue.fake_free_list_head,
            tail=queue.fake_free_list_tail,
            hash_block_tokens=block_pool.hash_block_size,
            geometry=self.policy.tables,
            sparse_groups=sparse,
            full_groups=full,
            quiet_sparse_groups=[
                is_quiet and not kinds[each.geometry_index].is_state for each in sparse
            ],
            quiet_full_groups=[is_quiet and each.is_upstreams for each in full],
            hits_inside_blocks=self.inside is not None,
        )
        self._groups = sparse + full
        self._caches_itself = [False for _ in sparse] + [not each.is_upstreams for each in full]
        self._asks_managers = not all(each.is_upstreams for each in sparse)

    @property
    def stats(self) -> RetentionStats:
        stats = self._stats
        (
            stats.checkpoints,
            stats.checkpoints_kept,
            stats.checkpoints_evicted,
            stats.junctions_hit,
        ) = self.cache_state.counts()
        return stats

    def cache(self, request: Request, num_computed_tokens: int) -> None:
        """Cache what a lookup can reach, and keep what is planned, once tokens are scheduled.

        If caching raises, the step stays unsettled, and the next call caches what is missing.

        Args:
            num_computed_tokens: The tokens as upstream counts them. Tokens that are being scheduled
                are included. Draft tokens are not.
        """
        state = self._request_states.get(request.request_id)
        if state is None or not state.holds_blocks:
            state = self._admit(request, state)
        key_table = self._key_table
        runs = state.begin_step(key_table, num_computed_tokens, request.num_tokens)
        if runs is not None:
            self._cache_runs(request, state, key_table, runs)
            state.end_step(key_table)
        if self.inside is not None:
            self._cache_inside(self.inside, request, state, num_computed_tokens)

    def quiet_until_tokens(self, request: Request) -> int:
        """The number of tokens below which `cache` only notes the number; 0 if it is not known."""
        state = self._request_states.get(request.request_id)
        return state.next_event_tokens if state and state.holds_blocks else 0

    def note_quiet_step(self, request: Request, num_computed_tokens: int) -> None:
        """Do what `cache` does below `quiet_until_tokens`."""
        cached_tokens = min(num_computed_tokens, request.num_tokens)
        self._request_states[request.request_id].cached_tokens = cached_tokens

    def before_skip(
        self, request_id: str, total_computed_tokens: int, is_settled: bool = False
    ) -> int:
        """Hold blocks that are about to leave the windows of a request and are needed later.

        Args:
            is_settled: Whether the count already leaves out tokens of steps in flight.

        Returns:
            The computed tokens up to which windows may move on. Draft tokens that are still in
            flight do not count. If they are rejected, the request needs the window before them
            (vLLM #47728).
        """
        state = self._request_states.get(request_id)
        if state is None:
            return total_computed_tokens
        if not self._asks_managers:
            return state.before_skip(total_computed_tokens, is_settled)
        computed_tokens = total_computed_tokens
        if not is_settled:
            computed_tokens = state.settled_tokens(total_computed_tokens)
        skipped_tokens = [
            group.manager.get_num_skipped_tokens(computed_tokens) for group in self.sparse_groups
        ]
        return state.before_skip(total_computed_tokens, is_settled, skipped_tokens)

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int | None:
        """Where a prefill step of a request has to end, so that a state is there to keep.

        Returns:
            The nearest boundary past ``computed_tokens`` that was asked for, or at which the same
            prompt resumes. None if there is none, or if no states are kept.
        """
        if not (self.policy.geometry.has_states and self.policy.is_adaptive):
            return None
        state = self._request_states.get(request.request_id)
        stop_tokens: int | None
        if state is not None and state.holds_blocks:
            stop_tokens = state.next_stop_tokens(computed_tokens)
        else:
            if state is None:
                state = self._new_request_state(self.cache_state, request)
            demand = self._find_demand(state, request, computed_tokens)
            self._looked_up = (request, demand)
            stop_tokens = min(self._stops_tokens(demand, request), default=None)
        if interval_tokens := self.policy.interval_tokens:
            grid_tokens = (computed_tokens // interval_tokens + 1) * interval_tokens
            stop_tokens = grid_tokens if stop_tokens is None else min(stop_tokens, grid_tokens)
        return stop_tokens

    def note_hit(self, request_id: str, hit_tokens: int) -> None:
        """Remember how many tokens a request need not compute, before it is admitted."""
        if self.inside is not None:
            self.inside.hits_tokens[request_id] = hit_tokens

    def release(self, request: Request) -> None:
        """Settle what a request leaves behind; call it before its blocks are freed."""
        if self.inside is not None:
            self.inside.hits_tokens.pop(request.request_id, None)
        if self._looked_up is not None and self._looked_up[0] is request:
            self._looked_up = None
        state = self._request_states.get(request.request_id)
        if state is None:
            return
        computed_tokens = min(state.cached_tokens, request.num_computed_tokens)
        # A request that extends a finished request reads all of it. A preempted request that comes
        # back reads all but its last token.
        own_tokens = computed_tokens if request.is_finished() else request.num_tokens - 1
        key_table = self._key_table
        runs = state.begin_last_step(key_table, computed_tokens, own_tokens)
        if runs is not None:
            self._cache_runs(request, state, key_table, runs)
            if unreachable := state.end_last_step(key_table):
                self.pool.discard(unreachable)
        if self.inside is not None:
            self._settle_inside(self.inside, request, state)
        if request.is_finished():
            del self._request_states[request.request_id]

    @property
    def _key_table(self) -> Any:
        """The table of cached blocks, by key."""
        return self.pool.block_pool.cached_block_hash_to_block

    def _cache_runs(
        self, request: Request, state: RetainedRequest, key_table: Any, runs: list[GroupRun]
    ) -> None:
        for place, start, stop in runs:
            group = self._groups[place]
            if self.inside is not None and place >= len(self.sparse_groups):
                blocks = group.manager.req_to_blocks[request.request_id][start:stop]
                self.inside.note_full(
                    self.inside.progress[request.request_id],
                    start * group.block_tokens,
                    (block.block_id for block in blocks),
                )
            if self._caches_itself[place]:
                group.manager.cache_blocks(request, stop * group.block_tokens)
            else:
                self.pool.cache(request, group, range(start, stop))
        state.cache_quiet_runs(key_table)

    def _admit(self, request: Request, state: RetainedRequest | None) -> RetainedRequest:
        if state is None:
            state = self._new_request_state(self.cache_state, request)
            self._request_states[request.request_id] = state
        policy = self.policy
        num_prompt_tokens = request.num_prompt_tokens
        inside = self.inside
        inner_tokens = inside.hits_tokens.pop(request.request_id, 0) if inside else 0
        hit_tokens = state.admit(self._key_table, inner_tokens)
        replay_tokens = policy.replay_boundary_tokens(num_prompt_tokens)
        plan: dict[int, Reason] = {replay_tokens: Reason(Origin.PROMPT)}
        rungs: list[tuple[int, int]] = []
        stops_tokens: list[int] = []
        looked_up, self._looked_up = self._looked_up, None
        if policy.is_adaptive:
            if looked_up and looked_up[0] is request and looked_up[1].hit_tokens == hit_tokens:
                demand = looked_up[1]
            else:
                demand = self._find_demand(state, request, hit_tokens)
            report_unusable_hints(request, self._asked_geometry)
            count_losses(demand, self._asked_geometry, self._stats)
            stops_tokens = self._stops_tokens(demand, request)
            rungs = policy.rungs(num_prompt_tokens, hit_tokens)
            plan.update(demand.boundaries)
        else:
            plan.update(_junction(request, self._asked_geometry, hit_tokens))
        if inside is not None:
            ends = inside.ends_of_prompt(num_prompt_tokens)
            asked = {tokens: plan[tokens] for tokens in plan if tokens != replay_tokens}
            inside.admit(request.request_id, hit_tokens, num_prompt_tokens, asked)
            if policy.is_adaptive and replay_tokens not in (*ends, *asked):
                # A prompt that ends inside its last block resumes there, and falls back to here.
                del plan[replay_tokens]
                if replay_tokens > hit_tokens:
                    rungs = [(0, replay_tokens), *((rung + 1, at) for rung, at in rungs)]
        planned = [(tokens, reason.origin, reason.step) for tokens, reason in sorted(plan.items())]
        state.plan(planned, rungs, stops_tokens, replay_tokens)
        return state

    def _stops_tokens(self, demand: Demand, request: Request) -> list[int]:
        """Boundaries past the hit at which prefill steps end to leave a state, ascending.

        Upstream ends a step at the last multiple of a block in a prompt. In a prompt of whole
        blocks, this is the prompt's end. The same prompt resumes one block earlier, where no state
        would be.
        """
        num_prompt_tokens = request.num_prompt_tokens
        if self.inside is not None:
            ends = self.inside.ends_of_prompt(num_prompt_tokens)
        else:
            ends = [self.policy.replay_boundary_tokens(num_prompt_tokens)]
        stops_tokens = {*demand.stops_tokens, *ends}
        return sorted(tokens for tokens in stops_tokens if tokens > demand.hit_tokens)

    def _find_demand(self, state: RetainedRequest, request: Request, hit_tokens: int) -> Demand:
        num_prompt_tokens = request.num_prompt_tokens
        shared, evicted_tokens = state.find_prefixes(self._key_table, hit_tokens, num_prompt_tokens)
        unit_tokens = self.inside.unit_tokens if self.inside is not None else 0
        lengths = [
            (tokens, unit_tokens or group.block_tokens)
            for tokens, group in zip(shared, self.full_groups, strict=True)
        ]
        return find_demand(request, self._asked_geometry, hit_tokens, lengths, evicted_tokens)

    @property
    def _asked_geometry(self) -> HitGeometry:
        """Where requests ask for boundaries."""
        return self.policy.geometry if self.inside is None else self.inside.geometry

    def _cache_inside(
        self,
        inside: InsideBlocks,
        request: Request,
        state: RetainedRequest,
        num_computed_tokens: int,
    ) -> None:
        """Cache what the steps before have computed inside blocks, and the state of this step.

        Args:
            num_computed_tokens: As in `cache`. ``request.num_computed_tokens`` are those of the
                steps before.
        """
        progress = inside.progress[request.request_id]
        before_tokens = min(request.num_computed_tokens, num_computed_tokens)
        self._key_rows(inside, request, progress, before_tokens)
        if progress.left_tokens and progress.left_tokens <= before_tokens:
            self._keep_inside(inside, request, state, progress)
        if num_computed_tokens not in progress.planned or before_tokens >= num_computed_tokens:
            return
        left = [
            self.pool.cache_state_inside(request, group, num_computed_tokens)
            for group in self.sparse_groups
        ]
        if all(left):
            progress.left_tokens = num_computed_tokens

    def _key_rows(
        self, inside: InsideBlocks, request: Request, progress: InnerProgress, upto_tokens: int
    ) -> None:
        upto_tokens = min(upto_tokens, request.num_prompt_tokens)
        for tokens in inside.ends_to_key(progress, upto_tokens):
            for group in self.full_groups:
                self.pool.cache_inside(request, group, tokens)

    def _keep_inside(
        self,
        inside: InsideBlocks,
        request: Request,
        state: RetainedRequest,
        progress: InnerProgress,
    ) -> None:
        """Make a checkpoint of a state that was left, or wait for the next step.

        Another request may have left the same state, and a lookup may find the block of that
        request. If that block gives its key away next, a checkpoint would keep a block without key.
        """
        tokens = progress.left_tokens
        gives_key_away = self.pool.gives_key_away
        if any(gives_key_away(request, group, tokens) for group in self.sparse_groups):
            return
        progress.left_tokens = 0
        reason = progress.planned[tokens]
        full_tokens = inside.geometry.full_tokens(tokens)
        of_groups = [full_tokens[group.geometry_index] for group in self.full_groups]
        state.keep_inside(self._key_table, tokens, reason.origin, reason.step, of_groups)

    def _settle_inside(
        self, inside: InsideBlocks, request: Request, state: RetainedRequest
    ) -> None:
        """Settle the boundaries inside blocks of a request that is finished or preempted."""
        progress = inside.progress.pop(request.request_id, None)
        if progress is None:
            return
        computed_tokens = request.num_computed_tokens
        self._key_rows(inside, request, progress, computed_tokens)
        # The repair `preempted-in-step` uncaches a state that was never computed.
        if 0 < progress.left_tokens <= computed_tokens:
            self._keep_inside(inside, request, state, progress)


def _junction(request: Request, geometry: HitGeometry, hit_tokens: int) -> Plan:
    """The boundary at which upstream saw requests part. Since vLLM 0.30, upstream keeps it.

    A group that looks ahead may not reach this boundary. So the last boundary that the group can
    reach counts, too.
    """
    seen_tokens = getattr(request, "shared_prefix_boundary", 0)
    aligned_tokens = seen_tokens // geometry.unit_tokens * geometry.unit_tokens
    return {
        tokens: Reason(Origin.JUNCTION)
        for tokens in (geometry.reachable_tokens(seen_tokens), aligned_tokens)
        if tokens > hit_tokens and geometry.is_boundary(tokens)
    }
