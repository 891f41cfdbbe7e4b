# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Pages and host memory as plain arrays. A request has different bytes in every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import (
    KVLayout,
    LayoutGroup,
    Plane,
    RegisteredStorage,
    StatePolicy,
)
from vllm_ascend_kvext.layout.planner import TransferPlanner
from vllm_ascend_kvext.layout.transfer_plan import PlacedChunk

Bytes = np.ndarray
UNTOUCHED = 0xEE

PADDING_BYTES = 8

_STEPS = np.arange(256)


def make_group(
    kv_cache_group_id: int,
    kind: GroupKind,
    tokens_per_page: int,
    tokens_per_row: int,
    row_bytes: Sequence[int],
    window_tokens: int = 0,
    restart_tokens: int = 0,
    *,
    holds_states: bool = False,
    compress_ratio: int = 1,
    first_storage: int = 0,
    blocks_per_page: int = 1,
) -> LayoutGroup:
    """A group in which each plane has its own storage.

    There is padding before and after every page, or every kernel block.
    """
    rows = tokens_per_page // tokens_per_row // blocks_per_page
    planes = tuple(
        Plane(
            layer_name=f"{kv_cache_group_id}.{index}",
            storage=first_storage + index,
            base_bytes=16,
            page_stride_bytes=rows * size + 2 * PADDING_BYTES,
            region_offset_bytes=PADDING_BYTES,
            row_bytes=size,
            dtype="int8",
            is_packed=False,
        )
        for index, size in enumerate(row_bytes)
    )
    return LayoutGroup(
        kv_cache_group_id,
        kind,
        tokens_per_page,
        tokens_per_row,
        window_tokens,
        restart_tokens,
        planes,
        holds_states,
        compress_ratio,
        blocks_per_page,
    )


def make_layout(groups: Sequence[LayoutGroup], num_pages: int) -> KVLayout:
    """A layout of groups with consecutive storages."""
    storages = tuple(
        RegisteredStorage(4096 << index, 16 + num_blocks * plane.page_stride_bytes)
        for index, (num_blocks, plane) in enumerate(
            (num_pages * group.blocks_per_page, plane) for group in groups for plane in group.planes
        )
    )
    num_lists = 1 + max(group.kv_cache_group_id for group in groups)
    return KVLayout(storages, tuple(groups), num_pages, num_lists)


def chunk_bytes(
    layout: KVLayout, chunk: PlacedChunk, states: StatePolicy = StatePolicy.EXACT
) -> int:
    """The host bytes of a chunk."""
    planner = TransferPlanner(layout, states)
    tables = [[1] * chunk.tokens.end_tokens] * layout.num_scheduler_groups
    return planner.plan_store([chunk], tables).host_bytes - chunk.host_offset_bytes


def dense_layout(layout: KVLayout) -> KVLayout:
    """A layout with the same pages. It keeps every row of all groups."""
    groups = (
        replace(group, kind=GroupKind.FULL, window_tokens=0, restart_tokens=0, holds_states=False)
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups))


class PageMemory:
    """The storages of one worker."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.storages = [np.full(one.num_bytes, UNTOUCHED, np.uint8) for one in layout.storages]
        self._groups = {plane: group for group in layout.groups for plane in group.planes}

    def row(self, plane: Plane, page: int, row: int) -> Bytes:
        """A view of the bytes of one row."""
        group = self._groups[plane]
        block, row = divmod(row, group.rows_per_block)
        page = page * group.blocks_per_page + block
        start = plane.base_bytes + page * plane.page_stride_bytes + plane.region_offset_bytes
        start += row * plane.row_bytes
        return self.storages[plane.storage][start : start + plane.row_bytes]

    def fill_pages(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Give every row of a request's pages different bytes, in all groups."""
        for index, group in enumerate(self.layout.groups):
            for number, page in enumerate(block_ids[group.kv_cache_group_id]):
                for row in range(group.rows_per_page) if page else ():
                    for plane in group.planes:
                        absolute = number * group.rows_per_page + row
                        self.row(plane, page, row)[:] = content(index, plane, absolute)


def content(group: int, plane: Plane, row: int) -> Bytes:
    """The byte that a request has in this row. It is never `UNTOUCHED`."""
    first = 101 * plane.storage + 59 * group + 37 * row
    return (_STEPS[: plane.row_bytes] * (1 + row) + first) % UNTOUCHED
