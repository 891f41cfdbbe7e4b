# SPDX-License-Identifier: Apache-2.0
"""The cache layouts of the benchmark, by name, as vLLM's KV cache configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from support.scheduler.layouts import Attention, Group, Layout

from retention.losses import GroupNeeds

FULL_16 = Group(Attention.FULL, 16)

# vLLM-Ascend's block size for models that are all full attention.
FULL = Layout("full", (Group(Attention.FULL, 128),))

GPTOSS = Layout("gptoss", (FULL_16, Group(Attention.WINDOW, 16, 128)))
GEMMA = Layout("gemma", (FULL_16, *[Group(Attention.WINDOW, 16, 1024)] * 5))
DSV4 = Layout(
    "dsv4",
    (
        Group(Attention.MLA, 256),
        Group(Attention.WINDOW_MLA, 64, 128),
        Group(Attention.WINDOW_MLA, 64, 128),
        Group(Attention.WINDOW_MLA, 4, 8),
        Group(Attention.WINDOW_MLA, 8, 128),
    ),
)
# In "align" mode the page of an attention block is made as large as that of a state, and the
# state is saved once per such block: all groups have one block size of several hundred tokens.
MAMBA = Layout("mamba", (Group(Attention.FULL, 512), *[Group(Attention.MAMBA, 512)] * 3))

ASCEND_BLOCK_SIZES = {"dsv4-ascend32": 32, "dsv4-ascend128": 128}
"""Layouts of vllm-ascend, with the ``--block-size`` each stands for."""

THINNING = {"gemma": 0.6}
"""Six groups of small blocks take more time per token than the other layouts."""

PLAIN_LAYOUTS = {layout.name: layout for layout in (FULL, GPTOSS, GEMMA, DSV4, MAMBA)}


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """A layout with what the benchmark has to know of it.

    Attributes:
        name: As on the command line.
        config: Builds the configuration for a number of blocks.
        groups: By group id.
        unit_tokens: Hits are multiples of it.
        scheduler_block_tokens: What the engine calls the scheduler block size.
        hash_block_tokens: Tokens per block hash.
        state_block_tokens: Block size at which prefill chunks end; 0 where any end will do.
        look_ahead_tokens: What a drafter's look-ahead takes off a hit, at most.
        stretch: Factor on the texts' lengths that makes them long enough for the unit.
        thinning: Factor on the number of texts, so that a cell takes no longer than the others.
        step_tokens: Tokens that a scheduler step hands out.
    """

    name: str
    config: Callable[[int], object]
    groups: tuple[GroupNeeds, ...]
    unit_tokens: int
    scheduler_block_tokens: int
    hash_block_tokens: int
    state_block_tokens: int = 0
    look_ahead_tokens: int = 0
    stretch: float = 1.0
    thinning: float = 1.0
    step_tokens: int = 8192

    def blocks_without_hits(self, num_tokens: int) -> int:
        """Blocks for ``num_tokens`` tokens if every group kept them all."""
        return sum(math.ceil(num_tokens / group.block_tokens) for group in self.groups)


def get_layout(name: str) -> BenchLayout:
    """The layout of that name.

    Raises:
        ValueError: If there is none.
    """
    if name in ASCEND_BLOCK_SIZES:
        from retention.ascend_layouts import ascend_layout

        return ascend_layout(name, ASCEND_BLOCK_SIZES[name])
    if name in PLAIN_LAYOUTS:
        return _plain(PLAIN_LAYOUTS[name])
    raise ValueError(
        f"layout {name!r}: expected one of {', '.join([*PLAIN_LAYOUTS, *ASCEND_BLOCK_SIZES])}"
    )


def _plain(layout: Layout) -> BenchLayout:
    sizes = [group.block_tokens for group in layout.groups]
    return BenchLayout(
        name=layout.name,
        config=layout.to_config,
        groups=tuple(_needs(group) for group in layout.groups),
        unit_tokens=math.lcm(*sizes),
        scheduler_block_tokens=math.lcm(*sizes),
        hash_block_tokens=math.gcd(*sizes),
        state_block_tokens=next(
            (g.block_tokens for g in layout.groups if g.attention is Attention.MAMBA), 0
        ),
        thinning=THINNING.get(layout.name, 1.0),
    )


def _needs(group: Group) -> GroupNeeds:
    if group.has_window:
        return GroupNeeds(group.block_tokens, group.span_tokens - 1)
    if group.attention is Attention.MAMBA:
        return GroupNeeds(group.block_tokens, 1)
    return GroupNeeds(group.block_tokens, None)
