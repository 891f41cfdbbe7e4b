# SPDX-License-Identifier: Apache-2.0
"""A range with holes becomes one ``BlockStored`` event per run, each of which is complete."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.installed import retention_installed
from support.scheduler.block_manager import BlockManager, Layout, full, window
from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash

BLOCK_TOKENS = 4
NUM_BLOCKS_OF_PROMPT = 8
HOLES = (0, 3, 4, 7)
RUNS = [(1, 3), (5, 7)]


@pytest.fixture(params=["null blocks", "mask"])
def events_of_a_range_with_holes(request, retaining) -> tuple[list[BlockStored], BlockManager]:
    """Cache the blocks of a prompt but those of ``HOLES``, in one call."""
    interval = 0 if retaining else None
    world = BlockManager(
        Layout((full(BLOCK_TOKENS), window(BLOCK_TOKENS, 9))), interval, events=True
    )
    prompt = world.request(range(BLOCK_TOKENS * NUM_BLOCKS_OF_PROMPT))
    blocks = world.pool.get_new_blocks(NUM_BLOCKS_OF_PROMPT)
    arguments = {}
    if request.param == "null blocks":
        for hole in HOLES:
            blocks[hole] = world.pool.null_block
    else:
        arguments["block_mask"] = [i not in HOLES for i in range(NUM_BLOCKS_OF_PROMPT)]
    try:
        world.pool.cache_full_blocks(
            prompt, blocks, 0, NUM_BLOCKS_OF_PROMPT, BLOCK_TOKENS, 1, **arguments
        )
    except TypeError:
        pytest.skip("this vLLM has no masks")
    return world.manager.take_events(), prompt


@pytest.fixture
def retaining(request) -> Iterator[bool]:
    if not getattr(request, "param", True):
        yield False
        return
    with retention_installed():
        yield True


def test_one_event_per_run(events_of_a_range_with_holes) -> None:
    events, prompt = events_of_a_range_with_holes
    assert [type(event) for event in events] == [BlockStored, BlockStored]
    for event, (start, stop) in zip(events, RUNS, strict=True):
        hashes = [maybe_convert_block_hash(h) for h in prompt.block_hashes]
        assert event.block_hashes == hashes[start:stop]
        assert event.parent_block_hash == hashes[start - 1]
        assert event.token_ids == list(range(start * BLOCK_TOKENS, stop * BLOCK_TOKENS))
        assert event.block_size == BLOCK_TOKENS
        assert event.extra_keys == [None] * (stop - start)
        assert event.group_idx == 1


@pytest.mark.parametrize("retaining", [False], indirect=True)
def test_stock_says_more_tokens_than_blocks(events_of_a_range_with_holes) -> None:
    events, _ = events_of_a_range_with_holes
    (event,) = events
    assert len(event.block_hashes) * event.block_size < len(event.token_ids)
