# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The benchmark of retention on vLLM's real block manager. Hits end inside blocks of states."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.upstream_version import IS_SINCE_0_30

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from retention.cells import layout_named, run_cell
from retention.engine import Engine
from retention.serving import Serving
from retention.suite import Cell
from retention.traces import write_trace
from retention.variants import Variant, entered

NUM_BLOCKS = 400
NUM_BLOCKS_OF_CHATS = 384
"""A fifth of what dense caching fills, with hits inside blocks."""
DENSE = Cell("qwen3.5", "chat", "inf", "dense", scale=0.1)


@pytest.mark.skipif(not IS_SINCE_0_30, reason="hits end with whole blocks")
@pytest.mark.parametrize("variant", ["stock:0", "adaptive"])
def test_hits_end_inside_blocks_and_copies_hold_no_blocks(variant: str) -> None:
    layout = layout_named(DENSE.layout)
    trace = write_trace(DENSE.trace, DENSE.scale)
    with entered(Variant.parse(variant)):
        engine = Engine(layout, NUM_BLOCKS)
        found = Serving(layout, engine, trace).run()
        engine.start_step()
    assert engine.manager.block_pool.get_num_free_blocks() == NUM_BLOCKS - 1
    assert found.hit_tokens % layout.match_unit_tokens == 0
    assert found.losses.granularity < len(trace.requests) * layout.match_unit_tokens
    whole = run_cell(DENSE, NUM_BLOCKS)
    assert whole["hit_tokens"] % layout.unit_tokens == 0
    assert found.hit_tokens > 1.05 * whole["hit_tokens"]


@pytest.mark.skipif(not IS_SINCE_0_30, reason="hits end with whole blocks")
def test_ends_of_chats_outlive_what_they_continue() -> None:
    """A small pool keeps the last states of chats, and not those of their earlier turns.

    If all checkpoints share their rates, 68 % are hit. An endless cache hits 83 %.
    """
    chats = [Cell("qwen3.5", "chat", "0.2", "adaptive", scale=0.5, seed=seed) for seed in (0, 1)]
    rates = [run_cell(chat, NUM_BLOCKS_OF_CHATS)["hit_rate"] for chat in chats]
    assert sum(rates) / len(rates) > 0.75


@pytest.mark.skipif(IS_SINCE_0_30, reason="hits end inside blocks")
def test_a_layout_whose_hits_end_inside_blocks_is_refused() -> None:
    refused = run_cell(Cell("qwen3.5", "chat", "0.5", "adaptive", scale=0.1), NUM_BLOCKS)
    assert "needs vLLM 0.30" in refused["refused"]
