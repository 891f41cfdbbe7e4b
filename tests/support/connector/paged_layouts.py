# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Layouts whose pages are real tensors, both for vLLM's scheduler and for connector workers.

They are small, and made of the groups of `support.scheduler.layouts`. The groups share storages
like vLLM's groups: a block that goes to another group is overwritten.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

from support.layout import fixtures, upstream_line
from support.layout.reach import Reach
from support.layout.truth import LayoutFixture, PagedTensor
from support.layout.upstream_line import HAS_ONE_VIEW
from support.scheduler import layouts
from support.scheduler.layouts import Attention, Group, Layout
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import RowAddressing

_HEAD_SIZE = 4
_NUM_LAYERS = 2
_HEADS: dict[str, Any] = {"head_size": _HEAD_SIZE, "dtype": torch.bfloat16}
_STATES: dict[str, Any] = {"shapes": ((3, 4), (6,)), "dtypes": (torch.bfloat16, torch.float32)}

Make = Callable[[int], LayoutFixture]


@dataclass(frozen=True, slots=True)
class PagedLayout(Layout):
    """A layout with pages.

    Attributes:
        make: Makes the config and tensors of one worker for a number of blocks.
        host_bytes: Three sizes of host memory: for nothing, for a part of the KV, and for all of
        it.
    """

    make: Make
    host_bytes: tuple[int, ...] = (1 << 14, 1 << 16, 1 << 22)

    def to_config(self, num_blocks: int) -> KVCacheConfig:
        return self.make(num_blocks).scheduler_config


def paged(layout: Layout, addressing: RowAddressing | None = None) -> PagedLayout:
    """A layout of the scheduler's harness, with small pages.

    Args:
        addressing: `TOKENS` for devices that address single rows, with tensors of vLLM-Ascend's
            shapes. The default is the CPU's: a page is one row.
    """

    def make(num_blocks: int) -> LayoutFixture:
        return _small_pages(layout, num_blocks, addressing)

    suffix = "" if addressing is None else "-rows"
    return PagedLayout(layout.name + suffix, layout.groups, make)


def _small_pages(
    layout: Layout, num_blocks: int, addressing: RowAddressing | None
) -> LayoutFixture:
    specs = [
        group.to_spec(**(_STATES if group.attention is Attention.MAMBA else _HEADS))
        for group in layout.groups
    ]
    page_bytes = max(spec.page_size_bytes for spec in specs)
    page_bytes = math.ceil(page_bytes / 8) * 8
    specs = [replace(spec, page_size_padded=page_bytes) for spec in specs]
    if HAS_ONE_VIEW and addressing is None:
        return _one_view_each(layout, specs, num_blocks)
    storages = [torch.zeros(num_blocks * page_bytes, dtype=torch.uint8) for _ in range(_NUM_LAYERS)]
    kv_caches: dict[str, object] = {}
    tensors: list[PagedTensor] = []
    described = []
    for index, (group, spec) in enumerate(zip(layout.groups, specs, strict=True)):
        names = _names(index)
        described.append(KVCacheGroupSpec(names, spec, is_eagle_group=group.is_eagle))
        reach = _reach(group, addressing)
        for name, storage in zip(names, storages, strict=True):
            made = _tensors(group, storage, num_blocks, page_bytes)
            kv_caches[name] = made[0][0] if len(made) == 1 else [tensor for tensor, _ in made]
            tensors += [PagedTensor(index, tensor, reach, 0, axis) for tensor, axis in made]
    config = KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=described)
    return LayoutFixture(config, config, kv_caches, tuple(tensors), addressing)


def _one_view_each(layout: Layout, specs: list[Any], num_blocks: int) -> LayoutFixture:
    """vLLM 0.30's layout on a CPU for layers of one page size: one storage, one view per layer."""
    groups = [
        KVCacheGroupSpec(_names(index), spec, is_eagle_group=group.is_eagle)
        for index, (group, spec) in enumerate(zip(layout.groups, specs, strict=True))
    ]
    config = upstream_line.config_by_layers(groups, num_blocks)
    kv_caches = upstream_line.register(config, {})
    tensors = tuple(
        PagedTensor(index, kv_caches[name], _reach(group, None))
        for index, group in enumerate(layout.groups)
        for name in _names(index)
    )
    return LayoutFixture(config, config, kv_caches, tensors)


def _names(group: int) -> list[str]:
    return [f"{group}.{layer}.attn" for layer in range(_NUM_LAYERS)]


