# SPDX-License-Identifier: Apache-2.0
"""A block pool and requests, small enough to be searched by brute force.

Blocks, a free queue, and a map from hash to copies. A block's hash is the text up to its end:
whoever sees a hash knows the whole prefix.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.retention.protocols import ManagedGroup


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


@dataclass(eq=False, slots=True)
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
    block_hashes: tuple[bytes, ...] = ()

    @classmethod
    def of(cls, request_id: str, text: str, hints: object = None) -> ModelRequest:
        arguments = None if hints is None else {HINT_ARGUMENT: hints}
        return cls(request_id, text, len(text), ModelSamplingParams(arguments))

    @property
    def num_tokens(self) -> int:
        return len(self.text)

    def is_finished(self) -> bool:
        return self.finished


def hash_of(text: str, group_id: int) -> bytes:
    """A new object each time, as upstream makes one each time a block is cached."""
    return b"".join((text.encode(), b"@", str(group_id).encode()))


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
    """`CheckpointPool`, and what upstream's pool does besides.

    Attributes:
        tree: Decides what is reallocated next; None where nothing does.
    """

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [ModelBlock(index) for index in range(num_blocks)]
        self.free_queue = ModelQueue(self.blocks)
        self.table: dict[bytes, dict[int, ModelBlock]] = defaultdict(dict)
        self.tree: Any = None
        self.lost_unasked = False
        """Whether a block was uncached that the tree did not give up."""

    @property
    def queue(self) -> list[ModelBlock]:
        return self.free_queue.get_all_free_blocks()

    def cache(self, request: ModelRequest, group: ManagedGroup, run: range) -> None:
        blocks = group.manager.req_to_blocks[request.request_id]
        for index in run:
            block = blocks[index]
            assert not block.is_null and block._block_hash is None, f"block {index} of {run}"
            key = self._key(request, group, index)
            block._block_hash = key
            self.table[key][block.block_id] = block

    def find(self, request: ModelRequest, group: ManagedGroup, block_index: int) -> Any:
        return next(iter(self.copies(request, group, block_index)), None)

    def copies(
        self, request: ModelRequest, group: ManagedGroup, block_index: int
    ) -> list[ModelBlock]:
        if (block_index + 1) * group.block_tokens > request.num_tokens:
            return []
        return list(self.table[self._key(request, group, block_index)].values())

    def prefix_key(self, request: ModelRequest, num_tokens: int) -> bytes:
        return request.text[:num_tokens].encode()

    def refresh(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.free_queue.remove(block)
            self.free_queue.append_n([block])

    def discard(self, blocks: list[ModelBlock]) -> None:
        ids = [block.block_id for block in blocks]
        assert len(ids) == len(set(ids)), f"discarded twice at once: {ids}"
        for block in blocks:
            assert block._block_hash is not None, f"discarded, though not cached: {block}"
            self.uncache(block)
        idle = [block for block in blocks if not block.ref_cnt]
        for block in idle:
            self.free_queue.remove(block)
        self._free_first(idle)

    def uncache(self, block: ModelBlock) -> None:
        assert block._block_hash is not None
        del self.table[block._block_hash][block.block_id]
        block._block_hash = None

    def uncache_unasked(self, block: ModelBlock) -> None:
        self.lost_unasked = True
        self.uncache(block)

    def allocate(self, num_blocks: int) -> list[ModelBlock]:
        if self.tree is not None:
            self.tree.make_room(num_blocks)
        taken = self.queue[:num_blocks]
        for block in taken:
            assert not block.ref_cnt
            self.free_queue.remove(block)
            block.ref_cnt = 1
            if block._block_hash is not None:
                if self.tree is not None and not self.lost_unasked:
                    assert not self.tree.needs.count[block.block_id], f"{block} is needed"
                self.uncache(block)
        return taken

    def touch(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.free_queue.remove(block)
        block.ref_cnt += 1

    def free(self, blocks: list[ModelBlock]) -> None:
        idle = []
        for block in reversed(blocks):
            if not block.is_null:
                block.ref_cnt -= 1
                if not block.ref_cnt:
                    idle.append(block)
        cached = [block for block in idle if block._block_hash is not None]
        if self.tree is None:
            self.free_queue.append_n(cached)
        else:
            count = self.tree.needs.count
            self.free_queue.append_n([b for b in cached if count[b.block_id]])
            surplus = [b for b in cached if not count[b.block_id]]
            self.free_queue.append_n(surplus)
            self.tree.free_order.note_appended(surplus)
        self._free_first([block for block in idle if block._block_hash is None])

    def idle_cached_blocks(self) -> list[ModelBlock]:
        return [b for b in self.blocks if b._block_hash is not None and not b.ref_cnt]

    def _free_first(self, blocks: list[ModelBlock]) -> None:
        self.free_queue.prepend_n(blocks)
        if self.tree is not None:
            self.tree.free_order.note_prepended(blocks)

    def _key(self, request: ModelRequest, group: ManagedGroup, index: int) -> bytes:
        end = (index + 1) * group.block_tokens
        return hash_of(request.text[:end], group.manager.kv_cache_group_id)
