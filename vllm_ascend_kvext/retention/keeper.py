# SPDX-License-Identifier: Apache-2.0
"""Keeps the tails of a request's boundaries in the prefix cache, and lets the others go.

Per request and sliding-window group at most two tails stay cached besides the interval's
checkpoints: that of the replay boundary, and that of the latest boundary, where the next turn or
the same request after a preemption resumes. The latter moves on with the request; the blocks it
leaves behind lose their hash and go to the front of the free queue.

Knows the block manager only through the attributes that the protocols below name; upstream's
objects have them in every supported version.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_ascend_kvext.retention.policy import RetentionPolicy


class Block(Protocol):
    """``vllm.v1.core.kv_cache_utils.KVCacheBlock``."""

    block_id: int
    ref_cnt: int
    is_null: bool

    @property
    def block_hash(self) -> bytes | None: ...


class Request(Protocol):
    """``vllm.v1.request.Request``."""

    request_id: str
    num_computed_tokens: int
    num_prompt_tokens: int

    @property
    def num_tokens(self) -> int: ...

    def is_finished(self) -> bool: ...


class GroupManager(Protocol):
    """``vllm.v1.core.single_type_kv_cache_manager.SingleTypeKVCacheManager``."""

    block_size: int
    kv_cache_group_id: int
    block_pool: Any
    req_to_blocks: dict[str, list[Any]]
    num_cached_block: dict[str, int]

    def cache_blocks(self, request: Any, num_tokens: int) -> None: ...

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class ManagedGroup:
    """A KV cache group: its manager, and its place in ``HitGeometry.groups``."""

    manager: GroupManager
    geometry_index: int
    block_tokens: int


@dataclass(slots=True)
class _Progress:
    """What is kept for one request.

    Attributes:
        boundary_tokens: The latest boundary; its tails are cached.
        next_event_tokens: The smallest reach at which there is something to do.
        cached_tokens: How many tokens the scheduler has asked to cache.
        released: Whether the request holds no blocks (it was preempted).
        rolling: Per sliding-window group, the blocks that are cached for the latest boundary
            alone: block index to the block and its hash when it was cached.
    """

    request: Request
    boundary_tokens: int
    next_event_tokens: int
    rolling: tuple[dict[int, tuple[Block, bytes]], ...]
    cached_tokens: int = 0
    released: bool = False


@dataclass(slots=True)
class TailKeeper:
    """Caches blocks of all groups of one coordinator.

    Attributes:
        policy: Which boundaries to keep.
        window_groups: The sparse groups.
        full_groups: Cached from the first token up to what the latest boundary needs.
        discard: Takes the hash off cached blocks and, where they are free, moves them to the
            front of the free queue.
    """

    policy: RetentionPolicy
    window_groups: tuple[ManagedGroup, ...]
    full_groups: tuple[ManagedGroup, ...]
    discard: Callable[[list[Block]], None]
    _progress: dict[str, _Progress] = field(init=False, default_factory=dict)

    def cache(self, request: Request, num_tokens: int) -> None:
        """Cache what is worth keeping once ``num_tokens`` tokens of a request are scheduled."""
        progress = self._progress.get(request.request_id)
        if progress is None or progress.released:
            progress = self._begin(request, progress)
        progress.cached_tokens = num_tokens
        # The request itself, should it be preempted, can hit all but its last token. A boundary
        # at its very end waits for the next token, or for the end of the request.
        reach_tokens = min(num_tokens, request.num_tokens - 1)
        if reach_tokens >= progress.next_event_tokens:
            self._advance(progress, reach_tokens)

    def before_skip(self, request_id: str, total_computed_tokens: int) -> None:
        """Save blocks that leave the window although a coming boundary needs them.

        A boundary opens only when every group that looks ahead has its block past it. By then
        the first blocks of a tail may have left the window.
        """
        progress = self._progress.get(request_id)
        if progress is None or progress.released:
            return
        unit_tokens = self.policy.geometry.unit_tokens
        first = progress.boundary_tokens + unit_tokens
        if first > total_computed_tokens:
            return
        for boundary in range(first, total_computed_tokens + 1, unit_tokens):
            tails = self.policy.geometry.tails(boundary)
            for group, rolling in zip(self.window_groups, progress.rolling, strict=True):
                skipped_tokens = group.manager.get_num_skipped_tokens(total_computed_tokens)
                leaving = range(
                    tails[group.geometry_index].start,
                    min(tails[group.geometry_index].stop, skipped_tokens // group.block_tokens),
                )
                self._store(progress, group, [leaving], rolling)

    def release(self, request: Request) -> None:
        """Settle what a request leaves behind; call it before its blocks are freed."""
        progress = self._progress.get(request.request_id)
        if progress is None:
            return
        finished = request.is_finished()
        if not progress.released:
            computed_tokens = min(progress.cached_tokens, request.num_computed_tokens)
            if computed_tokens < progress.cached_tokens:
                self._forget_uncomputed(progress, computed_tokens)
            # Whoever extends a finished request reads all of it; the request itself, when it
            # comes back, all but its last token.
            own_tokens = computed_tokens if finished else request.num_tokens - 1
            self._advance(progress, min(computed_tokens, own_tokens), releasing=True)
            progress.released = True
        if finished:
            del self._progress[request.request_id]

    def _begin(self, request: Request, previous: _Progress | None) -> _Progress:
        geometry = self.policy.geometry
        group = self.window_groups[0]
        hit_blocks = group.manager.num_cached_block.get(request.request_id, 0)
        hit_tokens = hit_blocks * group.block_tokens
        progress = _Progress(
            request=request,
            boundary_tokens=hit_tokens // geometry.unit_tokens * geometry.unit_tokens,
            next_event_tokens=0,
            rolling=previous.rolling if previous else tuple({} for _ in self.window_groups),
        )
        self._progress[request.request_id] = progress
        if previous is not None:
            hit = geometry.tails(progress.boundary_tokens)
            for group, rolling in zip(self.window_groups, progress.rolling, strict=True):
                self._drop(progress, group, rolling, _outside(rolling, [hit[group.geometry_index]]))
        return progress

    def _advance(self, progress: _Progress, reach_tokens: int, releasing: bool = False) -> None:
        """Move the latest boundary to what ``reach_tokens`` tokens open."""
        geometry = self.policy.geometry
        request = progress.request
        boundary = max(geometry.reachable_tokens(reach_tokens), progress.boundary_tokens)
        lasting = [
            geometry.tails(tokens)
            for tokens in self.policy.lasting_boundaries(
                request.num_prompt_tokens, progress.boundary_tokens, boundary
            )
        ]
        latest = [geometry.tails(boundary)]
        coming = [
            geometry.tails(tokens)
            for tokens in range(
                boundary + geometry.unit_tokens,
                0 if releasing else progress.cached_tokens + 1,
                geometry.unit_tokens,
            )
        ]
        for group, rolling in zip(self.window_groups, progress.rolling, strict=True):
            index = group.geometry_index
            lasting_runs = merge_runs(tails[index] for tails in lasting)
            self._store(progress, group, lasting_runs, None)
            for block_index in _indices(lasting_runs):
                rolling.pop(block_index, None)
            self._store(progress, group, [latest[0][index]], rolling)
            keep = [tails[index] for tails in latest + coming]
            self._drop(progress, group, rolling, _outside(rolling, keep))
            group.manager.num_cached_block[request.request_id] = (
                progress.cached_tokens // group.block_tokens
            )
        full_tokens = geometry.full_tokens(boundary)
        for group in self.full_groups:
            num_tokens = min(full_tokens[group.geometry_index], progress.cached_tokens)
            group.manager.cache_blocks(request, num_tokens)
        progress.boundary_tokens = boundary
        progress.next_event_tokens = geometry.opens_at_tokens(boundary + geometry.unit_tokens)

    def _store(
        self,
        progress: _Progress,
        group: ManagedGroup,
        runs: Iterable[range],
        rolling: dict[int, tuple[Block, bytes]] | None,
    ) -> None:
        """Cache the blocks of some runs, and remember them in ``rolling`` where one is given."""
        manager = group.manager
        blocks = manager.req_to_blocks[progress.request.request_id]
        num_full_blocks = min(len(blocks), progress.cached_tokens // group.block_tokens)
        for run in runs:
            for part in _uncached_parts(blocks, run, num_full_blocks):
                manager.block_pool.cache_full_blocks(
                    request=progress.request,
                    blocks=blocks,
                    num_cached_blocks=part.start,
                    num_full_blocks=part.stop,
                    block_size=group.block_tokens,
                    kv_cache_group_id=manager.kv_cache_group_id,
                )
                if rolling is not None:
                    # A resumed request computes the block behind its hit again.
                    self._drop(progress, group, rolling, [i for i in part if i in rolling])
                    for block_index in part:
                        block = blocks[block_index]
                        rolling[block_index] = (block, block.block_hash)

    def _drop(
        self,
        progress: _Progress,
        group: ManagedGroup,
        rolling: dict[int, tuple[Block, bytes]],
        block_indices: Iterable[int],
    ) -> None:
        """Uncache remembered blocks, unless another request reads them."""
        blocks = group.manager.req_to_blocks[progress.request.request_id]
        useless: list[Block] = []
        for block_index in block_indices:
            block, block_hash = rolling.pop(block_index)
            if block.block_hash is not block_hash:
                continue  # evicted since, and perhaps reused
            own_references = block_index < len(blocks) and blocks[block_index] is block
            if block.ref_cnt <= own_references:
                useless.append(block)
        if useless:
            self.discard(useless)

    def _forget_uncomputed(self, progress: _Progress, computed_tokens: int) -> None:
        """Uncache blocks that were cached for tokens which then were not computed.

        Upstream caches a block when its tokens are scheduled. A request that is preempted within
        the same scheduling step (by priority) never computes them.
        """
        progress.cached_tokens = computed_tokens
        progress.boundary_tokens = min(
            progress.boundary_tokens, self.policy.geometry.reachable_tokens(computed_tokens)
        )
        for group in (*self.window_groups, *self.full_groups):
            blocks = group.manager.req_to_blocks[progress.request.request_id]
            uncomputed = blocks[computed_tokens // group.block_tokens :]
            cached = [b for b in uncomputed if not b.is_null and b.block_hash is not None]
            if cached:
                self.discard(cached)


def merge_runs(runs: Iterable[range]) -> list[range]:
    """Join runs that overlap or touch; they must be ordered by their start."""
    merged: list[range] = []
    for run in runs:
        if merged and run.start <= merged[-1].stop:
            merged[-1] = range(merged[-1].start, max(merged[-1].stop, run.stop))
        elif run:
            merged.append(run)
    return merged


def _uncached_parts(blocks: Sequence[Block], run: range, num_full_blocks: int) -> Iterator[range]:
    """Maximal parts of a run whose blocks hold KV and are not cached yet."""
    start = None
    stop = min(run.stop, num_full_blocks)
    for index in range(run.start, stop):
        block = blocks[index]
        if block.is_null or block.block_hash is not None:
            if start is not None:
                yield range(start, index)
            start = None
        elif start is None:
            start = index
    if start is not None:
        yield range(start, stop)


def _outside(block_indices: Iterable[int], runs: Sequence[range]) -> list[int]:
    return [index for index in block_indices if not any(index in run for run in runs)]


def _indices(runs: Iterable[range]) -> Iterator[int]:
    for run in runs:
        yield from run
