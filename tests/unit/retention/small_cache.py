# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""A cache manager on a block pool, both small enough to be searched by brute force.

Requests are admitted, computed in chunks, preempted and finished on it. It does what upstream does,
but uses the real `CheckpointRetention`. The hash of a block is the text up to its end, so keys show
the whole prefix.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from support.retention import inspection
from support.retention.cache_state import check_cache_state
from unit.retention.lookup_model import look_up

from vllm_ascend_kvext._native import RetainedRequest
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.retention.checkpoint_retention import CheckpointRetention
from vllm_ascend_kvext.retention.geometry import GroupGeometry, HitGeometry
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.retention.managed import ManagedGroup
from vllm_ascend_kvext.retention.policy import RetentionPolicy
from vllm_ascend_kvext.retention.stats import RetentionStats

FULL, WINDOW, STATE = GroupKind.FULL, GroupKind.WINDOW, GroupKind.STATE
UNIT_TOKENS = 4
LAYOUTS = {
    "full and window": (GroupGeometry(FULL, 4), GroupGeometry(WINDOW, 4, 9)),
    "two full, two windows": (
        GroupGeometry(FULL, 4),
        GroupGeometry(FULL, 4),
        GroupGeometry(WINDOW, 2, 5),
        GroupGeometry(WINDOW, 4, 5),
    ),
    "full and state": (GroupGeometry(FULL, 4), GroupGeometry(STATE, 4)),
    "blocks below the unit": (
        GroupGeometry(FULL, 4),
        GroupGeometry(FULL, 2),
        GroupGeometry(WINDOW, 2, 5),
        GroupGeometry(WINDOW, 4, 5),
    ),
    "full looks ahead": (GroupGeometry(FULL, 4, 0, True, 4), GroupGeometry(WINDOW, 4, 5)),
    "both look ahead": (GroupGeometry(FULL, 2, 0, True, 2), GroupGeometry(WINDOW, 2, 6, True, 2)),
    "window only": (GroupGeometry(WINDOW, 4, 9),),
    "two windows only": (GroupGeometry(WINDOW, 2, 5), GroupGeometry(WINDOW, 4, 9)),
}


def spelled(units: str | list[str]) -> str:
    """A prompt with a unit for each letter, and the last token, which is always computed."""
    return "".join(letter * UNIT_TOKENS for letter in units) + "x"


@dataclass(eq=False, slots=True)
class ModelBlock:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False
    prev_free_block: ModelBlock | None = field(default=None, repr=False)
    next_free_block: ModelBlock | None = field(default=None, repr=False)


NULL = ModelBlock(-1, is_null=True)


