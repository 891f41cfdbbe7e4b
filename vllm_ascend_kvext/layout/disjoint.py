# SPDX-License-Identifier: Apache-2.0
"""Whether planes would write each other's bytes.

Planes of different groups may share bytes of equal page number, as in vllm-ascend's blobs: block
ids come from one pool, so that a page belongs to one group at a time. Every other shared byte is
refused. Cost is that of sorting the regions.

Regions of one storage and one page stride are laid over each other, page on page::

    bytes of the storage    |    page 0     |    page 1     |    page 2     |
    region a, 3 pages        aaaa            aaaa            aaaa
    region b, 2 pages                bbbbbbbb        bbbbbbbb                 first page is 0
    region c, 2 pages                        cccc            cccc             first page is 1

a and b never meet. c meets a, and page 0 of c is page 1 of a: refused.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from vllm_ascend_kvext.layout.errors import LayoutError
from vllm_ascend_kvext.layout.regions import Region


class OwnedRegion(NamedTuple):
    """A region, with the KV cache group and the layer it belongs to."""

    group: int
    layer_name: str
    region: Region


class _Piece(NamedTuple):
    """What a region has of the bytes 0 to ``page_stride_bytes`` of every page.

    A region that crosses the end of a page has two pieces.

    Attributes:
        first_byte: In the page.
        end_byte: Behind the last one.
        first_page: Where the region's page 0 lies, counted in pages from the storage's start.
        owned: The region.
    """

    first_byte: int
    end_byte: int
    first_page: int
    owned: OwnedRegion


def check_disjoint(regions: Iterable[OwnedRegion], num_pages: int) -> None:
    """Refuse planes that would write each other's bytes.

    Args:
        regions: Of every plane; those of one group are distinct.
        num_pages: Pages per plane.

    Raises:
        LayoutError: Naming both layers.
    """
    by_storage: dict[int, list[OwnedRegion]] = defaultdict(list)
    for owned in regions:
        if owned.region.num_bytes > owned.region.page_stride_bytes and num_pages > 1:
            _refuse(owned, owned)
        by_storage[owned.region.storage].append(owned)
    for in_storage in by_storage.values():
        in_storage.sort(key=lambda owned: owned.region.offset_bytes)
        _check_strides(in_storage, num_pages)
        by_stride: dict[int, list[OwnedRegion]] = defaultdict(list)
        for owned in in_storage:
            by_stride[owned.region.page_stride_bytes].append(owned)
        for with_stride in by_stride.values():
            _check_pieces(with_stride, num_pages)


def _check_strides(in_storage: Sequence[OwnedRegion], num_pages: int) -> None:
    """Where pages have different strides, one region must end before the next begins.

    Args:
        in_storage: Regions of one storage, by offset.
        num_pages: Pages per region.
    """
    farthest: tuple[int, OwnedRegion] | None = None
    farthest_of_other_stride: tuple[int, OwnedRegion] | None = None
    for owned in in_storage:
        region = owned.region
        for reached in (farthest, farthest_of_other_stride):
            if reached is None or reached[0] <= region.offset_bytes:
                continue
            if reached[1].region.page_stride_bytes != region.page_stride_bytes:
                _refuse(reached[1], owned)
        end_bytes = region.end_bytes + (num_pages - 1) * region.page_stride_bytes
        stride_bytes = region.page_stride_bytes
        if farthest is None or farthest[1].region.page_stride_bytes == stride_bytes:
            if farthest is None or end_bytes > farthest[0]:
                farthest = end_bytes, owned
        elif end_bytes > farthest[0]:
            farthest, farthest_of_other_stride = (end_bytes, owned), farthest
        elif farthest_of_other_stride is None or end_bytes > farthest_of_other_stride[0]:
            farthest_of_other_stride = end_bytes, owned


def _check_pieces(regions: Iterable[OwnedRegion], num_pages: int) -> None:
    """Sweep over the bytes of a page; regions of one storage and one stride."""
    # By first page, of the pieces so far: the one that reaches farthest, in all and by group.
    reaches: dict[int, _Piece] = {}
    reaches_of_group: dict[tuple[int, int], _Piece] = {}
    first_pages: list[int] = []
    pieces = (piece for owned in regions for piece in _pieces_of(owned))
    for piece in sorted(pieces, key=lambda piece: piece.first_byte):
        index = bisect_left(first_pages, piece.first_page - num_pages + 1)
        while index < len(first_pages) and first_pages[index] < piece.first_page + num_pages:
            first_page = first_pages[index]
            if first_page == piece.first_page:
                index += 1
            elif reaches[first_page].end_byte > piece.first_byte:
                _refuse(reaches[first_page].owned, piece.owned)
            else:
                del first_pages[index]
        key = piece.first_page, piece.owned.group
        before = reaches_of_group.get(key)
        if before is not None and before.end_byte > piece.first_byte:
            _refuse(before.owned, piece.owned)
        reaches_of_group[key] = piece
        farthest = reaches.get(piece.first_page)
        if farthest is None or piece.end_byte > farthest.end_byte:
            reaches[piece.first_page] = piece
        place = bisect_left(first_pages, piece.first_page)
        if place == len(first_pages) or first_pages[place] != piece.first_page:
            insort(first_pages, piece.first_page)


def _pieces_of(owned: OwnedRegion) -> Iterator[_Piece]:
    stride_bytes = owned.region.page_stride_bytes
    first_page, first_byte = divmod(owned.region.offset_bytes, stride_bytes)
    end_byte = first_byte + owned.region.num_bytes
    yield _Piece(first_byte, min(end_byte, stride_bytes), first_page, owned)
    if end_byte > stride_bytes:
        yield _Piece(0, end_byte - stride_bytes, first_page + 1, owned)


def _refuse(one: OwnedRegion, other: OwnedRegion) -> None:
    raise LayoutError(
        f"layers {one.layer_name} and {other.layer_name} (KV cache groups {one.group}, "
        f"{other.group}) share bytes of one storage: at {one.region.offset_bytes} and "
        f"{other.region.offset_bytes}, {one.region.page_stride_bytes} and "
        f"{other.region.page_stride_bytes} bytes per page; this layout is not supported"
    )
