# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""The cache layouts of the benchmarks, by name, as vLLM's KV cache configuration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from support.scheduler.layouts import Attention, Group, Layout
from vllm.v1.kv_cache_interface import KVCacheConfig

from retention.losses import GroupNeeds
from vllm_ascend_kvext.groups.spec_attributes import tokens_per_page_of

FULL_16 = Group(Attention.FULL, 16)

# vLLM-Ascend's block size for models that are all full attention.
FULL = Layout("full", (Group(Attention.FULL, 128),))

GEMMA128 = Layout(
    "gemma128", (Group(Attention.FULL, 128), *[Group(Attention.WINDOW, 128, 1024)] * 5)
)
GPTOSS128 = Layout("gptoss128", (Group(Attention.FULL, 128), Group(Attention.WINDOW, 128, 128)))
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
# In "align" mode, the page of an attention block is as large as the page of a state, and one state
# is saved per such block. So all groups have the same block size of several hundred tokens.
MAMBA = Layout("mamba", (Group(Attention.FULL, 512), *[Group(Attention.MAMBA, 512)] * 3))

# Qwen3.5-397B-A17B and Kimi-Linear-48B-A3B, with the block sizes that their states lead to.
QWEN35 = Layout("qwen3.5", (Group(Attention.FULL, 2176), *[Group(Attention.MAMBA, 2176)] * 3))
KIMI = Layout("kimi", (Group(Attention.MLA, 1920), *[Group(Attention.MAMBA, 1920)] * 3))

PLAIN_LAYOUTS = {
    layout.name: layout
    for layout in (FULL, GPTOSS, GEMMA, DSV4, MAMBA, GEMMA128, GPTOSS128, QWEN35, KIMI)
}

HASH_TOKENS = {"qwen3.5": 64, "kimi": 64}
"""By layout: the tokens of a hash, where they are fewer than all block sizes share. This is
``--prefix-match-unit`` of vLLM 0.30, with which hits end inside blocks."""

THINNING = {"gemma": 0.6}
"""By layout: a factor on the number of texts. Six groups of small blocks take more time per token
than other layouts."""

ASCEND_BLOCK_SIZES = {"dsv4-ascend32": 32, "dsv4-ascend128": 128}
"""The ``--block-size`` of each layout of DeepSeek-V4 that the real vllm-ascend plans."""

ASCEND_TEXTS = {32: (2.0, 0.45), 128: (5.0, 0.25)}
"""By ``--block-size``: factors on the length and on the number of texts. Texts are longer so that
hits are possible at a unit of thousands of tokens. There are fewer texts, so that not many more
tokens are served than on the other layouts."""

ASCEND_STEP_TOKENS = 2048
"""The tokens of a step. Compressor states take a block per 2 or 8 tokens of a step, cached or not.
With 8192 tokens, the smaller pools would not hold one step."""


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """A layout and its parameters for the benchmarks.

    Attributes:
        to_config: Builds the configuration for a number of blocks.
        match_unit_tokens: The unit of hits inside blocks; 0 if hits end with whole blocks.
        stretch: A factor on the lengths of texts that makes them long enough for the unit.
        thinning: A factor on the number of texts, so that a cell takes no longer than others.
    """

    name: str
    groups: tuple[Group, ...]
    to_config: Callable[[int], KVCacheConfig]
    scheduler_block_tokens: int
    hash_block_tokens: int
    match_unit_tokens: int = 0
    stretch: float = 1.0
    thinning: float = 1.0
    max_num_batched_tokens: int = 8192

    @property
    def unit_tokens(self) -> int:
        """The unit of hits that end with whole blocks."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def hit_unit_tokens(self) -> int:
        """The unit of hits: every hit is a multiple of it."""
        return self.match_unit_tokens or self.unit_tokens

    def with_whole_blocks(self) -> BenchLayout:
        """The same layout, with hits that end with whole blocks."""
        if not self.match_unit_tokens:
            return self
        hash_block_tokens = math.gcd(*(group.block_tokens for group in self.groups))
        return replace(self, hash_block_tokens=hash_block_tokens, match_unit_tokens=0)

    @property
    def needs(self) -> tuple[GroupNeeds, ...]:
        """For each group, the blocks that a hit reads."""
        return tuple(map(_needs, self.groups))

    @property
    def state_block_tokens(self) -> int:
        """The block size at whose multiples prefill chunks end; 0 if they may end anywhere."""
        states = [g.block_tokens for g in self.groups if g.attention is Attention.MAMBA]
        return states[0] if states else 0

    def blocks_without_hits(self, num_tokens: int) -> int:
        """The number of blocks for some tokens if every group kept all of them."""
        return sum(math.ceil(num_tokens / group.block_tokens) for group in self.groups)


def get_layout(name: str) -> BenchLayout:
    """The layout of a name. Layouts of vllm-ascend need it to be active in this process.

    Raises:
        ValueError: If there is no such layout.
    """
    if name in ASCEND_BLOCK_SIZES:
        return _ascend(name, ASCEND_BLOCK_SIZES[name])
    if name not in PLAIN_LAYOUTS:
        known = ", ".join([*PLAIN_LAYOUTS, *ASCEND_BLOCK_SIZES])
        raise ValueError(f"layout {name!r}: expected one of {known}")
    layout = PLAIN_LAYOUTS[name]
    sizes = [group.block_tokens for group in layout.groups]
    return BenchLayout(
        name,
        layout.groups,
        layout.to_config,
        scheduler_block_tokens=math.lcm(*sizes),
        hash_block_tokens=HASH_TOKENS.get(name, math.gcd(*sizes)),
        match_unit_tokens=HASH_TOKENS.get(name, 0),
        thinning=THINNING.get(name, 1.0),
    )


def is_of_ascend(name: str) -> bool:
    return name in ASCEND_BLOCK_SIZES


def _ascend(name: str, block_size: int) -> BenchLayout:
    import ascend_geometry

    config = ascend_geometry.planned_config(block_size)
    scheduler_block_tokens, hash_block_tokens = ascend_geometry.resolved_block_sizes(
        config, block_size
    )
    stretch, thinning = ASCEND_TEXTS[block_size]
    return BenchLayout(
        name,
        tuple(_group_of(group.kv_cache_spec) for group in config.kv_cache_groups),
        lambda num_blocks: ascend_geometry.planned_config(block_size, num_blocks),
        scheduler_block_tokens,
        hash_block_tokens,
        stretch=stretch,
        thinning=thinning,
        max_num_batched_tokens=ASCEND_STEP_TOKENS,
    )


def _group_of(spec) -> Group:
    window_tokens = getattr(spec, "sliding_window", None)
    if window_tokens:
        return Group(Attention.WINDOW_MLA, spec.block_size, window_tokens)
    return Group(Attention.MLA, tokens_per_page_of(spec))


def _needs(group: Group) -> GroupNeeds:
    if group.has_window:
        return GroupNeeds(group.block_tokens, group.span_tokens - 1)
    if group.attention is Attention.MAMBA:
        return GroupNeeds(group.block_tokens, 1)
    return GroupNeeds(group.block_tokens, None)
