# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""KV cache layouts: the groups of a model, as the engine passes them to the scheduler.

There are no layers and no tensors, because the scheduler only looks at specs.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)

from support import family

from .releases import retention_fields


class Attention(enum.Enum):
    """Which earlier positions a token of this group reads."""

    FULL = "full"
    MLA = "mla"
    WINDOW = "window"
    WINDOW_MLA = "window_mla"
    CHUNKED = "chunked"
    MAMBA = "mamba"
    COMPRESSED = "compressed"
    """Compressed attention of vLLM-Ascend. A row stands for several tokens."""


@dataclass(frozen=True, slots=True)
class Group:
    """One KV cache group.

    Attributes:
        span_tokens: The length of the sliding window or of the attention chunk. 0 if there is none.
        tokens_per_row: The number of tokens in a row. The row is written with its last token.
        is_eagle: Whether the group holds layers of an EAGLE/MTP drafter.
        draft_blocks: For state groups: the blocks of a request with states of drafts.
    """

    attention: Attention
    block_tokens: int
    span_tokens: int = 0
    tokens_per_row: int = 1
    is_eagle: bool = False
    draft_blocks: int = 0

    @property
    def rows_per_block(self) -> int:
        return self.block_tokens // self.tokens_per_row

    @property
    def has_window(self) -> bool:
        return self.attention in (Attention.WINDOW, Attention.WINDOW_MLA)

    def first_read_position(self, position: int) -> int:
        """The first position that the token at ``position`` attends to."""
        if self.has_window:
            return max(0, position - self.span_tokens + 1)
        if self.attention is Attention.CHUNKED:
            return position // self.span_tokens * self.span_tokens
        return 0

    def to_spec(self, **fields: Any) -> KVCacheSpec:
        """A small spec of the group. ``fields`` are more fields of the spec."""
        if self.attention is Attention.COMPRESSED:
            from ascend_geometry import compressed_spec

            return compressed_spec(self.rows_per_block, self.tokens_per_row)
        if self.attention is Attention.WINDOW_MLA and family.IS_ASCEND:
            from ascend_geometry import window_spec

            return window_spec(self.block_tokens, self.span_tokens)
        make, span = _SPECS[self.attention]
        spans = {span: self.span_tokens} if span else {}
        sizes = _HEADS
        if self.attention is Attention.MAMBA:
            sizes = {**_STATES, "num_speculative_blocks": self.draft_blocks}
        return make(block_size=self.block_tokens, **{**sizes, **spans, **fields})


