# SPDX-License-Identifier: Apache-2.0
"""Pages and host memory as plain arrays, and a request whose every row has bytes of its own.

Moves what the tables of a plan say, row by row. Knows nothing of how plans are made.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.layout.model import KVLayout, LayoutGroup, Plane, RegisteredStorage

Bytes = np.ndarray
UNTOUCHED = 0xEE

PADDING_BYTES = 8

_STEPS = np.arange(256)


def make_group(
    scheduler_group: int,
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
) -> LayoutGroup:
    """A group whose planes have a storage each, with padding before and after every page."""
    rows = tokens_per_page // tokens_per_row
    planes = tuple(
        Plane(
            layer_name=f"{scheduler_group}.{index}",
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
        scheduler_group,
        kind,
        tokens_per_page,
        tokens_per_row,
        window_tokens,
        restart_tokens,
        planes,
        holds_states,
        compress_ratio,
    )


def make_layout(groups: Sequence[LayoutGroup], num_pages: int) -> KVLayout:
    """Groups whose ``first_storage`` count on from each other."""
    storages = tuple(
        RegisteredStorage(4096 << index, 16 + num_pages * plane.page_stride_bytes)
        for index, plane in enumerate(plane for group in groups for plane in group.planes)
    )
    num_lists = 1 + max(group.scheduler_group for group in groups)
    return KVLayout(storages, tuple(groups), num_pages, num_lists)


class PageMemory:
    """The storages of one worker."""

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.storages = [np.full(one.num_bytes, UNTOUCHED, np.uint8) for one in layout.storages]

    def row(self, plane: Plane, page: int, row: int) -> Bytes:
        """A view of the bytes of one row."""
        start = plane.base_bytes + page * plane.page_stride_bytes + plane.region_offset_bytes
        start += row * plane.row_bytes
        return self.storages[plane.storage][start : start + plane.row_bytes]

    def fill_pages(self, block_ids: Sequence[Sequence[int]]) -> None:
        """Every row of a request's pages gets its own bytes, in all groups."""
        for index, group in enumerate(self.layout.groups):
            for number, page in enumerate(block_ids[group.scheduler_group]):
                for row in range(group.rows_per_page) if page else ():
                    for plane in group.planes:
                        absolute = number * group.rows_per_page + row
                        self.row(plane, page, row)[:] = content(index, plane, absolute)


def content(group: int, plane: Plane, row: int) -> Bytes:
    """What a request has in this row; never `UNTOUCHED`."""
    first = 101 * plane.storage + 59 * group + 37 * row
    return (_STEPS[: plane.row_bytes] * (1 + row) + first) % UNTOUCHED


def move(
    memory: PageMemory, host: Bytes, planes: np.ndarray, runs: np.ndarray, *, to_host: bool
) -> None:
    """What the tables mean; see ``transfer.schema``."""
    for group, storage, base, stride, region, row_bytes, rows, pages, offset in planes.tolist():
        pool = memory.storages[storage]
        for run_group, page, first, count, host_row in runs.tolist():
            if run_group != group:
                continue
            assert 0 < page < pages and 0 <= first < first + count <= rows
            start = base + page * stride + region + first * row_bytes
            in_page = pool[start : start + count * row_bytes]
            start = offset + host_row * row_bytes
            in_host = host[start : start + count * row_bytes]
            assert len(in_page) == len(in_host) == count * row_bytes
            if to_host:
                in_host[:] = in_page
            else:
                in_page[:] = in_host
