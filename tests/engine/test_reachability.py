# SPDX-License-Identifier: Apache-2.0
"""Interval 0 hits exactly what dense caching hits, for every length and choice of EAGLE groups.

On vLLM's real block manager. The same cases on vllm-ascend's are in tests/ascend.
"""

from __future__ import annotations

import pytest
from support.installed import retention_installed
from support.retention.reachability import (
    Difference,
    Price,
    eagle_sets,
    serve_conversation,
    serve_prompt_only,
)
from support.sample import LENGTH_STRIDE
from support.scheduler.block_manager import BlockManager, Layout, full, window

NUM_BLOCKS = 800

LAYOUTS = {
    "one full, one window": (full(4), window(4, 9)),
    "one full, two windows": (full(4), window(4, 13), window(4, 13, head_size=2)),
    "window of half a unit": (full(8), window(4, 5), window(2, 5)),
    "three block sizes": (full(8), window(4, 7), window(2, 5)),
    "window wider than the unit": (full(8), window(2, 23)),
    "two wide windows": (full(8), window(2, 19), window(4, 30)),
    "window only": (window(4, 11),),
    "compressor states": (full(16), window(4, 8), window(2, 4), window(4, 16)),
}


def unit_of(specs: tuple[object, ...]) -> int:
    return max(spec.block_size for spec in specs)  # each divides the largest


def longest_window(specs: tuple[object, ...]) -> int:
    return max(getattr(spec, "sliding_window", None) or 0 for spec in specs)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_hits_what_dense_caching_hits(layout_name: str) -> None:
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    difference = Difference()
    with retention_installed():
        for eagle_group_ids in eagle_sets(len(specs)):
            layout = Layout(specs, eagle_group_ids)
            dense = BlockManager(layout, None, NUM_BLOCKS)
            sparse = BlockManager(layout, 0, NUM_BLOCKS)
            for length in range(1, 3 * unit_tokens + longest_window(specs) + 2, LENGTH_STRIDE):
                case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
                for serve in (
                    lambda world, n=length: serve_conversation(world, n, unit_tokens, 5),
                    lambda world, n=length: serve_prompt_only(world, n),
                ):
                    dense.reset()
                    sparse.reset()
                    difference.compare(case, serve(dense), serve(sparse))
    print(f"{layout_name}: {difference.num_cases} cases")
    assert not difference.examples


def test_stock_loses_hits() -> None:
    """The same comparison on vLLM's own interval 0 is red, in each of the known ways."""
    difference = Difference()
    for specs in LAYOUTS.values():
        unit_tokens = unit_of(specs)
        for eagle_group_ids in eagle_sets(len(specs)):
            layout = Layout(specs, eagle_group_ids)
            dense = BlockManager(layout, None, NUM_BLOCKS)
            sparse = BlockManager(layout, 0, NUM_BLOCKS)
            for length in range(1, 5 * unit_tokens + 2, 3):
                dense.reset()
                sparse.reset()
                case = f"EAGLE {sorted(eagle_group_ids)}, {length} tokens"
                difference.compare(
                    case, serve_prompt_only(dense, length), serve_prompt_only(sparse, length)
                )
                dense.reset()
                sparse.reset()
                difference.compare(
                    case,
                    serve_conversation(dense, length, unit_tokens, unit_tokens),
                    serve_conversation(sparse, length, unit_tokens, unit_tokens),
                )
    print(f"stock differs in {difference.num_different} of {difference.num_cases} cases")
    assert {"resend", "prompt extended", "next turn", "resume"} <= set(difference.examples)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_interval_leaves_a_checkpoint_at_each_multiple(layout_name: str) -> None:
    """A conversation that branches off falls back to the last multiple before the branch."""
    specs = LAYOUTS[layout_name]
    interval_tokens = 2 * unit_of(specs)
    num_tokens = longest_window(specs) + 4 * interval_tokens + 1
    prompt = list(range(num_tokens))
    with retention_installed():
        for eagle_group_ids in eagle_sets(len(specs)):
            layout = Layout(specs, eagle_group_ids)
            dense = BlockManager(layout, None, NUM_BLOCKS)
            sparse = BlockManager(layout, interval_tokens, NUM_BLOCKS)
            for world in (dense, sparse):
                request = world.request(prompt)
                world.prefill(request, 2 * interval_tokens + 3)
                world.finish(request)
            branches = [[*prompt[:end], *range(1000, 1100)] for end in range(1, num_tokens)]
            dense_hits = [dense.hit_tokens(dense.request(branch)) for branch in branches]
            # With EAGLE, some multiples within the first window cannot be hit at all.
            checkpoints = {hit for hit in dense_hits if hit % interval_tokens == 0}
            for branch, dense_tokens in zip(branches, dense_hits, strict=True):
                found = sparse.hit_tokens(sparse.request(branch))
                expected = max(tokens for tokens in checkpoints if tokens <= dense_tokens)
                # The two tails of the prompt's end may serve a late branch better.
                assert expected <= found <= dense_tokens, sorted(eagle_group_ids)


@pytest.mark.parametrize("layout_name", LAYOUTS)
def test_costs_two_tails(layout_name: str) -> None:
    """At most two tails per group and request; while it runs, one more in the making.

    A tail is in the making from the moment its blocks begin to leave the window until every group
    that looks ahead has its block past the boundary. Below one window's length the tails of
    different groups are entangled, and no more than that window is kept.
    """
    specs = LAYOUTS[layout_name]
    unit_tokens = unit_of(specs)
    window_tokens = longest_window(specs)
    with retention_installed():
        for eagle_group_ids in eagle_sets(len(specs)):
            sparse = BlockManager(Layout(specs, eagle_group_ids), 0, NUM_BLOCKS)
            price = Price(sparse)
            first = window_tokens + 3 * unit_tokens
            for length in range(first, first + 2 * unit_tokens + 2, 3 * LENGTH_STRIDE):
                sparse.reset()
                serve_conversation(sparse, length, unit_tokens, 7, price.observe)
            in_the_making = 1 if eagle_group_ids else 0
            assert price.excess_tails["running"] <= in_the_making, sorted(eagle_group_ids)
            assert price.excess_tails["released"] <= 0, sorted(eagle_group_ids)
