# SPDX-License-Identifier: Apache-2.0
"""The log names the shortest prompt of DeepSeek-V4 that hits, and one token less hits nothing."""

from __future__ import annotations

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="set KVEXT_ASCEND_SOURCES, and run these tests in a pytest process of their own",
)

import ascend_geometry
from support.scheduler.block_manager import BlockManager
from support.scheduler.least_prompt import hit_tokens_of_second, printed_tokens


@pytest.mark.parametrize("block_size", ascend_geometry.BLOCK_SIZES)
def test_the_printed_length_hits_and_one_token_less_does_not(block_size: int) -> None:
    config = ascend_geometry.planned_config(block_size)
    unit_tokens = ascend_geometry.HIT_UNIT_TOKENS[block_size]
    scheduler_block_size, hash_block_size = ascend_geometry.resolved_block_sizes(config, block_size)
    block_manager = BlockManager(
        ascend_geometry.planned_layout(block_size),
        num_blocks=16384,
        scheduler_block_size=scheduler_block_size,
        hash_block_size=hash_block_size,
    )
    printed = printed_tokens(block_manager)
    hits = [
        hit_tokens_of_second(block_manager, num_tokens, unit_tokens)
        for num_tokens in (printed[0] - 1, printed[0])
    ]
    assert printed == (unit_tokens + 1, unit_tokens)
    assert hits == [0, unit_tokens]


def test_a_draft_group_makes_it_longer() -> None:
    block_manager = BlockManager(ascend_geometry.small_layout(frozenset({0})))
    printed, unit_tokens = printed_tokens(block_manager)
    hits = [
        hit_tokens_of_second(block_manager, num_tokens, unit_tokens)
        for num_tokens in (printed - 1, printed)
    ]
    assert printed > unit_tokens + 1
    assert (hits[0], hits[1] > 0) == (0, True)