_HEADS = {"num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
_STATES = {"shapes": ((1,),), "dtypes": (torch.float32,), "mamba_cache_mode": "align"}
_SPECS: dict[Attention, tuple[type[Any], str]] = {
    Attention.FULL: (FullAttentionSpec, ""),
    Attention.MLA: (MLAAttentionSpec, ""),
    Attention.WINDOW: (SlidingWindowSpec, "sliding_window"),
    Attention.WINDOW_MLA: (SlidingWindowMLASpec, "sliding_window"),
    Attention.CHUNKED: (ChunkedLocalAttentionSpec, "attention_chunk_size"),
    Attention.MAMBA: (MambaSpec, ""),
}
"""By kind: vLLM's spec class, and its field for ``span_tokens``."""


def config_of(
    specs: Iterable[KVCacheSpec], eagle_group_ids: Collection[int], num_blocks: int
) -> KVCacheConfig:
    """A config with one group per spec, without tensors."""
    groups = [
        KVCacheGroupSpec([f"layer.{i}"], spec, is_eagle_group=i in eagle_group_ids)
        for i, spec in enumerate(specs)
    ]
    return KVCacheConfig(
        num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=groups, **retention_fields()
    )


@dataclass(frozen=True, slots=True)
class Layout:
    """The groups of one model. The name is used in test ids."""

    name: str
    groups: tuple[Group, ...]

    @property
    def unit_tokens(self) -> int:
        """Least common multiple of the block sizes."""
        return math.lcm(*(group.block_tokens for group in self.groups))

    @property
    def min_block_tokens(self) -> int:
        return min(group.block_tokens for group in self.groups)

    @property
    def has_window(self) -> bool:
        return any(group.has_window for group in self.groups)

    @property
    def has_mamba(self) -> bool:
        return self._has(Attention.MAMBA)

    @property
    def supports_drafts(self) -> bool:
        """Whether the scheduler can use drafts. Chunked-local groups refuse EAGLE."""
        return not (self.has_mamba or self._has(Attention.CHUNKED))

    def with_eagle(self, *group_ids: int) -> Layout:
        """The same layout, but these groups hold the drafter's layers."""
        groups = tuple(replace(g, is_eagle=i in group_ids) for i, g in enumerate(self.groups))
        return Layout(f"{self.name}-eagle{''.join(map(str, group_ids))}", groups)

    def to_config(self, num_blocks: int) -> KVCacheConfig:
        eagle_group_ids = [i for i, group in enumerate(self.groups) if group.is_eagle]
        return config_of((group.to_spec() for group in self.groups), eagle_group_ids, num_blocks)

    def _has(self, attention: Attention) -> bool:
        return any(group.attention is attention for group in self.groups)


def _full(block_tokens: int) -> Group:
    return Group(Attention.FULL, block_tokens)


def _window(block_tokens: int, window_tokens: int) -> Group:
    return Group(Attention.WINDOW, block_tokens, window_tokens)


def _mla_window(block_tokens: int, window_tokens: int) -> Group:
    return Group(Attention.WINDOW_MLA, block_tokens, window_tokens)


FULL = Layout("full", (_full(8),))
WINDOW = Layout("window", (_window(4, 10),))
FULL_WINDOW = Layout("full-window", (_full(4), _window(4, 10)))
GEMMA = Layout("gemma", (_full(4), *(_window(4, 13) for _ in range(5))))
MIXED_BLOCKS = Layout("mixed-blocks", (_full(16), _window(4, 9)))
WIDE_WINDOW = Layout("wide-window", (_full(8), _window(4, 40)))
TWO_WINDOWS = Layout("two-windows", (_window(4, 6), _window(8, 20)))
TWO_FULL = Layout("two-full", (_full(4), Group(Attention.MLA, 16), _window(8, 12)))
DEEPSEEK_V4 = Layout(
    "deepseek-v4",
    (
        Group(Attention.MLA, 16),
        _mla_window(8, 12),
        _mla_window(8, 12),
        _mla_window(2, 4),
        _mla_window(4, 12),
    ),
)
MAMBA = Layout("mamba", (_full(8), Group(Attention.MAMBA, 8)))
MAMBA_WINDOW = Layout("mamba-window", (_full(8), Group(Attention.MAMBA, 8), _window(8, 12)))
CHUNKED = Layout("chunked", (_full(8), Group(Attention.CHUNKED, 8, 24)))

COMPRESSED = Layout(
    "compressed",
    (
        Group(Attention.COMPRESSED, 16, tokens_per_row=4),
        Group(Attention.COMPRESSED, 32, tokens_per_row=8),
        _mla_window(4, 6),
        _mla_window(4, 6),
        _mla_window(2, 3),
        _mla_window(4, 16),
    ),
)
"""DeepSeek-V4 on vLLM-Ascend, group by group. Hits end at multiples of 32 tokens."""

LAYOUTS = (
    FULL,
    WINDOW,
    FULL_WINDOW,
    GEMMA,
    MIXED_BLOCKS,
    WIDE_WINDOW,
    TWO_WINDOWS,
    TWO_FULL,
    DEEPSEEK_V4,
    MAMBA,
    MAMBA_WINDOW,
    CHUNKED,
)
if family.IS_ASCEND:
    LAYOUTS = (COMPRESSED,)

EAGLE_LAYOUTS = (
    FULL_WINDOW.with_eagle(1),
    GEMMA.with_eagle(0),
    MIXED_BLOCKS.with_eagle(1),
    DEEPSEEK_V4.with_eagle(1),
    DEEPSEEK_V4.with_eagle(0),
)
"""Layouts with a drafter. It is known which groups have its layers."""
if family.IS_ASCEND:
    EAGLE_LAYOUTS = (
        COMPRESSED.with_eagle(3),
        COMPRESSED.with_eagle(0),
        COMPRESSED.with_eagle(*range(6)),
    )
