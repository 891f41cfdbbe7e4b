# SPDX-License-Identifier: Apache-2.0
"""A block pool and requests, small enough to be searched by brute force.

Blocks, a free queue, and a map from hash to copies. A block's hash is the text up to its end:
whoever sees a hash knows the whole prefix.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from vllm_ascend_kvext.retention.checkpoints import Checkpoint
from vllm_ascend_kvext.retention.hints import HINT_ARGUMENT
from vllm_ascend_kvext.retention.protocols import ManagedGroup


@dataclass(eq=False, slots=True)
class ModelBlock:
    block_id: int
    ref_cnt: int = 0
    _block_hash: bytes | None = None
    is_null: bool = False


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


class ModelPool:
    """`Pool`, and what upstream's pool does besides."""

    def __init__(self, num_blocks: int) -> None:
        self.blocks = [ModelBlock(index) for index in range(num_blocks)]
        self.queue = list(self.blocks)
        self.copies: dict[bytes, dict[int, ModelBlock]] = defaultdict(dict)
        self.tree: Any = None
        self.lost_unasked = False
        """Whether a block was uncached that the tree did not give up."""

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def cache(self, request: ModelRequest, group: ManagedGroup, run: range) -> None:
        blocks = group.manager.req_to_blocks[request.request_id]
        for index in run:
            block = blocks[index]
            assert not block.is_null and block._block_hash is None, f"block {index} of {run}"
            key = self._key(request, group, index)
            block._block_hash = key
            self.copies[key][block.block_id] = block

    def find(self, request: ModelRequest, group: ManagedGroup, block_index: int) -> Any:
        if (block_index + 1) * group.block_tokens > request.num_tokens:
            return None
        return next(iter(self.copies[self._key(request, group, block_index)].values()), None)

    def prefix_key(self, request: ModelRequest, num_tokens: int) -> bytes:
        return request.text[:num_tokens].encode()

    @property
    def has_checkpoints(self) -> bool:
        return self.tree is not None

    def is_needed(self, block: ModelBlock) -> bool:
        return self.tree is not None and self.tree.is_in_tail(block)

    def count_useless(self, limit: int) -> int:
        for count, block in enumerate(self.queue[:limit]):
            if block._block_hash is not None:
                return count
        return min(limit, len(self.queue))

    def refresh(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.queue.remove(block)
            self.queue.append(block)

    def discard(self, blocks: list[ModelBlock]) -> None:
        ids = [block.block_id for block in blocks]
        assert len(ids) == len(set(ids)), f"discarded twice at once: {ids}"
        for block in blocks:
            assert block._block_hash is not None, f"discarded, though not cached: {block}"
            self.uncache(block)
        idle = [block for block in blocks if not block.ref_cnt]
        self.queue = [*idle, *(block for block in self.queue if block not in idle)]

    def uncache(self, block: ModelBlock) -> None:
        assert block._block_hash is not None
        del self.copies[block._block_hash][block.block_id]
        block._block_hash = None

    def uncache_unasked(self, block: ModelBlock) -> None:
        self.lost_unasked = True
        self.uncache(block)

    def allocate(self, num_blocks: int) -> list[ModelBlock]:
        if self.tree is not None:
            self.tree.make_room(num_blocks)
        taken, self.queue = self.queue[:num_blocks], self.queue[num_blocks:]
        for block in taken:
            assert not block.ref_cnt
            block.ref_cnt = 1
            if block._block_hash is not None:
                assert not self._evictable(), "evicts what no checkpoint gave up, too early"
                self.uncache_unasked(block)
        return taken

    def _evictable(self) -> list[Checkpoint]:
        """Checkpoints that hold idle blocks, and that no request reads."""
        nodes, found = [self.tree.root], []
        while nodes:
            node = nodes.pop()
            nodes += node.children
            if node.tail and not any(block.ref_cnt for block, _ in node.tail):
                found.append(node)
        return found

    def touch(self, block: ModelBlock) -> None:
        if not block.ref_cnt:
            self.queue.remove(block)
        block.ref_cnt += 1

    def free(self, blocks: list[ModelBlock]) -> None:
        idle = []
        for block in reversed(blocks):
            if block.is_null:
                continue
            block.ref_cnt -= 1
            if not block.ref_cnt:
                idle.append(block)
        useless = [block for block in idle if block._block_hash is None]
        self.queue = [*useless, *self.queue, *(b for b in idle if b._block_hash is not None)]

    def idle_cached_blocks(self) -> list[ModelBlock]:
        return [b for b in self.blocks if b._block_hash is not None and not b.ref_cnt]

    def _key(self, request: ModelRequest, group: ManagedGroup, index: int) -> bytes:
        end = (index + 1) * group.block_tokens
        return hash_of(request.text[:end], group.manager.kv_cache_group_id)