def _reach(group: Group, addressing: RowAddressing | None) -> Reach:
    tokens = group.block_tokens
    if group.attention is Attention.MAMBA:
        return Reach(GroupKind.STATE, tokens, tokens, holds_states=True)
    per_row = 1 if addressing is RowAddressing.TOKENS else tokens
    if group.has_window:
        return Reach(GroupKind.WINDOW, tokens, per_row, group.span_tokens)
    return Reach(GroupKind.FULL, tokens, per_row)


def _tensors(
    group: Group, storage: torch.Tensor, num_blocks: int, page_bytes: int
) -> list[tuple[torch.Tensor, int | None]]:
    """The tensors of one layer, each with the axis that counts its tokens."""
    parts: list[tuple[tuple[int, ...], torch.dtype, int | None]]
    if group.attention is Attention.MAMBA:
        parts = [(*state, None) for state in zip(_STATES["shapes"], _STATES["dtypes"], strict=True)]
    elif group.attention in (Attention.MLA, Attention.WINDOW_MLA):
        parts = [((group.block_tokens, _HEAD_SIZE), torch.bfloat16, 1)]
    else:
        parts = [((2, group.block_tokens, 1, _HEAD_SIZE), torch.bfloat16, 2)]
    found = []
    offset_bytes = 0
    for shape, dtype, token_axis in parts:
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        tensor = torch.as_strided(
            storage.view(dtype),
            (num_blocks, *shape),
            (page_bytes // dtype.itemsize, *strides),
            offset_bytes // dtype.itemsize,
        )
        found.append((tensor, token_axis))
        offset_bytes += math.prod(shape) * dtype.itemsize
    return found


def _deepseek_v4_layout() -> PagedLayout:
    """The layout that vLLM plans, with the facts that the scheduler's harness reads."""
    make = partial(fixtures.deepseek_v4, "auto", 4)
    made = make(16)
    config: Any = made.scheduler_config
    groups = []
    for index, described in enumerate(config.kv_cache_groups):
        reach = next(iter(made.reaches(index)))
        attention = Attention.WINDOW_MLA if reach.window_tokens else Attention.MLA
        groups.append(Group(attention, described.kv_cache_spec.block_size, reach.window_tokens))
    return PagedLayout("deepseek-v4-upstream", tuple(groups), make, (1 << 21, 1 << 23, 1 << 26))


ROWS = RowAddressing.TOKENS

FULL = paged(layouts.FULL)
FULL_EAGLE = paged(layouts.FULL.with_eagle(0))
WINDOW = paged(layouts.WINDOW)
GEMMA = paged(layouts.GEMMA)
GPT_OSS = paged(Layout("gpt-oss", (Group(Attention.FULL, 16), Group(Attention.WINDOW, 16, 24))))
MIXED_BLOCKS = paged(layouts.MIXED_BLOCKS, ROWS)
TWO_WINDOWS = paged(layouts.TWO_WINDOWS, ROWS)
TWO_FULL = paged(layouts.TWO_FULL)
DEEPSEEK_V4_LIKE = paged(layouts.DEEPSEEK_V4, ROWS)
DEEPSEEK_V4_EAGLE = paged(layouts.DEEPSEEK_V4.with_eagle(1), ROWS)
MAMBA = paged(layouts.MAMBA)
MAMBA_WINDOW = paged(layouts.MAMBA_WINDOW, ROWS)

LAYOUTS: tuple[PagedLayout, ...] = (
    FULL,
    WINDOW,
    GEMMA,
    GPT_OSS,
    MIXED_BLOCKS,
    TWO_WINDOWS,
    TWO_FULL,
    DEEPSEEK_V4_LIKE,
    DEEPSEEK_V4_EAGLE,
)
STATE_LAYOUTS = (MAMBA, MAMBA_WINDOW)

_WIDE = 4 * 8
WIDE_STATES = paged(
    Layout("wide-states", (Group(Attention.FULL, _WIDE), Group(Attention.MAMBA, _WIDE))), ROWS
)
WIDE_STATES_WINDOW = paged(
    Layout("wide-states-window", (*WIDE_STATES.groups, Group(Attention.WINDOW, _WIDE, 40))), ROWS
)
SMALL_ROW_BLOCKS = paged(
    Layout(
        "small-row-blocks",
        (Group(Attention.FULL, 8), Group(Attention.MAMBA, _WIDE), Group(Attention.MAMBA, _WIDE)),
    )
)
WIDE_STATE_LAYOUTS = (WIDE_STATES, WIDE_STATES_WINDOW, SMALL_ROW_BLOCKS)
"""Layouts whose states have blocks of several units. Set the unit by `fine_units`."""

UPSTREAM_LAYOUTS = (_deepseek_v4_layout(),)
"""Layouts that vLLM itself plans. They are slower than the others."""
