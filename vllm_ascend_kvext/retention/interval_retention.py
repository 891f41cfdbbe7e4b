# SPDX-License-Identifier: Apache-2.0
"""Retention by a fixed interval: keeps the tails of a request's boundaries, and drops the rest.

Per request and sparse group the tails of the planned boundaries stay cached, and that of the
latest boundary, where the next turn, or the same request after a preemption, resumes. The latter
moves on with the request; the blocks it leaves behind lose their hash and go to the front of the
free queue::

      boundaries     0 ......... N ......... 2N .... latest
      cached                   ■■■         ■■■      ■■■         tails only
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.runs import joined
from vllm_ascend_kvext.retention.policy import Plan, RetentionPolicy
from vllm_ascend_kvext.retention.protocols import ManagedGroup, Pool, Request
from vllm_ascend_kvext.retention.stats import RetentionStats
from vllm_ascend_kvext.retention.tails import GroupTails


@dataclass(slots=True)
class _Progress:
    """What is kept for one request.

    Attributes:
        tails: Per sparse group.
        plan: The boundaries whose tails are to outlive the request.
        boundary_tokens: The latest boundary; its tails are cached.
        next_event_tokens: The smallest reach at which there is something to do.
        next_skip_tokens: The smallest number of computed tokens at which a block leaves a window.
        cached_tokens: How many tokens the scheduler has asked to cache.
        holds_blocks: False while the request is preempted.
    """

    request: Request
    tails: tuple[GroupTails, ...]
    plan: Plan = field(default_factory=dict)
    boundary_tokens: int = 0
    next_event_tokens: int = 0
    next_skip_tokens: int = 0
    cached_tokens: int = 0
    holds_blocks: bool = False


@dataclass(slots=True)
class IntervalRetention:
    """Implements `Retention`.

    Attributes:
        policy: Which boundaries to keep.
        sparse_groups: Groups of which a hit reads a tail only: sliding windows and states.
        full_groups: Cached from the first token up to what the latest boundary needs.
        pool: The pool of all groups' blocks.
        skips_by_tokens: Whether the blocks that leave a window follow from the number of computed
            tokens alone. On Ascend they depend on the steps in flight as well, and states on
            what was allocated.
        stats: What to report of it.
    """

    policy: RetentionPolicy
    sparse_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]
    pool: Pool
    skips_by_tokens: bool = True
    stats: RetentionStats = field(default_factory=RetentionStats)
    _progress: dict[str, _Progress] = field(init=False, default_factory=dict)

    def cache(self, request: Request, num_computed_tokens: int) -> None:
        progress = self._progress.get(request.request_id)
        if progress is None or not progress.holds_blocks:
            progress = self._admit(request, progress)
        progress.cached_tokens = num_computed_tokens
        if num_computed_tokens < progress.next_event_tokens:
            return
        # The request itself, should it be preempted, can hit all but its last token. A boundary
        # at its very end waits for the next token, or for the end of the request.
        reach_tokens = min(num_computed_tokens, request.num_tokens - 1)
        if reach_tokens >= progress.next_event_tokens:
            self._advance(progress, reach_tokens)

    def quiet_until_tokens(self, request: Request) -> int:
        progress = self._progress.get(request.request_id)
        return progress.next_event_tokens if progress and progress.holds_blocks else 0

    def note_quiet_step(self, request: Request, num_computed_tokens: int) -> None:
        cached_tokens = min(num_computed_tokens, request.num_tokens)
        self._progress[request.request_id].cached_tokens = cached_tokens

    def before_skip(self, request_id: str, total_computed_tokens: int) -> int | None:
        """Save blocks that leave the window although a coming boundary needs them.

        A boundary opens only when every group that looks ahead has its block past it. By then
        the first blocks of a tail may have left the window.
        """
        progress = self._progress.get(request_id)
        if progress is None or not progress.holds_blocks:
            return total_computed_tokens
        computed_tokens = total_computed_tokens - progress.request.num_output_placeholders
        if computed_tokens < progress.next_skip_tokens:
            return None
        geometry = self.policy.geometry
        for boundary in self._coming_boundaries(progress, computed_tokens):
            runs = geometry.tails(boundary)
            for group, tails in zip(self.sparse_groups, progress.tails, strict=True):
                run = runs[group.geometry_index]
                tails.keep_leaving(run, computed_tokens, progress.cached_tokens)
        if self.skips_by_tokens:
            progress.next_skip_tokens = geometry.next_skip_tokens(computed_tokens)
        return computed_tokens

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int | None:
        return None  # steps end where upstream ends them

    def release(self, request: Request) -> None:
        progress = self._progress.get(request.request_id)
        if progress is None:
            return
        if progress.holds_blocks:
            computed_tokens = min(progress.cached_tokens, request.num_computed_tokens)
            # Of what was scheduled and not computed nothing stays cached.
            progress.cached_tokens = computed_tokens
            progress.boundary_tokens = min(
                progress.boundary_tokens, self.policy.geometry.reachable_tokens(computed_tokens)
            )
            # Whoever extends a finished request reads all of it; the request itself, when it
            # comes back, all but its last token.
            own_tokens = computed_tokens if request.is_finished() else request.num_tokens - 1
            progress.holds_blocks = False
            self._advance(progress, min(computed_tokens, own_tokens))
        if request.is_finished():
            del self._progress[request.request_id]

    def _admit(self, request: Request, progress: _Progress | None) -> _Progress:
        if progress is None:
            progress = self._progress[request.request_id] = _Progress(
                request,
                tuple(GroupTails(request, group, self.pool) for group in self.sparse_groups),
            )
        geometry = self.policy.geometry
        # The least of all groups: of tokens that a connector loads, upstream counts those that no
        # window reads any more as cached.
        hit_tokens = min(
            group.manager.num_cached_block.get(request.request_id, 0) * group.block_tokens
            for group in (*self.sparse_groups, *self.full_groups)
        )
        progress.boundary_tokens = hit_tokens // geometry.unit_tokens * geometry.unit_tokens
        progress.next_event_tokens = progress.next_skip_tokens = 0
        progress.holds_blocks = True
        runs = geometry.tails(progress.boundary_tokens)
        for group, tails in zip(self.sparse_groups, progress.tails, strict=True):
            run = runs[group.geometry_index]
            tails.drop_all_but([run])
            tails.admit(range(progress.boundary_tokens // group.block_tokens, run.stop))
        progress.plan = self.policy.plan(request.num_prompt_tokens, progress.boundary_tokens)
        return progress

    def _advance(self, progress: _Progress, reach_tokens: int) -> None:
        """Move the latest boundary to what ``reach_tokens`` tokens open."""
        geometry = self.policy.geometry
        request = progress.request
        boundary = max(geometry.reachable_tokens(reach_tokens), progress.boundary_tokens)
        if not self._has_states(progress, boundary):
            progress.next_event_tokens = geometry.opens_at_tokens(boundary + geometry.unit_tokens)
            boundary = progress.boundary_tokens
            if progress.holds_blocks:
                return
        boundaries = self.policy.lasting_boundaries(
            progress.plan, progress.boundary_tokens, boundary
        )
        lasting = [geometry.tails(tokens) for tokens, _ in boundaries]
        self.stats.checkpoints_kept += len(lasting)
        progress.boundary_tokens = boundary
        progress.next_event_tokens = geometry.opens_at_tokens(boundary + geometry.unit_tokens)
        coming = self._coming_boundaries(progress, progress.cached_tokens)
        for_now = [geometry.tails(tokens) for tokens in (boundary, *coming)]
        for group, tails in zip(self.sparse_groups, progress.tails, strict=True):
            index = group.geometry_index
            if lasting:
                lasting_runs = joined([run[index] for run in lasting])
                tails.keep(lasting_runs, progress.cached_tokens)
            tails.keep_for_now(for_now[0][index], progress.cached_tokens)
            if lasting:
                tails.make_last(lasting_runs)
            num_cached_blocks = progress.cached_tokens // group.block_tokens
            group.manager.num_cached_block[request.request_id] = num_cached_blocks
        full_tokens = geometry.full_tokens(boundary)
        for group in self.full_groups:
            num_tokens = min(full_tokens[group.geometry_index], progress.cached_tokens)
            group.manager.cache_blocks(request, num_tokens)
        for group, tails in zip(self.sparse_groups, progress.tails, strict=True):
            runs = [run[group.geometry_index] for run in for_now]
            tails.drop_all_but(runs if progress.holds_blocks else runs[:1])

    def _has_states(self, progress: _Progress, boundary_tokens: int) -> bool:
        """Whether every state group has the state of a boundary: a step has to end there."""
        if not self.policy.geometry.has_states or boundary_tokens <= progress.boundary_tokens:
            return True
        runs = self.policy.geometry.tails(boundary_tokens)
        return all(
            tails.holds(runs[group.geometry_index])
            for group, tails in zip(self.sparse_groups, progress.tails, strict=True)
            if self.policy.geometry.groups[group.geometry_index].kind is GroupKind.STATE
        )

    def _coming_boundaries(self, progress: _Progress, num_tokens: int) -> range:
        """Boundaries that are passed, but open only once more tokens are computed."""
        unit_tokens = self.policy.geometry.unit_tokens
        return range(progress.boundary_tokens + unit_tokens, num_tokens + 1, unit_tokens)
