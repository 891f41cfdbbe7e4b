# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Checks of a KV cache manager after every step, whatever the scheduler has decided.

Each check is a `support.scheduler.run.Check`. The checks look at vLLM's objects and at the shadow
memory of the model runner. They never look at this project's code.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    KVCacheBlock,
    generate_block_hash_extra_keys,
    get_group_id,
    make_block_hash_with_group_id,
    maybe_convert_block_hash,
)

from .engine import SchedulerEngine
from .model_runner import rows_of
from .releases import deferred_blocks
from .token_stream import TokenStream
from .transcript import Step


class NullBlock(KVCacheBlock):
    """A null block whose reference count reports every write to it."""

    __slots__ = ()

    @property
    def ref_cnt(self) -> int:
        return KVCacheBlock.ref_cnt.__get__(self)

    @ref_cnt.setter
    def ref_cnt(self, value: int) -> None:
        raise AssertionError(f"the reference count of the null block is set to {value}")


def null_block_is_left_alone(engine: SchedulerEngine, step: Step) -> None:
    """Check that the reference count of the null block never changes, and that it is never free.

    From the first step on, the count cannot be written to at all. So a decrement is seen even if an
    increment makes up for it. ``BlockPool.free_blocks`` decrements the counts of all blocks that it
    is given.
    """
    null_block = engine.block_pool.null_block
    null_block.__class__ = NullBlock
    assert null_block.block_id not in step.free_queue
    assert null_block.ref_cnt == 0
    assert null_block.block_hash is None


def blocks_are_conserved(
    engine: SchedulerEngine, step: Step, shares_unhashed: bool = False
) -> None:
    """Check that every block is free, or has as many references as requests that hold it.

    With ``shares_unhashed``, requests may share a block that has lost its key. The key of a shared
    block can go to a newer copy, or disappear with the last checkpoint that needed the block. The
    requests that share the block read it as before, but no other request can find it.
    """
    pool = engine.block_pool
    assert len(set(step.free_queue)) == len(step.free_queue) == pool.get_num_free_blocks()
    references: Counter[int] = Counter()
    owner: dict[int, int] = {}
    for group_id, manager in enumerate(engine.managers):
        for request_id, blocks in manager.req_to_blocks.items():
            ids = [block.block_id for block in blocks if not block.is_null]
            assert len(set(ids)) == len(ids), f"{request_id} holds a block twice: {ids}"
            references.update(ids)
            for block_id in ids:
                other = owner.setdefault(block_id, group_id)
                assert other == group_id, f"block {block_id} is held by groups {other}, {group_id}"
    deferred = Counter(block.block_id for block in deferred_blocks(engine.scheduler))
    references.update(deferred)
    free = set(step.free_queue)
    for block in pool.blocks:
        if block.is_null:
            continue
        held = references[block.block_id]
        assert block.ref_cnt == held, (
            f"{block} is held {held} times, but has {block.ref_cnt} references"
        )
        assert (block.block_id in free) == (held == 0), f"{block} is lost, or is free while in use"
        is_hidden = held - deferred[block.block_id] > 1 and block.block_hash is None
        assert shares_unhashed or not is_hidden, f"{block} is shared, but has no hash"


def useless_blocks_come_first(engine: SchedulerEngine, step: Step) -> None:
    """Check that blocks that cannot be hit come first in the free queue."""
    blocks = engine.block_pool.blocks
    hashed = [blocks[block_id].block_hash is not None for block_id in step.free_queue]
    assert hashed == sorted(hashed), f"free queue (hashed or not): {hashed}"


@dataclass(frozen=True, slots=True)
class _CachedBlock:
    """The expected content and the expected event of a block with some hash."""

    digests: list[int]
    tokens: list[int]
    parent_hash: Any
    extra_keys: tuple[Any, ...] | None
    adapter: str | None


