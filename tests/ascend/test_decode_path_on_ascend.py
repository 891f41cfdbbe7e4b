# SPDX-License-Identifier: Apache-2.0
"""On vllm-ascend's coordinator a quiet step is left out, and nothing is decided otherwise."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import planned_layout, small_layout
from long_prompts import NUM_BLOCKS, outputs, prompt
from support.installed import installed
from support.scheduler.block_manager import BlockManager, Layout
from vllm.v1.request import Request

from vllm_ascend_kvext.features import FAST_PREFIX_CACHE, REPAIRS
from vllm_ascend_kvext.patches.fast_prefix_cache.kv_cache_manager import steps_of

NUM_OUTPUT_TOKENS = 300
REPAIR_NAMES = tuple(repair.name for repair in REPAIRS)


def test_steps_between_two_blocks_are_quiet() -> None:
    layout = planned_layout(128)
    with installed(FAST_PREFIX_CACHE.name, *REPAIR_NAMES):
        world = BlockManager(layout, num_blocks=NUM_BLOCKS)
        request = world.request(prompt(1000))
        world.prefill(request, 512)
        world.decode(request, outputs(NUM_OUTPUT_TOKENS))
        steps = steps_of(world.manager)
    assert steps is not None and steps.groups
    # In the group of the smallest blocks one begins, and one leaves the window, every 8 tokens.
    assert min(group.limits.block_tokens for group in steps.groups) == 8
    assert steps.counts.quiet >= 5 / 8 * NUM_OUTPUT_TOKENS


def decisions(layout: Layout, features: Sequence[str], seed: int) -> list[object]:
    """What a random life of a few requests leaves behind, step by step."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        if features:
            stack.enter_context(installed(*features))
        world = BlockManager(layout, num_blocks=600)
        running: list[Request] = []
        seen: list[object] = []
        for number in range(400):
            if len(running) < 3:
                request = world.request(prompt(rng.randrange(1, 200)))
                world.admit(request, rng.randrange(1, 80))
                running.append(request)
            request = rng.choice(running)
            if request.num_computed_tokens >= request.num_tokens:
                request.append_output_token_ids(number)
            world.step(request, rng.choice((1, 1, 1, 5, 40)))
            if rng.random() < 0.02:
                world.finish(request)
                running.remove(request)
            seen.append(state(world, running))
    return seen


def state(world: BlockManager, running: Sequence[Request]) -> object:
    """Block tables, the free queue, reference counts and keys."""
    pool = world.pool
    return (
        [
            [block.block_id for block in group]
            for request in running
            for group in world.manager.coordinator.get_blocks(request.request_id)
        ],
        [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        [(block.ref_cnt, block.block_hash and block.block_hash[-36:]) for block in pool.blocks],
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("looks_ahead", [frozenset(), frozenset({3})], ids=["plain", "mtp"])
def test_decides_what_vllm_ascend_decides(looks_ahead: frozenset[int], seed: int) -> None:
    layout = Layout(small_layout().specs, looks_ahead)
    stock = decisions(layout, (), seed)
    for number, (one, other) in enumerate(
        zip(stock, decisions(layout, (FAST_PREFIX_CACHE.name,), seed), strict=True)
    ):
        assert one == other, f"step {number}"
