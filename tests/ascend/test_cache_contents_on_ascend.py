# SPDX-License-Identifier: Apache-2.0
"""What lies in vllm-ascend's block pool under retention: keys, free queue, null block, events.

On the small layout, where every block can be looked at.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import SMALL_HIT_UNIT_TOKENS, small_layout
from support.installed import retention_installed
from support.scheduler.block_manager import BlockManager
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    KVCacheBlock,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

UNIT_TOKENS = SMALL_HIT_UNIT_TOKENS
C4, C8 = 0, 1

EAGLE_SETS = {"none": frozenset(), "MTP": frozenset({3}), "all": frozenset(range(6))}
LENGTHS = range(1, 4 * UNIT_TOKENS, 5)
CHUNK_TOKENS = 20
NUM_OUTPUT_TOKENS = UNIT_TOKENS + 3


def small_world(
    interval: int | None, eagle_group_ids: frozenset[int] = frozenset(), events: bool = False
) -> BlockManager:
    return BlockManager(small_layout(eagle_group_ids), interval, num_blocks=400, events=events)


@pytest.fixture
def retention() -> Iterator[None]:
    with retention_installed():
        yield


def serve(world: BlockManager, num_prompt_tokens: int, num_output_tokens: int) -> Request:
    """Run a request to its end, one preemption included."""
    request = world.request(range(num_prompt_tokens))
    world.prefill(request, CHUNK_TOKENS)
    world.decode(request, range(1000, 1000 + num_output_tokens))
    world.preempt(request)
    world.prefill(request, CHUNK_TOKENS)
    world.finish(request)
    return request


class TestReadability:
    """Every cached block serves the same prompt or the next turn."""

    def test_stock_caches_blocks_that_no_lookup_needs(self):
        world = small_world(None)
        request = serve(world, 50, 0)
        assert unneeded_blocks(world, request)

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("eagle", EAGLE_SETS)
    def test_no_block_is_cached_in_vain(self, eagle):
        world = small_world(0, EAGLE_SETS[eagle])
        for num_prompt_tokens in LENGTHS:
            for num_output_tokens in (0, NUM_OUTPUT_TOKENS):
                world.reset()
                request = serve(world, num_prompt_tokens, num_output_tokens)
                assert not unneeded_blocks(world, request), (num_prompt_tokens, num_output_tokens)


def unneeded_blocks(world: BlockManager, request: Request) -> list[bytes]:
    """Keys in the cache without which the prompt and the next turn hit as much.

    Two blocks can have one key: what a look-ahead group recomputes after a preemption is cached
    a second time.
    """
    resend = world.request(request.prompt_token_ids)
    next_turn = world.request([*request.all_token_ids, *range(5000, 5100)])

    def hits() -> tuple[int, int]:
        return world.hit_tokens(resend), world.hit_tokens(next_turn)

    with_all = hits()
    blocks_of_key: dict[bytes, list[KVCacheBlock]] = defaultdict(list)
    for block in world.pool.blocks:
        if block.block_hash is not None:
            blocks_of_key[block.block_hash].append(block)
    unneeded = []
    index = world.pool.cached_block_hash_to_block
    for key, blocks in blocks_of_key.items():
        for block in blocks:
            assert index.pop(key, block.block_id) is block
        if hits() == with_all:
            unneeded.append(key)
        for block in blocks:
            index.insert(key, block)
    return unneeded


class TestFreeQueue:
    """Useless blocks are reallocated first, then untouched ones, and what is kept last."""

    def test_stock_frees_useless_blocks_behind_kept_ones(self):
        useless, kept = released_blocks(small_world(None))
        assert min(kept) < max(useless)

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("eagle", EAGLE_SETS)
    def test_order(self, eagle):
        world = small_world(0, EAGLE_SETS[eagle])
        useless, kept = released_blocks(world)
        num_free_blocks = world.pool.get_num_free_blocks()
        assert num_free_blocks == 399  # all but the null block
        assert sorted(useless) == list(range(len(useless)))
        assert sorted(kept) == list(range(num_free_blocks - len(kept), num_free_blocks))


def released_blocks(world: BlockManager) -> tuple[list[int], list[int]]:
    """Positions in the free queue of a finished request's blocks: those without a hash, others."""
    request = world.request(range(3 * UNIT_TOKENS + 10))
    held: set[int] = set()

    def note() -> None:
        tables = world.manager.coordinator.get_blocks(request.request_id)
        held.update(block.block_id for table in tables for block in table if not block.is_null)

    world.admit(request, CHUNK_TOKENS)
    note()
    while request.num_computed_tokens < request.num_tokens:
        world.step(request, CHUNK_TOKENS)
        note()
    for token_id in range(1000, 1000 + NUM_OUTPUT_TOKENS):
        world.decode(request, [token_id])
        note()
    world.finish(request)
    useless: list[int] = []
    kept: list[int] = []
    for position, block in enumerate(world.pool.free_block_queue.get_all_free_blocks()):
        if block.block_hash is not None:
            kept.append(position)
        elif block.block_id in held:
            useless.append(position)
    assert useless and kept
    return useless, kept