class CacheContents:
    """Compares all cached blocks and all events with the tokens of the requests.

    It keeps every hash that a request of the engine has had. So it knows by brute force what the
    block of a key holds. Upstream gets some events wrong (vLLM issue 44451). If ``checks_events``
    is false, events are not checked.
    """

    def __init__(self, checks_events: bool = True) -> None:
        self._checks_events = checks_events
        self._streams: dict[str, TokenStream] = {}
        self._blocks: dict[tuple[int, Any], _CachedBlock] = {}
        self._keys: dict[bytes, _CachedBlock] = {}
        self._num_known: Counter[tuple[str, int]] = Counter()
        self.counts: Counter[str] = Counter()

    def __call__(self, engine: SchedulerEngine, step: Step) -> None:
        self._learn(engine)
        self._check_blocks(engine)
        for event in engine.last_events:
            if isinstance(event, BlockStored) and self._checks_events:
                self._check_event(engine, event)

    def _learn(self, engine: SchedulerEngine) -> None:
        """Note the hashes of all blocks that requests have filled since the last step."""
        for request_id, request in engine.requests.items():
            if request_id not in self._streams:
                self._streams[request_id] = engine.plans[request_id].new_stream()
            stream = self._streams[request_id]
            stream.extend(request.all_token_ids[len(stream) :])
            for group_id, group in enumerate(engine.layout.groups):
                hashes = request.block_hashes
                if group.block_tokens != engine.hash_block_size:
                    self._learn_partial_blocks(request, group_id, engine)
                    hashes = BlockHashListWithBlockSize(
                        hashes, engine.hash_block_size, group.block_tokens
                    )
                for index in range(self._num_known[request_id, group_id], len(hashes)):
                    self._learn_block(request, group_id, group.block_tokens, hashes, index)
                self._num_known[request_id, group_id] = len(hashes)

    def _learn_block(
        self, request: Any, group_id: int, block_tokens: int, hashes: Any, index: int
    ) -> None:
        stream = self._streams[request.request_id]
        start = index * block_tokens
        stop = (index + 1) * block_tokens
        extra_keys, _ = generate_block_hash_extra_keys(request, start, stop, 0)
        block = _CachedBlock(
            digests=stream.digests[start:stop],
            tokens=stream.tokens[start:stop],
            parent_hash=maybe_convert_block_hash(hashes[index - 1]) if index else None,
            extra_keys=extra_keys,
            adapter=request.lora_request and request.lora_request.lora_name,
        )
        self._keys[make_block_hash_with_group_id(hashes[index], group_id)] = block
        self._blocks[group_id, maybe_convert_block_hash(hashes[index])] = block

    def _learn_partial_blocks(self, request: Any, group_id: int, engine: SchedulerEngine) -> None:
        """Note the prefixes that end inside a block. Since vLLM 0.30, they may be cached, too.

        An event then describes the last ``hash_block_size`` tokens of the prefix.
        """
        hashes = request.block_hashes
        size = engine.hash_block_size
        block_tokens = engine.layout.groups[group_id].block_tokens
        digests = self._streams[request.request_id].digests
        known = self._num_known[request.request_id, group_id] * block_tokens // size
        for index in range(known, len(hashes)):
            stop = (index + 1) * size
            if stop % block_tokens == 0:
                continue
            self._learn_block(request, group_id, size, hashes, index)
            key = make_block_hash_with_group_id(hashes[index], group_id)
            start = stop // block_tokens * block_tokens
            self._keys[key] = replace(self._keys[key], digests=digests[start:stop])

    def _check_blocks(self, engine: SchedulerEngine) -> None:
        """Check that every cached block holds the KV of the tokens of its key."""
        for block in engine.block_pool.blocks:
            if block.block_hash is None:
                continue
            group_id = get_group_id(block.block_hash)
            group = engine.layout.groups[group_id]
            digests = self._keys[block.block_hash].digests
            expected = [
                row for _, _, rows in rows_of(group, digests, 0, len(digests)) for row in rows
            ]
            found = engine.runner.memory.read(block.block_id, group_id, 0, len(expected))
            self.counts["cached blocks checked"] += 1
            if any(map(engine.runner.is_unreported, found)):
                continue  # The scheduler does not know of this failed load yet.
            assert found == expected, (
                f"block {block.block_id} of group {group_id} is cached, but does not hold what its "
                f"key says: expected {expected}, found {found}"
            )

    def _check_event(self, engine: SchedulerEngine, event: BlockStored) -> None:
        """Check that hashes, parent, tokens and extra keys of an event describe the same blocks."""
        group_id = event.group_idx
        assert group_id is not None
        sizes = {len(self._blocks[group_id, each].tokens) for each in event.block_hashes}
        assert sizes == {event.block_size}, f"blocks of {sizes} tokens: {event}"
        assert event.block_hashes, f"an event without blocks: {event}"
        blocks = [self._blocks[group_id, block_hash] for block_hash in event.block_hashes]
        parent_hash = event.parent_block_hash
        for block_hash, block in zip(event.block_hashes, blocks, strict=True):
            assert block.parent_hash == parent_hash, f"not a chain: {event}"
            parent_hash = block_hash
        tokens = [token for block in blocks for token in block.tokens]
        assert list(event.token_ids) == tokens, f"expected tokens {tokens}: {event}"
        extra_keys = [block.extra_keys for block in blocks]
        found_keys = event.extra_keys or [None] * len(blocks)
        assert found_keys == extra_keys, f"expected extra keys {extra_keys}: {event}"
        assert {event.lora_name} == {block.adapter for block in blocks}
        self.counts["events checked"] += 1
