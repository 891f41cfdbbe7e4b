# SPDX-License-Identifier: Apache-2.0
"""A small cache manager: requests are admitted, computed in chunks, preempted and finished on it.

Does what upstream does, with the real `CheckpointRetention`, on a `ModelPool`.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from unit.retention.cache_model import look_up
from unit.retention.pool_model import NULL, ModelPool, ModelRequest

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.managed import ManagedGroup
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.retention.stats import RetentionStats


class ModelManager:
    """`GroupManager` of a group with one spec."""

    def __init__(
        self, group_id: int, geometry: GroupGeometry, pool: ModelPool, is_upstreams: bool = False
    ) -> None:
        self.kv_cache_group_id = group_id
        self.geometry = geometry
        self.req_to_blocks: dict[str, list[Any]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        if geometry.kind is GroupKind.STATE:
            self.cached_blocks_this_step: set[bytes] = set()
        self._pool = pool
        self.group = ManagedGroup(self, group_id, geometry.block_tokens, is_upstreams)

    def cache_blocks(self, request: Any, num_tokens: int) -> None:
        first = self.num_cached_block.get(request.request_id, 0)
        stop = num_tokens // self.geometry.block_tokens
        if first < stop:
            self._pool.cache(request, self.group, range(first, stop))
            self.num_cached_block[request.request_id] = stop

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        if self.geometry.kind is GroupKind.WINDOW:
            return max(0, num_computed_tokens - self.geometry.window_tokens + 1)
        if self.geometry.kind is GroupKind.STATE:
            return max(0, num_computed_tokens - 1)
        return 0

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        blocks = self.req_to_blocks[request_id]
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.geometry.block_tokens
        left = range(min(skipped, len(blocks)))
        freed = [blocks[index] for index in left]
        for index in left:
            blocks[index] = NULL
        self._pool.free(freed)

    def place_hit(self, request: ModelRequest, hit_tokens: int) -> None:
        stop = hit_tokens // self.geometry.block_tokens
        start = self.get_num_skipped_tokens(hit_tokens) // self.geometry.block_tokens
        found = [self._pool.find(request, self.group, index) for index in range(start, stop)]
        for block in found:
            self._pool.touch(block)
        self.req_to_blocks[request.request_id] = [*[NULL] * start, *found]
        self.num_cached_block[request.request_id] = stop

    def places_to_fill(self, request_id: str, num_tokens: int) -> range:
        """Indices that `extend` allocates a block for."""
        first = len(self.req_to_blocks[request_id])
        stop = -(-num_tokens // self.geometry.block_tokens)
        if self.geometry.kind is GroupKind.STATE:
            first = max(first, stop - 1)
        return range(first, stop)

    def extend(self, request_id: str, num_tokens: int) -> None:
        places = self.places_to_fill(request_id, num_tokens)
        if not places:
            return
        blocks = self.req_to_blocks[request_id]
        if self.geometry.kind is GroupKind.STATE and blocks and blocks[-1]._block_hash is None:
            # The state of a step that ended within its block moves on with the request.
            self._pool.free([blocks.pop()])
            blocks.append(NULL)
        blocks += [NULL] * (places.start - len(blocks))
        blocks += self._pool.allocate(len(places))

    def free(self, request_id: str) -> None:
        self._pool.free(self.req_to_blocks.pop(request_id, []))
        self.num_cached_block.pop(request_id, None)


class ModelCache:
    """A cache manager: one pool, one manager per group, adaptive retention.

    With ``is_upstreams`` the compiled module does the managers' work; with ``does_quiet_steps``
    steps in which nothing happens are only taken note of.
    """

    def __init__(
        self,
        geometry: HitGeometry,
        num_blocks: int,
        interval_tokens: int = 0,
        has_events: bool = False,
        is_upstreams: bool = False,
        does_quiet_steps: bool = False,
    ) -> None:
        self.geometry = geometry
        self.pool = ModelPool(num_blocks, geometry.step_tokens, has_events)
        self.managers = [
            ModelManager(index, group, self.pool, is_upstreams)
            for index, group in enumerate(geometry.groups)
        ]
        self.does_quiet_steps = does_quiet_steps
        self.num_quiet_steps = 0
        managed = [manager.group for manager in self.managers]
        full = tuple(g for g in managed if not geometry.groups[g.geometry_index].is_sparse)
        sparse = tuple(g for g in managed if geometry.groups[g.geometry_index].is_sparse)
        policy = RetentionPolicy(geometry, interval_tokens, is_adaptive=True)
        self.retention = CheckpointRetention(policy, sparse, full, self.pool)
        self.cache_state = self.pool.cache_state = self.retention.cache_state

    @property
    def stats(self) -> RetentionStats:
        return self.retention.stats

    def request(self, request_id: str, text: str, hints: object = None) -> ModelRequest:
        request = ModelRequest.of(request_id, text, hints)
        request.hash_blocks(self.pool.hash_block_size)
        return request

    def hit_tokens(self, text: str, limit_tokens: int) -> int:
        """What upstream's lookup finds of a text."""
        request = self.request("", text)
        cached = [
            {
                index
                for index in range(limit_tokens // manager.geometry.block_tokens)
                if self.pool.find(request, manager.group, index) is not None
            }
            for manager in self.managers
        ]
        return look_up(self.geometry.groups, cached, limit_tokens, self.geometry.unit_tokens)

    def step(self, request: ModelRequest, num_new_tokens: int) -> bool:
        """Compute tokens of a request, and admit it first. False if that does not fit."""
        request_id = request.request_id
        computed_tokens = request.num_computed_tokens
        if not request.running:
            computed_tokens = self.hit_tokens(request.text, request.num_tokens - 1)
        request.hash_blocks(self.pool.hash_block_size)
        stop_tokens = min(computed_tokens + num_new_tokens, request.num_tokens)
        asked_tokens = self.retention.next_stop_tokens(request, computed_tokens)
        if asked_tokens is not None:
            stop_tokens = min(stop_tokens, asked_tokens)
        skip_tokens = self.retention.before_skip(request_id, computed_tokens)
        for manager in self.managers:
            manager.remove_skipped_blocks(request_id, skip_tokens)
        if not request.running:
            for manager in self.managers:
                manager.place_hit(request, computed_tokens)
        places = (m.places_to_fill(request_id, stop_tokens) for m in self.managers)
        if sum(map(len, places)) > len(self.pool.queue):
            if not request.running:
                for manager in self.managers:
                    manager.free(request_id)
            return False
        for manager in self.managers:
            manager.extend(request_id, stop_tokens)
        if self.does_quiet_steps and stop_tokens < self.retention.quiet_until_tokens(request):
            self.num_quiet_steps += 1
            self.retention.note_quiet_step(request, stop_tokens)
        else:
            self.retention.cache(request, stop_tokens)
        request.running = True
        request.before_step_tokens, request.num_computed_tokens = computed_tokens, stop_tokens
        return True

    def serve(self, text: str, hints: object = None) -> int:
        """Compute a prompt at once and finish; returns what it hit."""
        request = ModelRequest.of(f"r{text}", text, hints)
        assert self.step(request, len(text))
        self.finish(request)
        return request.before_step_tokens

    def preempt(self, request: ModelRequest) -> None:
        """As the repair ``preempted-in-step`` does: nothing stays cached that was not computed."""
        for manager in self.managers:
            first = request.num_computed_tokens // manager.geometry.block_tokens
            blocks = manager.req_to_blocks.get(request.request_id, [])[first:]
            self.pool.discard([block for block in blocks if block._block_hash is not None])
        self._release(request)
        request.num_computed_tokens = 0

    def finish(self, request: ModelRequest) -> None:
        request.finished = True
        self._release(request)

    def reset(self) -> None:
        self.pool.reset()
        self.cache_state.clear()

    def _release(self, request: ModelRequest) -> None:
        self.retention.release(request)
        for manager in self.managers:
            manager.free(request.request_id)
        request.running = False