class ModelRequest:
    """A request whose tokens are the letters of a text."""

    def __init__(self, request_id: str, text: str, hints: object = None) -> None:
        self.request_id, self.text, self.num_prompt_tokens = request_id, text, len(text)
        arguments = None if hints is None else {HINT_ARGUMENT: hints}
        self.sampling_params: Any = SimpleNamespace(extra_args=arguments)
        self.num_computed_tokens = self.before_step_tokens = self.num_output_placeholders = 0
        self.finished = self.running = False
        self.block_hashes: Any = []

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def is_finished(self) -> bool:
        return self.finished

    def hash_blocks(self, hash_block_tokens: int) -> list[bytes]:
        """Hash the blocks that have become full.

        Upstream does so each time that tokens are added.
        """
        for index in range(len(self.block_hashes), self.num_tokens // hash_block_tokens):
            self.block_hashes.append(self.text[: (index + 1) * hash_block_tokens].encode())
        return self.block_hashes


class ModelKeyTable:
    """Upstream's ``BlockHashToBlockMap``. A key has one block, or several blocks by id."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Any] = {}

    def find_all(self, key: bytes) -> list[ModelBlock]:
        found = self._cache.get(key, {})
        return list(found.values()) if isinstance(found, dict) else [found]

    def insert(self, key: bytes, block: ModelBlock) -> None:
        found = self._cache.setdefault(key, block)
        if isinstance(found, dict):
            found[block.block_id] = block
        elif found is not block:
            self._cache[key] = {found.block_id: found, block.block_id: block}

    def remove(self, key: bytes, block: ModelBlock) -> None:
        assert block in self.find_all(key), f"{block} is not in the table"
        if self._cache[key] is not block:
            del self._cache[key][block.block_id]
        if self._cache[key] is block or not self._cache[key]:
            del self._cache[key]


class ModelQueue:
    """Upstream's queue of free blocks. It is doubly linked. Its two ends are no blocks."""

    def __init__(self, blocks: list[ModelBlock]) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = ModelBlock(-1), ModelBlock(-1)
        self.fake_free_list_head.next_free_block = self.fake_free_list_tail
        self.fake_free_list_tail.prev_free_block = self.fake_free_list_head
        self.append_n(blocks)

    def get_all_free_blocks(self) -> list[ModelBlock]:
        blocks, block = [], self.fake_free_list_head.next_free_block
        while block is not self.fake_free_list_tail:
            assert block.next_free_block.prev_free_block is block
            blocks.append(block)
            block = block.next_free_block
        return blocks

    def append_n(self, blocks: list[ModelBlock]) -> None:
        for block in blocks:
            self._insert(block, self.fake_free_list_tail)

    def prepend_n(self, blocks: list[ModelBlock]) -> None:
        for block in reversed(blocks):
            self._insert(block, self.fake_free_list_head.next_free_block)

    def remove(self, block: ModelBlock) -> None:
        block.prev_free_block.next_free_block = block.next_free_block
        block.next_free_block.prev_free_block = block.prev_free_block
        block.prev_free_block = block.next_free_block = None

    @staticmethod
    def _insert(block: ModelBlock, after: ModelBlock) -> None:
        assert block.next_free_block is None, f"{block} is free already"
        before = after.prev_free_block
        block.prev_free_block, block.next_free_block = before, after
        before.next_free_block = after.prev_free_block = block


class ModelPool:
    """`Pool`, and the pool of upstream that it represents.

    With ``lost_unasked``, a block was uncached that ``cache_state`` did not give up. ``reported``
    has the keys of blocks whose caching an event has reported.
    """

    def __init__(self, num_blocks: int, hash_block_tokens: int, has_events: bool) -> None:
        self.block_pool = self
        self.blocks = [ModelBlock(index) for index in range(num_blocks)]
        self.free_block_queue = ModelQueue(self.blocks)
        self.cached_block_hash_to_block = ModelKeyTable()
        self.hash_block_size = hash_block_tokens
        self.enable_kv_cache_events = has_events
        self.cache_state: Any = None
        self.lost_unasked = False
        self.reported: list[bytes] = []

    @property
    def queue(self) -> list[ModelBlock]:
        return self.free_block_queue.get_all_free_blocks()

    def cache(self, request: ModelRequest, group: ManagedGroup, run: range) -> None:
        blocks = group.manager.req_to_blocks[request.request_id]
        new_keys = getattr(group.manager, "cached_blocks_this_step", None)
        for index in run:
            block = blocks[index]
            assert not block.is_null and block._block_hash is None, (
                f"block {index} of {run} is null or already cached"
            )
            key = self.key(request, group, index)
            block._block_hash = key
            self.cached_block_hash_to_block.insert(key, block)
            self.reported.append(key)
            if new_keys is not None:
                new_keys.add(key)

    def find(self, request: ModelRequest, group: ManagedGroup, block_index: int) -> Any:
        return next(iter(self.copies(request, group, block_index)), None)

    def copies(
        self, request: ModelRequest, group: ManagedGroup, block_index: int
    ) -> list[ModelBlock]:
        if (block_index + 1) * group.block_tokens > request.num_tokens:
            return []
        return self.cached_block_hash_to_block.find_all(self.key(request, group, block_index))

    def discard(self, blocks: list[ModelBlock]) -> None:
        ids = [block.block_id for block in blocks]
        assert len(ids) == len(set(ids)), f"discarded twice at once: {ids}"
        for block in blocks:
            assert block._block_hash is not None, f"discarded, although not cached: {block}"
            self.uncache(block)
        idle = [block for block in blocks if not block.ref_cnt]
        for block in idle:
            self.free_block_queue.remove(block)
        self.free_block_queue.prepend_n(idle)
        self.cache_state.note_uncached(idle)

    def uncache(self, block: ModelBlock) -> None:
        assert block._block_hash is not None
        self.cached_block_hash_to_block.remove(block._block_hash, block)
        block._block_hash = None

    def uncache_unasked(self, block: ModelBlock) -> None:
        self.lost_unasked = True
        self.uncache(block)

    def allocate(self, num_blocks: int) -> list[ModelBlock]:
        self.cache_state.make_room(num_blocks)
        taken = self.queue[:num_blocks]
        for block in taken:
            assert not block.ref_cnt
            self.free_block_queue.remove(block)
            block.ref_cnt = 1
            if block._block_hash is not None:
                if not self.lost_unasked:
                    assert not inspection.num_needs(self.cache_state, block.block_id), (
                        f"{block} is freed, but a checkpoint needs it"
                    )
                self.uncache(block)
        return taken

    def touch(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.free_block_queue.remove(block)
        block.ref_cnt += 1

    def free(self, blocks: list[ModelBlock]) -> None:
        """Free blocks as upstream does with ``patches/retention/block_pool.py``."""
        uncached, cached, num_surplus = self.cache_state.split_freed(blocks[::-1])
        self.free_block_queue.append_n(self._drop(cached))
        if num_surplus:
            self.cache_state.note_surplus(cached, num_surplus)
        self.free_block_queue.prepend_n(self._drop(uncached))
        if uncached:
            self.cache_state.note_uncached(uncached)

    @staticmethod
    def _drop(blocks: list[ModelBlock]) -> list[ModelBlock]:
        """Count one user less of each block, and return the blocks that have none left."""
        for block in blocks:
            block.ref_cnt -= 1
        return [block for block in blocks if not block.ref_cnt]

    def reset(self) -> None:
        for block in self.blocks:
            assert not block.ref_cnt
            block._block_hash = None
        self.cached_block_hash_to_block = ModelKeyTable()
        self.lost_unasked = False

    def key(self, request: ModelRequest, group: ManagedGroup, block_index: int) -> bytes:
        hashes_per_block = group.block_tokens // self.hash_block_size
        hashes = request.hash_blocks(self.hash_block_size)
        keys = GroupKeys.of_group(group.manager.kv_cache_group_id, hashes_per_block)
        if group.hashes_in_key == hashes_per_block:
            return keys.at(hashes, block_index)
        return hashes[(block_index + 1) * hashes_per_block - 1] + keys.suffix


class ModelManager:
    """`GroupManager` of a group with one spec."""

    def __init__(
        self,
        group_id: int,
        geometry: GroupGeometry,
        pool: ModelPool,
        is_upstreams: bool,
        has_short_keys: bool,
    ) -> None:
        self.kv_cache_group_id = group_id
        self.geometry = geometry
        self.req_to_blocks: dict[str, list[Any]] = defaultdict(list)
        self.num_cached_block: dict[str, int] = {}
        if geometry.kind is STATE:
            self.cached_blocks_this_step: set[bytes] = set()
        self._pool = pool
        block_tokens = geometry.block_tokens
        hashes_in_key = 1 if has_short_keys else block_tokens // pool.hash_block_size
        self.group = ManagedGroup(self, group_id, block_tokens, is_upstreams, hashes_in_key)

    def cache_blocks(self, request: Any, num_tokens: int) -> None:
        first = self.num_cached_block.get(request.request_id, 0)
        stop = num_tokens // self.geometry.block_tokens
        if first < stop:
            self._pool.cache(request, self.group, range(first, stop))
            self.num_cached_block[request.request_id] = stop

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        if self.geometry.kind is FULL:
            return 0
        window_tokens = self.geometry.window_tokens if self.geometry.kind is WINDOW else 2
        return max(0, num_computed_tokens - window_tokens + 1)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        blocks = self.req_to_blocks[request_id]
        skipped = self.get_num_skipped_tokens(total_computed_tokens) // self.geometry.block_tokens
        freed = blocks[:skipped]
        blocks[:skipped] = [NULL] * len(freed)
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
        """The indices for which `extend` allocates a block."""
        first = len(self.req_to_blocks[request_id])
        stop = -(-num_tokens // self.geometry.block_tokens)
        return range(max(first, stop - 1) if self.geometry.kind is STATE else first, stop)

    def extend(self, request_id: str, num_tokens: int) -> None:
        places = self.places_to_fill(request_id, num_tokens)
        if not places:
            return
        blocks = self.req_to_blocks[request_id]
        if self.geometry.kind is STATE and blocks and blocks[-1]._block_hash is None:
            # If a step ended inside a block, the block's state moves on with the request.
            self._pool.free([blocks.pop()])
            blocks.append(NULL)
        blocks += [NULL] * (places.start - len(blocks))
        blocks += self._pool.allocate(len(places))

    def free(self, request_id: str) -> None:
        self._pool.free(self.req_to_blocks.pop(request_id, []))
        self.num_cached_block.pop(request_id, None)


class ModelCache:
    """A cache manager: one pool, one manager per group, adaptive retention.

    With ``is_upstreams``, the compiled module does the managers' work. With ``does_quiet_steps``,
    steps without changes are only counted. With ``has_short_keys``, the key of a block is its last
    hash, as since vLLM 0.30.
    """

    def __init__(
        self,
        layout: str | tuple[GroupGeometry, ...],
        num_blocks: int,
        interval_tokens: int = 0,
        has_events: bool = False,
        is_upstreams: bool = False,
        does_quiet_steps: bool = False,
        unit_tokens: int = UNIT_TOKENS,
        has_short_keys: bool = False,
    ) -> None:
        groups = LAYOUTS[layout] if isinstance(layout, str) else layout
        self.geometry = geometry = HitGeometry(groups, unit_tokens)
        self.pool = ModelPool(num_blocks, geometry.step_tokens, has_events)
        self.managers = [
            ModelManager(index, group, self.pool, is_upstreams, has_short_keys)
            for index, group in enumerate(groups)
        ]
        self.does_quiet_steps = does_quiet_steps
        self.num_quiet_steps = 0
        full = tuple(each.group for each in self.managers if not each.geometry.is_sparse)
        sparse = tuple(each.group for each in self.managers if each.geometry.is_sparse)
        policy = RetentionPolicy(geometry, interval_tokens, is_adaptive=True)
        self.retention = CheckpointRetention(policy, sparse, full, self.pool)
        self.cache_state = self.pool.cache_state = self.retention.cache_state

    @property
    def stats(self) -> RetentionStats:
        return self.retention.stats

    @property
    def num_surplus(self) -> int:
        return len(inspection.surplus(self.cache_state))

    def checkpoints(self) -> list[dict[str, Any]]:
        """The boundaries from which requests can resume."""
        return [node for node in inspection.describe(self.cache_state) if node["tail"]]

    def request(self, request_id: str, text: str, hints: object = None) -> ModelRequest:
        request = ModelRequest(request_id, text, hints)
        request.hash_blocks(self.pool.hash_block_size)
        return request

    def state_of(self, text: str) -> RetainedRequest:
        """The demand of a request that is not admitted yet."""
        return RetainedRequest(self.cache_state, self.request("asks", text))

    def find_evicted(self, text: str, after_tokens: int, upto_tokens: int) -> int:
        """The longest boundary of a text whose checkpoint was evicted; 0 if there is none."""
        key_table = self.pool.cached_block_hash_to_block
        return self.state_of(text).find_prefixes(key_table, after_tokens, upto_tokens)[1]

    def hit_tokens(self, text: str, limit_tokens: int) -> int:
        """The hit tokens of upstream's lookup for a text."""
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
        """Admit a request if needed, and compute some tokens. False if they do not fit."""
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

    def start(self, text: str, hints: object = None) -> ModelRequest:
        """Compute a prompt at once."""
        request = ModelRequest(f"r{text}", text, hints)
        assert self.step(request, len(text))
        return request

    def serve(self, text: str, hints: object = None) -> int:
        """Compute a prompt at once, finish the request, and return its hit."""
        request = self.start(text, hints)
        self.finish(request)
        return request.before_step_tokens

    def preempt(self, request: ModelRequest) -> None:
        """Preempt as with the repair ``preempted-in-step``: only computed tokens stay cached."""
        for manager in self.managers:
            first = request.num_computed_tokens // manager.geometry.block_tokens
            blocks = manager.req_to_blocks.get(request.request_id, [])[first:]
            self.pool.discard([block for block in blocks if block._block_hash is not None])
        self._release(request)
        request.num_computed_tokens = 0

    def undo_step(self, request: ModelRequest) -> None:
        """Preempt a request within the step that has scheduled it."""
        request.num_computed_tokens = request.before_step_tokens
        self.preempt(request)

    def finish(self, request: ModelRequest) -> None:
        request.finished = True
        self._release(request)

    def _release(self, request: ModelRequest) -> None:
        self.retention.release(request)
        for manager in self.managers:
            manager.free(request.request_id)
        request.running = False

    def reset(self) -> None:
        self.pool.reset()
        self.cache_state.clear()

    def evict_everything(self) -> None:
        self.cache_state.make_room(len(self.pool.blocks))

    def lose_surplus(self) -> None:
        """Uncache the blocks that no checkpoint needs, as if other requests had taken them."""
        for index in inspection.surplus(self.cache_state):
            block = self.pool.blocks[index]
            if block._block_hash is not None:
                self.pool.uncache(block)

    def check(self) -> None:
        """Check that a request with the prompt of a checkpoint resumes there, or later."""
        is_exact = not self.pool.lost_unasked
        check_cache_state(self.retention, self.pool.blocks, self.pool.queue, is_exact)
        if not is_exact or self.geometry.use_eagle:
            return  # A block may be gone, so its group may be incomplete.
        for node in self.checkpoints():
            text = node["key"].decode()
            hit_tokens = self.hit_tokens(text + "?", node["boundary_tokens"])
            assert hit_tokens == node["boundary_tokens"], f"{text} hits {hit_tokens} of {node}"
