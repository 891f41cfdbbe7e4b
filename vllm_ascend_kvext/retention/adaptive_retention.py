# SPDX-License-Identifier: Apache-2.0
"""Retention that follows what requests ask for: caches densely, and chooses what stays longest.

Every block that a lookup can reach is cached, as dense caching does. Some boundaries become
checkpoints. Where blocks run short, those that no checkpoint needs are reallocated first::

      request   ├── hit ──┼───── computed ─────┼────────┤
      cached    ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    full attention
                ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■    sliding window
      needed            ■■■                  ■■■      ■■■    tails of checkpoints; the rest of the
                                                             window is surplus once it is freed

Which boundaries, `RetentionPolicy` and `DemandFinder` say; what gives way, `CheckpointTree`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.checkpoint_tree import CheckpointTree
from vllm_ascend_kvext.retention.checkpoints import Checkpoint
from vllm_ascend_kvext.retention.demand import DemandFinder, count_losses
from vllm_ascend_kvext.retention.hints import report_unusable_hints
from vllm_ascend_kvext.retention.policy import Plan, RetentionPolicy
from vllm_ascend_kvext.retention.protocols import CachedBlock, CheckpointPool, ManagedGroup, Request
from vllm_ascend_kvext.retention.reasons import STEPS_END_AT, Origin, Reason
from vllm_ascend_kvext.retention.request_blocks import RequestBlocks
from vllm_ascend_kvext.retention.stats import RetentionStats


@dataclass(slots=True)
class _GroupProgress:
    """What one request has cached in one sparse group.

    Attributes:
        group: The group.
        next_block: The first block that is not seen to.
        behind_hit: Blocks that the lookup read and dropped from the hit: they are cached, and the
            request computes them again.
        left: Blocks that have left the request's window and that a coming checkpoint needs, by
            index.
    """

    group: ManagedGroup
    next_block: int = 0
    behind_hit: range = range(0)
    left: dict[int, CachedBlock] = field(default_factory=dict)


@dataclass(slots=True)
class _Progress:
    """What is known of one request.

    Attributes:
        blocks: Its cached blocks.
        groups: Per sparse group.
        plan: The boundaries to keep.
        replay_tokens: The last boundary of its prompt.
        boundary_tokens: The latest boundary that it has passed.
        next_event_tokens: The tokens to cache at which there is something to do.
        next_skip_tokens: The smallest number of computed tokens at which a block leaves a window.
        cached_tokens: How many tokens the scheduler has asked to cache.
        last: The last checkpoint that it has resumed from or passed.
        supplied: Checkpoints that consist of its blocks; kept until it is released.
        holds_blocks: False while the request is preempted.
    """

    request: Request
    blocks: RequestBlocks
    groups: tuple[_GroupProgress, ...]
    plan: Plan = field(default_factory=dict)
    replay_tokens: int = 0
    boundary_tokens: int = 0
    next_event_tokens: int = 0
    next_skip_tokens: int = 0
    cached_tokens: int = 0
    last: Checkpoint | None = None
    supplied: list[Checkpoint] = field(default_factory=list)
    holds_blocks: bool = False


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
        stats: What to report of it.
        tree: The checkpoints.
    """

    policy: RetentionPolicy
    sparse_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]
    pool: CheckpointPool
    skips_by_tokens: bool = True
    stats: RetentionStats = field(default_factory=RetentionStats)
    tree: CheckpointTree = field(init=False)
    _demand: DemandFinder = field(init=False)
    _progress: dict[str, _Progress] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        geometry = self.policy.geometry
        block_tokens = [group.block_tokens for group in self.full_groups]
        self.tree = CheckpointTree(self.pool, block_tokens, geometry.unit_tokens, self.stats)
        self._demand = DemandFinder(self.tree, geometry, self.full_groups, self.pool)

    def cache(self, request: Request, num_computed_tokens: int) -> None:
        progress = self._progress.get(request.request_id)
        if progress is None or not progress.holds_blocks:
            progress = self._admit(request, progress)
        progress.cached_tokens = num_computed_tokens
        if num_computed_tokens < progress.next_event_tokens:
            return
        self._cache_sparse_groups(progress)
        # The request itself, should it be preempted, can hit all but its last token. A boundary
        # at its very end waits for the next token, or for the end of the request.
        self._pass_boundaries(progress, min(num_computed_tokens, request.num_tokens - 1))
        progress.next_event_tokens = self._find_next_event(progress)

    def quiet_until_tokens(self, request: Request) -> int:
        progress = self._progress.get(request.request_id)
        return progress.next_event_tokens if progress and progress.holds_blocks else 0

    def note_quiet_step(self, request: Request, num_computed_tokens: int) -> None:
        cached_tokens = min(num_computed_tokens, request.num_tokens)
        self._progress[request.request_id].cached_tokens = cached_tokens

    def before_skip(self, request_id: str, total_computed_tokens: int) -> int | None:
        """Hold on to blocks that leave the window although the next checkpoint needs them.

        A boundary opens only when every group that looks ahead has its block past it, and the
        latest one stays where a preempted request resumes. By then the first blocks of a tail may
        have left the window.
        """
        progress = self._progress.get(request_id)
        if progress is None or not progress.holds_blocks:
            return total_computed_tokens
        computed_tokens = total_computed_tokens - progress.request.num_output_placeholders
        if computed_tokens < progress.next_skip_tokens:
            return None
        geometry = self.policy.geometry
        unit_tokens = geometry.unit_tokens
        first_tokens = progress.boundary_tokens or unit_tokens
        for boundary_tokens in range(first_tokens, computed_tokens + 1, unit_tokens):
            runs = geometry.tails(boundary_tokens)
            for of_group in progress.groups:
                self._hold(progress, of_group, runs[of_group.group.geometry_index], computed_tokens)
        if self.skips_by_tokens:
            progress.next_skip_tokens = geometry.next_skip_tokens(computed_tokens)
        return computed_tokens

    def next_stop_tokens(self, request: Request, computed_tokens: int) -> int | None:
        if not self.policy.geometry.has_states:
            return None
        progress = self._progress.get(request.request_id)
        if progress is not None and progress.holds_blocks:
            plan = progress.plan
        else:
            plan = self._demand.find(request, computed_tokens).boundaries
        stops = [
            tokens
            for tokens, reason in plan.items()
            if tokens > computed_tokens and reason.origin in STEPS_END_AT
        ]
        if interval_tokens := self.policy.interval_tokens:
            stops.append((computed_tokens // interval_tokens + 1) * interval_tokens)
        return min(stops, default=None)

    def release(self, request: Request) -> None:
        progress = self._progress.get(request.request_id)
        if progress is None:
            return
        if progress.holds_blocks:
            computed_tokens = min(progress.cached_tokens, request.num_computed_tokens)
            if computed_tokens < progress.cached_tokens:
                self._forget_uncomputed(progress, computed_tokens)
            self._cache_sparse_groups(progress)
            # Whoever extends a finished request reads all of it; the request itself, when it
            # comes back, all but its last token.
            own_tokens = computed_tokens if request.is_finished() else request.num_tokens - 1
            self._pass_boundaries(progress, min(computed_tokens, own_tokens), is_last=True)
            progress.holds_blocks = False
            self._uncache_unreachable(progress)
            for of_group in progress.groups:
                self.tree.release(of_group.left.values())
                of_group.left.clear()
            progress.supplied.clear()
            self._move(progress, None)
            self.tree.end_request()
        if request.is_finished():
            del self._progress[request.request_id]

    def _admit(self, request: Request, progress: _Progress | None) -> _Progress:
        geometry = self.policy.geometry
        if progress is None:
            progress = self._progress[request.request_id] = _Progress(
                request,
                RequestBlocks(request, self.pool, geometry, self.full_groups, self.sparse_groups),
                tuple(_GroupProgress(group) for group in self.sparse_groups),
            )
        # The least of all groups: of tokens that a connector loads, upstream counts those that no
        # window reads any more as cached.
        hit_tokens = min(
            group.manager.num_cached_block.get(request.request_id, 0) * group.block_tokens
            for group in (*self.sparse_groups, *self.full_groups)
        )
        hit_tokens = hit_tokens // geometry.unit_tokens * geometry.unit_tokens
        progress.boundary_tokens = hit_tokens
        progress.next_event_tokens = progress.next_skip_tokens = 0
        progress.holds_blocks = True
        runs = geometry.tails(hit_tokens)
        for of_group in progress.groups:
            run = runs[of_group.group.geometry_index]
            of_group.next_block = hit_tokens // of_group.group.block_tokens
            of_group.behind_hit = range(of_group.next_block, run.stop)
            for block_index in of_group.behind_hit:
                block = self.pool.find(request, of_group.group, block_index)
                if block is not None:
                    self.tree.refresh(block)
        if hit_tokens:
            self._resume(progress, hit_tokens)
        demand = self._demand.find(request, hit_tokens)
        report_unusable_hints(request)
        count_losses(demand, geometry, self.stats)
        for tokens, reason in demand.boundaries.items():
            if reason.origin is Origin.WANTED:
                self.tree.want(progress.blocks.key(tokens))
        progress.plan = self.policy.plan(
            request.num_prompt_tokens,
            hit_tokens,
            demand.boundaries,
            self.tree.rates.is_worth_trying,
        )
        progress.replay_tokens = self.policy.replay_boundary_tokens(request.num_prompt_tokens)
        return progress

    def _resume(self, progress: _Progress, hit_tokens: int) -> None:
        node = self.tree.nodes.get(progress.blocks.key(hit_tokens))
        if node is None or not node.has_tail:
            # It was hit because of blocks that other boundaries need, or that were surplus.
            node = self._keep(progress, hit_tokens, Reason(Origin.OVERLAP))
        if node is not None:
            self.stats.junctions_hit += node.origin is Origin.JUNCTION
            self.tree.use(node)
            self._move(progress, node)

    def _keep(self, progress: _Progress, boundary_tokens: int, reason: Reason) -> Checkpoint | None:
        """Make a checkpoint of a boundary, if all that a hit reads there is cached."""
        blocks = progress.blocks
        tail = blocks.tail(boundary_tokens)
        if tail is None:
            return None
        ahead = blocks.ahead(boundary_tokens)
        known = self.tree.nodes.get(blocks.key(boundary_tokens))
        is_supplied = known is None or not known.has_tail
        node = self.tree.add(blocks, boundary_tokens, tail, ahead, reason, progress.last)
        if node is not None:
            self._move(progress, node)
            if is_supplied:
                progress.supplied.append(node)
        return node

    def _move(self, progress: _Progress, node: Checkpoint | None) -> None:
        """A request has come to another checkpoint, or to none."""
        if node is not None:
            self.tree.arrive(node)
        if progress.last is not None:
            self.tree.leave(progress.last)
        progress.last = node

    def _cache_sparse_groups(self, progress: _Progress) -> None:
        """Cache every full block that some hit reads."""
        geometry = self.policy.geometry
        request = progress.request
        for of_group in progress.groups:
            group = of_group.group
            stop = progress.cached_tokens // group.block_tokens
            if stop <= of_group.next_block:
                continue
            run = range(of_group.next_block, stop)
            for reachable in geometry.reachable_runs(group.geometry_index, run):
                for part in self._uncached_parts(progress, of_group, reachable):
                    self.pool.cache(request, group, part)
            of_group.next_block = stop
            group.manager.num_cached_block[request.request_id] = stop

    def _uncached_parts(
        self, progress: _Progress, of_group: _GroupProgress, run: range
    ) -> list[range]:
        """Maximal parts of a run whose blocks hold KV and are not cached."""
        blocks = progress.blocks.table(of_group.group)
        if run.start >= of_group.behind_hit.stop:
            in_run = blocks[run.start : run.stop]
            if all([not block.is_null and block._block_hash is None for block in in_run]):
                return [run]
        parts: list[range] = []
        for index in run:
            block = blocks[index]
            if block.is_null or block._block_hash is not None:
                continue
            if index in of_group.behind_hit and self.pool.find(
                progress.request, of_group.group, index
            ):
                continue
            if parts and parts[-1].stop == index:
                parts[-1] = range(parts[-1].start, index + 1)
            else:
                parts.append(range(index, index + 1))
        return parts

    def _pass_boundaries(
        self, progress: _Progress, reach_tokens: int, is_last: bool = False
    ) -> None:
        """Keep the boundaries that ``reach_tokens`` tokens open.

        Args:
            is_last: Whether the request is about to give its blocks back: the latest boundary is
                where it, or what follows it, resumes.
        """
        geometry = self.policy.geometry
        before_tokens = progress.boundary_tokens
        boundary_tokens = max(geometry.reachable_tokens(reach_tokens), before_tokens)
        if not self._has_states(progress, boundary_tokens):
            if not is_last:
                return
            boundary_tokens = before_tokens
        if boundary_tokens > before_tokens:
            self._cache_full_groups(progress, boundary_tokens)
            progress.boundary_tokens = boundary_tokens
        reasons = dict(
            self.policy.lasting_boundaries(
                progress.plan, before_tokens, boundary_tokens, self.tree.rates.is_worth_trying
            )
        )
        if geometry.has_states and before_tokens < boundary_tokens < progress.replay_tokens:
            reasons.setdefault(boundary_tokens, Reason(Origin.CHUNK))
        if is_last and boundary_tokens:
            reasons[boundary_tokens] = Reason(Origin.LATEST)
        for tokens, reason in sorted(reasons.items()):
            self._keep(progress, tokens, reason)
        if boundary_tokens > before_tokens:
            self._let_go(progress)

    def _cache_full_groups(self, progress: _Progress, boundary_tokens: int) -> None:
        ends = self.policy.geometry.full_tokens(boundary_tokens)
        for group in self.full_groups:
            num_tokens = min(ends[group.geometry_index], progress.cached_tokens)
            group.manager.cache_blocks(progress.request, num_tokens)

    def _has_states(self, progress: _Progress, boundary_tokens: int) -> bool:
        """Whether every state group has the state of a boundary: a step has to end there."""
        geometry = self.policy.geometry
        if not geometry.has_states or boundary_tokens <= progress.boundary_tokens:
            return True
        runs = geometry.tails(boundary_tokens)
        for of_group in progress.groups:
            index = of_group.group.geometry_index
            if geometry.groups[index].kind is GroupKind.STATE:
                blocks = progress.blocks.table(of_group.group)
                for block_index in runs[index]:
                    is_there = block_index < len(blocks) and not blocks[block_index].is_null
                    if not (is_there or block_index in of_group.left):
                        return False
        return True

    def _hold(
        self, progress: _Progress, of_group: _GroupProgress, run: range, computed_tokens: int
    ) -> None:
        """Hold on to those blocks of a run that are about to leave the window."""
        group, left = of_group.group, of_group.left
        skipped_tokens = group.manager.get_num_skipped_tokens(computed_tokens)
        stop = min(run.stop, skipped_tokens // group.block_tokens)
        if run.start >= stop:
            return
        blocks = progress.blocks.table(group)
        for block_index in range(run.start, min(stop, len(blocks))):
            block = blocks[block_index]
            if block._block_hash is not None and block_index not in left:
                left[block_index] = block, block._block_hash
                self.tree.need(block)

    def _let_go(self, progress: _Progress) -> None:
        """Let go of what was held for boundaries below the latest one."""
        runs = self.policy.geometry.tails(progress.boundary_tokens)
        for of_group in progress.groups:
            start, left = runs[of_group.group.geometry_index].start, of_group.left
            passed = [index for index in left if index < start]
            if passed:
                self.tree.release([left.pop(index) for index in passed])

    def _find_next_event(self, progress: _Progress) -> int:
        """The tokens to cache at which a block is to be cached, or a boundary opens."""
        geometry = self.policy.geometry
        opens_tokens = geometry.opens_at_tokens(progress.boundary_tokens + geometry.unit_tokens)
        if opens_tokens <= progress.cached_tokens:
            # It waits for the request's next token, or for a state.
            opens_tokens = progress.cached_tokens + 1
        return min(
            opens_tokens,
            *(
                (
                    geometry.next_reachable_block(
                        of_group.group.geometry_index, of_group.next_block
                    )
                    + 1
                )
                * of_group.group.block_tokens
                for of_group in progress.groups
            ),
        )

    def _uncache_unreachable(self, progress: _Progress) -> None:
        """Uncache what the request cached for boundaries that it did not reach."""
        runs = self.policy.geometry.tails(progress.boundary_tokens)
        for of_group in progress.groups:
            group = of_group.group
            blocks = progress.blocks.table(group)
            stop = max(runs[group.geometry_index].stop, of_group.behind_hit.stop)
            unreachable = [
                block
                for block in blocks[stop : of_group.next_block]
                if block._block_hash is not None
                and block.ref_cnt == 1
                and not self.tree.needs.count[block.block_id]
            ]
            if unreachable:
                self.pool.discard(unreachable)

    def _forget_uncomputed(self, progress: _Progress, computed_tokens: int) -> None:
        """Uncache blocks that were cached for tokens which then were not computed.

        Upstream caches a block when its tokens are scheduled. A request that is preempted within
        the same scheduling step (by priority) never computes them.
        """
        reachable_tokens = self.policy.geometry.reachable_tokens(computed_tokens)
        for node in progress.supplied:
            if node.boundary_tokens > reachable_tokens:
                self.tree.remove(node)
        progress.cached_tokens = computed_tokens
        progress.boundary_tokens = min(progress.boundary_tokens, reachable_tokens)
        for of_group in progress.groups:
            end = computed_tokens // of_group.group.block_tokens
            of_group.next_block = min(of_group.next_block, end)
        for group in (*self.sparse_groups, *self.full_groups):
            uncomputed = progress.blocks.table(group)[computed_tokens // group.block_tokens :]
            cached = [block for block in uncomputed if block._block_hash is not None]
            if cached:
                self.pool.discard(cached)
