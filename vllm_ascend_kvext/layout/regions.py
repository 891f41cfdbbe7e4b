# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vllm-ascend-kvext project
"""Finds the regions of bytes that one registered tensor has in every page.

The axes of a tensor are read in its logical order; the strides may have another order. Pages are
the first axis, or the second axis behind an axis of K and V. An axis of K and V may also follow the
pages. Then come tokens, heads and elements.

vLLM's CPU backend and NZ formats have another axis before the tokens. Their kernels do not write
as the shape says (the CPU backend stores K transposed within a page), so such a page is one row.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from vllm_ascend_kvext.errors import LayoutError
from vllm_ascend_kvext.groups.model import GroupKind
from vllm_ascend_kvext.groups.specs import LayerSpec
from vllm_ascend_kvext.layout.model import RowAddressing
from vllm_ascend_kvext.layout.views import TensorView

_PAIR = 2
"""The size of an axis of K and V."""

_MAX_REGIONS = 256
"""The most regions per page: K and V of 128 separate heads."""


@dataclass(frozen=True, slots=True)
class Region:
    """Bytes that every page of one layer has.

    Attributes:
        offset_bytes: Where the bytes of page 0 begin in the storage.
        num_rows: Rows per page.
        is_packed: Whether the region is one row whose inner order is not known.
        axes: See ``Plane``. Comparisons ignore the axes, because layers with different axes may
            share the bytes.
        blocks_per_page: The kernel blocks of a page, if other bytes lie between them; else 1. The
            other attributes then say of a kernel block what they usually say of a page. Kernel
            block ``b`` of page ``q`` is number ``q * blocks_per_page + b``.
    """

    storage: int
    offset_bytes: int
    page_stride_bytes: int
    row_bytes: int
    num_rows: int
    dtype: str
    is_packed: bool
    axes: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    blocks_per_page: int = 1

    @property
    def num_bytes(self) -> int:
        """Bytes per page, or per kernel block."""
        return self.row_bytes * self.num_rows

    def in_pages(self) -> list[Region]:
        """The same bytes as regions of whole pages: one for each kernel block of a page."""
        page_stride_bytes = self.blocks_per_page * self.page_stride_bytes
        return [
            replace(
                self,
                offset_bytes=self.offset_bytes + block * self.page_stride_bytes,
                page_stride_bytes=page_stride_bytes,
                blocks_per_page=1,
            )
            for block in range(self.blocks_per_page)
        ]

    @property
    def end_bytes(self) -> int:
        return self.offset_bytes + self.num_bytes


@dataclass(frozen=True, slots=True)
class PageView:
    """A tensor whose axes are known.

    Attributes:
        page_axis: The axis that counts the kernel's blocks.
        blocks_per_page: The number of kernel blocks that make up a page.
        token_axis: The axis that counts tokens; None if rows cannot be addressed.
        num_rows: Rows per page, as the shape says.
    """

    view: TensorView
    page_axis: int
    blocks_per_page: int
    token_axis: int | None
    num_rows: int


def find_axes(view: TensorView, spec: LayerSpec, num_pages: int) -> PageView:
    """Find the axis of a tensor that counts pages, and the axis that counts tokens.

    Raises:
        LayoutError: If no axis counts pages, or if two axes could.
    """
    # A layer registers one tensor per state, or one tensor for all its states.
    is_state = spec.kind is GroupKind.STATE
    if is_state:
        candidates = [0] if view.shape and view.shape[0] == num_pages else []
    else:
        candidates = [axis for axis in _page_axes(view.shape) if view.shape[axis] % num_pages == 0]
    if len(candidates) != 1:
        found = "two such axes" if candidates else "none"
        raise LayoutError(
            f"{spec.where}: tensor of shape {list(view.shape)}: expected one axis of {num_pages} "
            f"pages, first or behind an axis of two, found {found}; "
            + ("use more than two pages" if candidates else "this layout is not supported")
        )
    page_axis = candidates[0]
    blocks_per_page = view.shape[page_axis] // num_pages
    if is_state:
        return PageView(view, page_axis, blocks_per_page, None, 1)
    token_axis, is_certain = _token_axis(view.shape, page_axis, blocks_per_page, spec)
    num_rows = view.shape[token_axis] * blocks_per_page
    return PageView(view, page_axis, blocks_per_page, token_axis if is_certain else None, num_rows)


def regions_of(
    page: PageView, spec: LayerSpec, addressing: RowAddressing, may_divide: bool = False
) -> list[Region]:
    """The regions of one tensor: K before V, and head by head if heads are separate.

    Args:
        may_divide: Whether rows are addressed kernel block by kernel block if other bytes lie
            between the kernel blocks of a page.

    Raises:
        LayoutError: If the tensor repeats bytes (a stride of zero), or if a page has too many
            pieces to move them one by one.
    """
    view = page.view
    for size, stride in zip(view.shape, view.strides_bytes, strict=True):
        if size > 1 and stride <= 0:
            raise LayoutError(
                f"{spec.where}: tensor of shape {list(view.shape)} has strides "
                f"{list(view.strides_bytes)} bytes, expected positive ones; register the tensor "
                "itself instead of an expanded view"
            )
    is_state = spec.kind is GroupKind.STATE
    is_addressed = addressing is RowAddressing.TOKENS and not (
        is_state or spec.is_byte_typed or view.is_private_format or page.token_axis is None
    )
    regions = _rows_of_tokens(page, may_divide) if is_addressed else None
    regions = regions or _split(page, is_packed=not is_state)
    if len(regions) > _MAX_REGIONS:
        raise LayoutError(
            f"{spec.where}: a page of the tensor of shape {list(view.shape)} with strides "
            f"{list(view.strides_bytes)} bytes is in {len(regions)} pieces, expected at most "
            f"{_MAX_REGIONS}; this layout is not supported"
        )
    return regions


def _page_axes(shape: Sequence[int]) -> list[int]:
    axes = [0] if len(shape) >= 2 else []
    if len(shape) >= 4 and shape[0] == _PAIR:
        axes.append(1)
    return axes


def _token_axis(
    shape: Sequence[int], page_axis: int, blocks_per_page: int, spec: LayerSpec
) -> tuple[int, bool]:
    """The axis that counts tokens, and whether its rows can be addressed."""
    axes = list(range(page_axis + 1, len(shape)))
    if len(axes) == 4 and shape[axes[0]] == _PAIR:
        axes = axes[1:]
    if not axes:
        raise LayoutError(
            f"{spec.where}: tensor of shape {list(shape)} has no axis of tokens; this layout is "
            "not supported"
        )
    rows = spec.config_rows or spec.block_size
    if len(axes) > 2 and shape[axes[1]] * blocks_per_page == rows:
        # Another axis stands before the tokens, or may stand there, because a tensor with as many
        # heads as tokens has the same shape.
        return axes[1], False
    return axes[0], True


def _rows_of_tokens(page: PageView, may_divide: bool) -> list[Region] | None:
    """One region per index of the axes outside the tokens; None if rows are not adjacent.

    The page view has a token axis.
    """
    view = page.view
    token_axis = page.token_axis
    assert token_axis is not None
    rows_per_block = view.shape[token_axis]
    row_bytes, outer = _dense(_axes_but(view, page.page_axis, token_axis), view.item_bytes)
    block_stride_bytes = view.strides_bytes[page.page_axis]
    rows_are_adjacent = rows_per_block == 1 or view.strides_bytes[token_axis] == row_bytes
    blocks_are_adjacent = (
        page.blocks_per_page == 1 or block_stride_bytes == rows_per_block * row_bytes
    )
    if not rows_are_adjacent:
        return None
    if not blocks_are_adjacent:
        if not may_divide:
            return None
        # vLLM-Ascend 0.30 puts V of a kernel block behind its K, in models with states.
        whole = replace(page, blocks_per_page=1)
        return [
            replace(
                _region(whole, offset, row_bytes, rows_per_block, False),
                blocks_per_page=page.blocks_per_page,
            )
            for offset in _offsets(outer)
        ]
    return [_region(page, offset, row_bytes, page.num_rows, False) for offset in _offsets(outer)]


def _split(page: PageView, *, is_packed: bool) -> list[Region]:
    """Regions of one row each, as few regions as the gaps in the tensor allow."""
    view = page.view
    blocks = (page.blocks_per_page, view.strides_bytes[page.page_axis])
    num_bytes, outer = _dense([*_axes_but(view, page.page_axis), blocks], view.item_bytes)
    # The axes within a page, by falling stride. The page axis counts the kernel blocks of a page.
    shape = list(view.shape)
    strides = view.strides_bytes
    shape[page.page_axis] = page.blocks_per_page
    falling = sorted(range(len(shape)), key=lambda axis: -strides[axis])
    axes = tuple((axis, shape[axis]) for axis in falling if shape[axis] > 1)
    return [
        replace(_region(page, offset, num_bytes, 1, is_packed), axes=axes)
        for offset in _offsets(outer)
    ]


def _axes_but(view: TensorView, *left_out: int) -> list[tuple[int, int]]:
    """The size and the stride in bytes of every axis that is not left out."""
    axes = enumerate(zip(view.shape, view.strides_bytes, strict=True))
    return [axis for index, axis in axes if index not in left_out]


def _dense(axes: Iterable[tuple[int, int]], item_bytes: int) -> tuple[int, list[tuple[int, int]]]:
    """How many bytes are adjacent, and the axes outside them, by falling stride."""
    by_stride = sorted((axis for axis in axes if axis[0] > 1), key=lambda axis: axis[1])
    dense_bytes = item_bytes
    while by_stride and by_stride[0][1] == dense_bytes:
        dense_bytes *= by_stride.pop(0)[0]
    return dense_bytes, by_stride[::-1]


def _offsets(axes: Iterable[tuple[int, int]]) -> Iterator[int]:
    """The offset in bytes of every index of these axes."""
    return map(sum, itertools.product(*(range(0, size * step, step) for size, step in axes)))


def _region(
    page: PageView, offset_bytes: int, row_bytes: int, num_rows: int, is_packed: bool
) -> Region:
    return Region(
        storage=page.view.storage,
        offset_bytes=page.view.offset_bytes + offset_bytes,
        page_stride_bytes=page.view.strides_bytes[page.page_axis] * page.blocks_per_page,
        row_bytes=row_bytes,
        num_rows=num_rows,
        dtype=page.view.dtype,
        is_packed=is_packed,
    )
