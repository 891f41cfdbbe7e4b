# SPDX-License-Identifier: Apache-2.0
"""Null blocks in block tables, on vLLM's real managers: what is freed, and who counts them.

Tables that begin with a live block and have nulls behind it are those of Mamba groups that keep
the state of every step's end; nothing else leaves out a block in the middle. The same is done to a
window's table by hand, for loads that leave holes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.installed import installed
from support.scheduler.block_manager import (
    BlockManager,
    Layout,
    full,
    mamba,
    retention_interval,
    window,
)
from vllm.v1.request import Request

from vllm_ascend_kvext.patches.upstream import live_blocks

BLOCK_TOKENS = 8
FEATURES = {
    "stock": ((), None),
    "fast": (("fast-prefix-cache",), None),
    "retention": (("retention",), "0"),
    "fast-retention": (("fast-prefix-cache", "retention"), "0"),
}


@pytest.fixture(params=FEATURES)
def world_of(request: pytest.FixtureRequest) -> Iterator[object]:
    features, interval = FEATURES[request.param]
    with ExitStack() as stack:
        stack.enter_context(installed(*features))
        stack.enter_context(retention_interval(interval))
        yield lambda layout: BlockManager(layout, interval, num_blocks=100), request.param


def pattern(world: BlockManager, request: Request, group_id: int) -> str:
    """``L`` for a live block, ``-`` for a null."""
    blocks = world.manager.coordinator.get_blocks(request.request_id)[group_id]
    return "".join("-" if block.is_null else "L" for block in blocks)


def check_freed(world: BlockManager, request: Request, variant: str) -> None:
    """All live blocks are free, each once, no null among them, and the null's count is right."""
    pool = world.pool
    tables = world.manager.coordinator.get_blocks(request.request_id)
    num_nulls = sum(block.is_null for table in tables for block in table)
    null_ref_cnt = pool.null_block.ref_cnt
    world.finish(request)
    free = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
    assert sorted(free) == [block.block_id for block in pool.blocks if not block.is_null]
    assert pool.get_num_free_blocks() == len(free)
    assert all(block.ref_cnt == 0 for block in pool.blocks if not block.is_null)
    # Upstream counts the null block down for each of them; with retention its count never moves.
    expected = 0 if "retention" in variant else num_nulls
    assert null_ref_cnt - pool.null_block.ref_cnt == expected


def test_states_of_a_request_leave_nulls_behind_a_live_block(world_of: tuple) -> None:
    make, variant = world_of
    world = make(Layout((full(BLOCK_TOKENS), mamba(BLOCK_TOKENS))))
    request = world.request(range(6 * BLOCK_TOKENS))
    world.admit(request, BLOCK_TOKENS)
    world.step(request, 3 * BLOCK_TOKENS)
    assert pattern(world, request, 1) == "L--L"
    check_freed(world, request, variant)


@pytest.mark.parametrize("num_tokens", [5, 40, 400])
def test_nulls_before_a_window_are_not_freed(world_of: tuple, num_tokens: int) -> None:
    make, variant = world_of
    world = make(Layout((full(BLOCK_TOKENS), window(BLOCK_TOKENS, 20))))
    request = world.request(range(num_tokens))
    world.prefill(request, 16)
    assert pattern(world, request, 1).lstrip("-").count("-") == 0
    check_freed(world, request, variant)


def test_nulls_within_a_window_are_not_freed(world_of: tuple) -> None:
    make, variant = world_of
    world = make(Layout((full(BLOCK_TOKENS), window(BLOCK_TOKENS, 64))))
    request = world.request(range(5 * BLOCK_TOKENS))
    world.admit(request, 5 * BLOCK_TOKENS)
    group = world.manager.coordinator.single_type_managers[1]
    table = group.req_to_blocks[request.request_id]
    left_out = table[2:4]
    table[2:4] = [world.pool.null_block] * 2
    world.pool.free_blocks(left_out)
    assert pattern(world, request, 1) == "LL--L"
    check_freed(world, request, variant)


@pytest.mark.parametrize("table", ["", "L", "-", "--LL", "L-L", "-L-L", "LL--", "L--", "---"])
def test_live_blocks_are_those_that_are_not_null(table: str) -> None:
    world = BlockManager(Layout((full(BLOCK_TOKENS),)), num_blocks=10)
    live = iter(world.pool.blocks[1:])
    blocks = [world.pool.null_block if kind == "-" else next(live) for kind in table]
    found = live_blocks(blocks)
    assert [id(block) for block in found] == [id(block) for block in blocks if not block.is_null]
    assert (found is blocks) == ("-" not in table)