class TestNullBlock:
    """The null block is in nobody's books."""

    def test_stock_frees_it_and_counts_its_references(self):
        world = small_world(None)
        before = world.pool.null_block.ref_cnt
        assert null_blocks_freed(world, [4 * UNIT_TOKENS]) > 0
        assert world.pool.null_block.ref_cnt != before

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("eagle", EAGLE_SETS)
    def test_is_never_freed(self, eagle):
        world = small_world(0, EAGLE_SETS[eagle])
        before = world.pool.null_block.ref_cnt
        assert null_blocks_freed(world, LENGTHS) == 0
        assert world.pool.null_block.ref_cnt == before
        assert world.pool.null_block not in world.pool.free_block_queue.get_all_free_blocks()


def null_blocks_freed(world: BlockManager, lengths: Iterable[int]) -> int:
    """How often the null block is handed to ``free_blocks`` while requests are served."""
    free_blocks = world.pool.free_blocks
    count = 0

    def observe(ordered_blocks: Iterable[KVCacheBlock], *args: object, **kwargs: object) -> None:
        nonlocal count
        blocks = list(ordered_blocks)
        count += sum(block.is_null for block in blocks)
        free_blocks(blocks, *args, **kwargs)

    world.pool.free_blocks = observe
    for num_prompt_tokens in lengths:
        serve(world, num_prompt_tokens, NUM_OUTPUT_TOKENS)
    return count


class TestEvents:
    """Hashes, parent and tokens of an event describe the same blocks."""

    @pytest.mark.parametrize("interval", [None, 0])
    def test_stock_names_tokens_of_other_blocks(self, interval):
        assert inconsistent_events(small_world(interval, events=True))

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("eagle", EAGLE_SETS)
    @pytest.mark.parametrize("interval", [0, UNIT_TOKENS])
    def test_agree(self, interval, eagle):
        assert not inconsistent_events(small_world(interval, EAGLE_SETS[eagle], events=True))


def inconsistent_events(world: BlockManager) -> list[BlockStored]:
    request = serve(world, 4 * UNIT_TOKENS + 10, NUM_OUTPUT_TOKENS)
    events = [event for event in world.manager.take_events() if isinstance(event, BlockStored)]
    assert {event.group_idx for event in events} == set(range(6))
    return [event for event in events if not _is_consistent(event, request, world)]


def _is_consistent(event: BlockStored, request: Request, world: BlockManager) -> bool:
    if not event.block_hashes:
        return False
    hashes: Sequence[bytes] = request.block_hashes
    if event.block_size != world.hash_block_size:
        hashes = BlockHashListWithBlockSize(hashes, world.hash_block_size, event.block_size)
    chain = [maybe_convert_block_hash(block_hash) for block_hash in hashes]
    start = chain.index(event.block_hashes[0])
    stop = start + len(event.block_hashes)
    token_ids = list(request.all_token_ids)[start * event.block_size : stop * event.block_size]
    return (
        event.block_hashes == chain[start:stop]
        and event.parent_block_hash == (chain[start - 1] if start else None)
        and event.token_ids == token_ids
    )


class TestCompressedBlocks:
    """A hit hands out blocks that hold the request's own tokens."""

    @pytest.mark.usefixtures("retention")
    @pytest.mark.parametrize("num_shared_tokens", range(0, 3 * UNIT_TOKENS, 4))
    def test_are_the_request_s_own(self, num_shared_tokens):
        assert not foreign_blocks(small_world(0), num_shared_tokens)


def foreign_blocks(world: BlockManager, num_shared_tokens: int) -> list[int]:
    """Ids of compressed blocks that a prompt hits although they hold another one's tokens.

    Two prompts that begin with the same tokens are served, then the second is sent again.
    """
    num_tokens = 3 * UNIT_TOKENS + 1
    first = list(range(num_tokens))
    second = [*first[:num_shared_tokens], *range(1000, 1000 + num_tokens - num_shared_tokens)]
    held_by_first = _serve_and_note_compressed(world, first)
    _serve_and_note_compressed(world, second)
    blocks, hit_tokens = world.manager.get_computed_blocks(world.request(second))
    assert hit_tokens == num_tokens - 1
    return [
        block.block_id
        for group_id, tokens_per_block in ((C4, 16), (C8, 32))
        for index, block in enumerate(blocks.blocks[group_id])
        if block.block_id in held_by_first and (index + 1) * tokens_per_block > num_shared_tokens
    ]


def _serve_and_note_compressed(world: BlockManager, token_ids: list[int]) -> set[int]:
    request = world.request(token_ids)
    world.prefill(request, CHUNK_TOKENS)
    tables = world.manager.coordinator.get_blocks(request.request_id)
    held = {block.block_id for group_id in (C4, C8) for block in tables[group_id]}
    world.finish(request)
    return held
