# SPDX-License-Identifier: Apache-2.0
"""Interval 0 hits what dense caching hits, on vllm-ascend's coordinator and layouts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

pytest.importorskip(
    "vllm_ascend",
    reason="needs KVEXT_ASCEND_SOURCES and a pytest process that runs tests/ascend alone",
)

from ascend_geometry import (
    BLOCK_SIZES,
    HIT_UNIT_TOKENS,
    SMALL_HIT_UNIT_TOKENS,
    planned_layout,
    small_layout,
)
from long_prompts import NUM_BLOCKS, hits_around
from support.installed import retention_installed
from support.retention.reachability import Difference, Price, serve_conversation, serve_prompt_only
from support.scheduler.block_manager import BlockManager

SMALL_NUM_BLOCKS = 1500
SMALL_LENGTHS = range(1, 3 * SMALL_HIT_UNIT_TOKENS + 2)

# Both sliding-window groups have the same spec, so a lookup treats them as one.
GROUPS_TOLD_APART = (0, 1, 3, 4, 5)
COMPRESSED_GROUPS = frozenset({0, 1})

TRUE_EAGLE_SETS = {
    "none": frozenset(),
    "MTP": frozenset({3}),  # the group that holds the MTP layer
    "all": frozenset(range(6)),  # what vllm-ascend falls back to when none is flagged
}


def small_eagle_sets(num_flagged: int) -> Iterator[frozenset[int]]:
    return map(frozenset, itertools.combinations(GROUPS_TOLD_APART, num_flagged))


def true_lengths(block_size: int) -> Iterator[int]:
    """Around every boundary of three units: at it, and up to one block of each size behind it."""
    sizes = BLOCK_SIZES[block_size]
    blocks = {0, sizes.c4_state, sizes.c128_state, sizes.window}
    distances = sorted({-1, *(block + extra for block in blocks for extra in (0, 1))})
    for index in (1, 2, 3):
        yield from (index * HIT_UNIT_TOKENS[block_size] + distance for distance in distances)


@pytest.mark.parametrize("num_flagged", range(len(GROUPS_TOLD_APART) + 1))
def test_small_layout_hits_what_dense_caching_hits(num_flagged, record_property):
    """Every length over three units, every choice of EAGLE groups."""
    difference = Difference()
    with retention_installed():
        for number, eagle_group_ids in enumerate(small_eagle_sets(num_flagged)):
            layout = small_layout(eagle_group_ids)
            dense = BlockManager(layout, None, SMALL_NUM_BLOCKS)
            sparse = BlockManager(layout, 0, SMALL_NUM_BLOCKS)
            for length in SMALL_LENGTHS:
                lives = [lambda world, n=length: serve_prompt_only(world, n)]
                if length % 4 == number % 4:
                    lives.append(
                        lambda world, n=length: serve_conversation(
                            world, n, SMALL_HIT_UNIT_TOKENS, preempt_every=9
                        )
                    )
                for serve in lives:
                    dense.reset()
                    sparse.reset()
                    case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
                    difference.compare(case, serve(dense), serve(sparse))
    record_property("cases", difference.num_cases)
    assert not difference.examples


def test_stock_loses_hits(record_property):
    """The same comparison is red on the interval 0 of vLLM and vllm-ascend."""
    difference = Difference()
    for eagle_group_ids in itertools.chain(small_eagle_sets(0), small_eagle_sets(1)):
        layout = small_layout(eagle_group_ids)
        dense = BlockManager(layout, None, SMALL_NUM_BLOCKS)
        sparse = BlockManager(layout, 0, SMALL_NUM_BLOCKS)
        for length in SMALL_LENGTHS:
            dense.reset()
            sparse.reset()
            case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
            difference.compare(
                case, serve_prompt_only(dense, length), serve_prompt_only(sparse, length)
            )
    record_property("different", f"{difference.num_different} of {difference.num_cases}")
    assert {"resend", "prompt extended"} <= set(difference.examples)


@pytest.mark.parametrize("eagle", TRUE_EAGLE_SETS)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_true_layout_hits_what_dense_caching_hits(block_size, eagle, record_property):
    layout = planned_layout(block_size, TRUE_EAGLE_SETS[eagle])
    difference = Difference()
    with retention_installed():
        dense = BlockManager(layout, None, NUM_BLOCKS)
        sparse = BlockManager(layout, 0, NUM_BLOCKS)
        for length in true_lengths(block_size):
            difference.compare(
                f"{length} tokens", hits_around(dense, length), hits_around(sparse, length)
            )
    record_property("cases", difference.num_cases)
    assert not difference.examples


@pytest.mark.parametrize("num_flagged", [0, 1, 2, len(GROUPS_TOLD_APART)])
def test_costs_two_tails(num_flagged):
    """At most two tails per group and request, besides those in the making.

    A tail is in the making while some group lacks its look-ahead block. That takes at most one
    unit, and one more where a block of a compressed group, as large as the unit, is looked at.
    """
    with retention_installed():
        for eagle_group_ids in small_eagle_sets(num_flagged):
            sparse = BlockManager(small_layout(eagle_group_ids), 0, SMALL_NUM_BLOCKS)
            price = Price(sparse)
            for length in SMALL_LENGTHS[::3]:
                sparse.reset()
                serve_conversation(sparse, length, SMALL_HIT_UNIT_TOKENS, 7, price.observe)
            in_the_making = bool(eagle_group_ids) + (eagle_group_ids >= COMPRESSED_GROUPS)
            assert price.excess_tails["running"] <= in_the_making, sorted(eagle_group_ids)
            assert price.excess_tails["released"] <= 0, sorted(eagle_group_ids)
