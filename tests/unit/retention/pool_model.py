# SPDX-License-Identifier: Apache-2.0
"""A block pool and requests, small enough to be searched by brute force.

Blocks, a free queue, and a map from key to copies. A request's hash is the text up to there:
whoever sees a key knows the whole prefix.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_kvext.prefix_cache.keys import GroupKeys
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.retention.managed import ManagedGroup


@dataclass(eq=False, slots=True)
class ModelBlock:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False
    prev_free_block: ModelBlock | None = field(default=None, repr=False)
    next_free_block: ModelBlock | None = field(default=None, repr=False)


NULL = ModelBlock(-1, is_null=True)


@dataclass(slots=True)
class ModelSamplingParams:
    extra_args: dict[str, Any] | None = None


@dataclass(eq=False)
class ModelRequest:
    """A request whose tokens are the letters of a text."""

    request_id: str
    text: str
    num_prompt_tokens: int
    sampling_params: ModelSamplingParams = field(default_factory=ModelSamplingParams)
    num_computed_tokens: int = 0
    num_output_placeholders: int = 0
    finished: bool = False
    running: bool = False
    before_step_tokens: int = 0
    block_hashes: Any = field(default_factory=list)

    @classmethod
    def of(cls, request_id: str, text: str, hints: object = None) -> ModelRequest:
        arguments = None if hints is None else {HINT_ARGUMENT: hints}
        return cls(request_id, text, len(text), ModelSamplingParams(arguments))

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def is_finished(self) -> bool:
        return self.finished

    def hash_blocks(self, hash_block_tokens: int) -> list[bytes]:
        """Hash the blocks that have become full; upstream does so whenever tokens are added."""
        for index in range(len(self.block_hashes), self.num_tokens // hash_block_tokens):
            self.block_hashes.append(self.text[: (index + 1) * hash_block_tokens].encode())
        return self.block_hashes


class ModelKeyTable:
    """Upstream's ``BlockHashToBlockMap``: of a key one block, or several by id."""

    def __init__(self) -> None:
        self._cache: dict[bytes, Any] = {}

    def find_all(self, key: bytes) -> list[ModelBlock]:
        found = self._cache.get(key)
        if found is None:
            return []
        return list(found.values()) if isinstance(found, dict) else [found]

    def insert(self, key: bytes, block: ModelBlock) -> None:
        found = self._cache.get(key)
        if found is None:
            self._cache[key] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._cache[key] = {found.block_id: found, block.block_id: block}

    def remove(self, key: bytes, block: ModelBlock) -> None:
        assert block in self.find_all(key), f"{block} is not there"
        if self._cache[key] is not block:
            del self._cache[key][block.block_id]
        if self._cache[key] is block or not self._cache[key]:
            del self._cache[key]


class ModelQueue:
    """Upstream's queue of free blocks: doubly linked between two ends that are no blocks."""

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
    """`Pool`, and the pool of upstream that it stands for.

    ``lost_unasked`` says whether a block was uncached that ``cache_state`` did not give up.
    """

    def __init__(
        self, num_blocks: int, hash_block_tokens: int = 4, has_events: bool = False
    ) -> None:
        self.blocks = [ModelBlock(index) for index in range(num_blocks)]
        self.free_block_queue = ModelQueue(self.blocks)
        self.cached_block_hash_to_block = ModelKeyTable()
        self.hash_block_size = hash_block_tokens
        self.enable_kv_cache_events = has_events
        self.cache_state: Any = None
        self.lost_unasked = False
        self.reported: list[bytes] = []
        """Keys of which an event told that they are cached."""

    @property
    def block_pool(self) -> ModelPool:
        return self

    @property
    def queue(self) -> list[ModelBlock]:
        return self.free_block_queue.get_all_free_blocks()

    def cache(self, request: ModelRequest, group: ManagedGroup, run: range) -> None:
        blocks = group.manager.req_to_blocks[request.request_id]
        new_keys = getattr(group.manager, "cached_blocks_this_step", None)
        for index in run:
            block = blocks[index]
            assert not block.is_null and block._block_hash is None, f"block {index} of {run}"
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
            assert block._block_hash is not None, f"discarded, though not cached: {block}"
            self.uncache(block)
        idle = [block for block in blocks if not block.ref_cnt]
        for block in idle:
            self.free_block_queue.remove(block)
        self._free_first(idle)

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
                    assert not self.cache_state.num_needs(block.block_id), f"{block} is needed"
                self.uncache(block)
        return taken

    def touch(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.free_block_queue.remove(block)
        block.ref_cnt += 1

    def free(self, blocks: list[ModelBlock]) -> None:
        """As ``patches/retention/block_pool.py`` has upstream do it."""
        blocks = blocks[::-1]
        uncached, cached, num_surplus = self.cache_state.split_freed(blocks)
        self.free_block_queue.append_n(self._drop(cached))
        if num_surplus:
            self.cache_state.note_surplus(cached, num_surplus)
        self.free_block_queue.prepend_n(self._drop(uncached))
        if uncached:
            self.cache_state.note_uncached(uncached)

    def reset(self) -> None:
        for block in self.blocks:
            assert not block.ref_cnt
            block._block_hash = None
        self.cached_block_hash_to_block = ModelKeyTable()
        self.lost_unasked = False

    def key(self, request: ModelRequest, group: ManagedGroup, block_index: int) -> bytes:
        hashes_per_block = group.block_tokens // self.hash_block_size
        keys = GroupKeys.of_group(group.manager.kv_cache_group_id, hashes_per_block)
        return keys.at(request.hash_blocks(self.hash_block_size), block_index)

    @staticmethod
    def _drop(blocks: list[ModelBlock]) -> list[ModelBlock]:
        """One user less; those that nobody has any more."""
        for block in blocks:
            block.ref_cnt -= 1
        return [block for block in blocks if not block.ref_cnt]

    def _free_first(self, blocks: list[ModelBlock]) -> None:
        self.free_block_queue.prepend_n(blocks)
        self.cache_state.note_uncached(blocks)
